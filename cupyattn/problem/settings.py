"""What a call of attention asks for: settings, which can be compared, and arrays by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.row_preparation import EPS, OPTIONS, PAIRS
from cupyattn.problem.score_options import ScoreOptions
from cupyattn.quant.config import QuantConfig

#: Arguments of `cupyattn.attention` and `attention_varlen` that are arrays or hold some, beside
#: q, k and v.
ARRAYS = (
    "mask", "bias", "rope", "qk_norm", "block_mask", "cu_seqlens_q", "cu_seqlens_k", "lengths_q",
    "lengths_kv", "out",
)  # fmt: skip

#: Settings that say which keys a row attends to, by its place and theirs.
PLACES = ("causal", "causal_align", "window")


class Settings(NamedTuple):
    """The other arguments of `cupyattn.attention` and `attention_varlen`, which document them."""

    variant: str = "auto"
    accuracy: str = "full"
    scale: float | None = None
    causal: bool = False
    causal_align: str = "bottom-right"
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    rope_interleaved: bool = False
    rope_offset_q: int = 0
    qk_norm_eps: float = EPS
    layout: str = "BHSD"
    return_lse: bool = False
    quant: QuantConfig | None = None
    tiles: Tiles | None = None
    arch: str | None = None
    backend: str | None = None
    check_finite: bool = False
    max_len_q: int | None = None
    max_len_k: int | None = None

    @property
    def odd_types(self) -> tuple[type, ...]:
        """Types of the settings and of the window's sides; () where numbers have their own types.

        Settings of other types may be equal and mean something else: 1 is True, yet ``causal=1`` is
        refused. What remembers calls by their settings takes these types beside them.
        """
        # NOTE: every call comes here. To list all types would take three times as long.
        (
            scale, causal, _, window, softcap, turned, offset, eps, _, lse, _, _, _, _, finite,
            len_q, len_k,
        ) = self[2:]  # fmt: skip
        pair = type(window) is tuple and len(window) == 2
        left, right = window if pair else (None, None)
        if (
            (causal is False or causal is True)
            and (lse is False or lse is True)
            and (turned is False or turned is True)
            and (finite is False or finite is True)
            and (scale is None or isinstance(scale, float))
            and type(softcap) is type(eps) is float
            and type(offset) is type(left) is type(right) is int
            and (len_q is None or type(len_q) is int)
            and (len_k is None or type(len_k) is int)
        ):
            return ()
        return (*map(type, self), type(left), type(right))

    @property
    def places(self) -> dict[str, Any]:
        """Those of `PLACES`."""
        return {name: getattr(self, name) for name in PLACES}

    def scores(self, arrays: Mapping[str, Any]) -> ScoreOptions:
        """Return what changes and masks scores, arrays by name among it."""
        given = (arrays.get(name) for name in ("mask", "bias", "block_mask"))
        return ScoreOptions(self.causal, self.causal_align, self.window, self.softcap, *given)

    def rows(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return what happens to rows of Q and K first, `OPTIONS` of `row_preparation` by name."""
        return {n: arrays.get(n) if n in PAIRS else getattr(self, n) for n in OPTIONS}

    @property
    def without_rung(self) -> Settings:
        """The same scores for the gradients, which have a rung of their own and read lse."""
        return self._replace(
            variant="fa_tc", accuracy="full", quant=None, tiles=None, check_finite=False,
            return_lse=True, qk_norm_eps=EPS,
        )  # fmt: skip


def parse(
    function: str, q: Any, k: Any, v: Any, options: Mapping[str, Any]
) -> tuple[Settings, dict[str, Any]]:
    """Tell settings and arrays of a call apart.

    Parameters
    ----------
    function : str
        Whose arguments they are, for the message.
    q, k, v : array, or q a QuantizedQKV and k, v None
    options : mapping
        Keyword arguments of `cupyattn.attention` or `attention_varlen`.

    Returns
    -------
    settings : Settings
    arrays : dict
        ``q``, ``k``, ``v`` and those of `ARRAYS` that are given.

    Raises
    ------
    TypeError
        For an argument that there is not.

    Examples
    --------
    >>> settings, arrays = parse("plan", "q", "k", "v", {"causal": True, "mask": None})
    >>> settings.causal, sorted(arrays)
    (True, ['k', 'q', 'v'])
    """
    arrays = {"q": q, "k": k, "v": v}
    others = {}
    for name, value in options.items():
        if name in ARRAYS:
            if value is not None:
                arrays[name] = value
        elif name in Settings._fields:
            others[name] = value
        else:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return Settings(**others), arrays


def of_arguments(arguments: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Return settings and arrays of a call, found among all arguments of a function.

    Parameters
    ----------
    arguments : mapping
        ``q``, ``k``, ``v``, options of `cupyattn.attention` by their names, and others, which are
        left out: ``locals()`` of a function that has them in its signature.

    Examples
    --------
    >>> def bound(q, k, v, *, causal=False, mask=None, rows=None):
    ...     return of_arguments(locals())
    >>> settings, arrays = bound("q", "k", "v", causal=True, rows=[0])
    >>> settings.causal, sorted(arrays)
    (True, ['k', 'q', 'v'])
    """
    known = {n: x for n, x in arguments.items() if n in ARRAYS or n in Settings._fields}
    return parse("attention", arguments["q"], arguments["k"], arguments["v"], known)
