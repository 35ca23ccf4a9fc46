"""The arguments of a call of attention: types of options, comparable settings, arrays by name."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, ParamSpec, TypedDict, TypeVar

import numpy as np

from cupyattn.compiler.architectures import E4M3_CAPABILITY, check_arch, check_capability
from cupyattn.errors import shown
from cupyattn.kernels.limits import check_shapes
from cupyattn.kernels.tiles import Tiles, check_kind
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.checks import AttentionSpec, check_dtype, check_options
from cupyattn.problem.row_preparation import EPS, OPTIONS, PAIRS
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import CodeFacts

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = Any  # annotations are not evaluated, and Python 3.10 lacks the name

P = ParamSpec("P")
R = TypeVar("R")

#: Arguments of `cupyattn.attention` and `attention_varlen`, other than q, k and v, that are or
#: contain arrays.
ARRAYS = (
    "mask", "bias", "rope", "qk_norm", "block_mask", "cu_seqlens_q", "cu_seqlens_k", "lengths_q",
    "lengths_kv", "out",
)  # fmt: skip

#: Settings that say which keys a row attends to, by its place and theirs.
PLACES = ("causal", "causal_align", "window")

#: Number of remembered calls (`cupyattn.runtime.recent`), and of settings of such calls.
MOST_REMEMBERED = 1024

#: Accuracy classes. Each also allows the arithmetic of the classes before it.
ACCURACIES = ("full", "balanced", "aggressive")

#: The window of a call without a limit of distance.
NO_WINDOW = (-1, -1)


class Settings(NamedTuple):
    """The other arguments of `cupyattn.attention` and `attention_varlen`, which document them."""

    variant: str = "auto"
    accuracy: str = "full"
    scale: float | None = None
    causal: bool = False
    causal_align: str = "bottom-right"
    window: tuple[int, int] = NO_WINDOW
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
    qk_norm_split: int = 0

    @property
    def types(self) -> tuple[type, ...]:
        """Types of the settings and of the window's sides, which `interned` ones have compared.

        Settings of other types may be equal and yet differ in meaning: 1 == True, but ``causal=1``
        is refused. Caches of calls therefore include these types in their keys.
        """
        sides = self.window if isinstance(self.window, tuple) else ()
        return (*map(type, self), *map(type, sides))

    @property
    def places(self) -> dict[str, Any]:
        """The settings named in `PLACES`."""
        return {name: getattr(self, name) for name in PLACES}

    def scores(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that change and mask scores: `MaskedOptions` without the scale."""
        given = {name: arrays.get(name) for name in ("mask", "bias", "block_mask")}
        return {**self.places, "softcap": self.softcap, **given}

    def rows(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that prepare rows of Q and K: `row_preparation.OPTIONS`, by name."""
        return {n: arrays.get(n) if n in PAIRS else getattr(self, n) for n in OPTIONS}

    @property
    def without_rung(self) -> Settings:
        """Return the same scores for the gradients, which have a separate kernel and read lse."""
        return self._replace(
            variant="fa_tc", accuracy="full", quant=None, tiles=None, check_finite=False,
            return_lse=True,
        )  # fmt: skip


class Asked(NamedTuple):
    """The arguments of a call of attention, except the arrays that its kernels read.

    Parameters
    ----------
    of_call : Settings
    codes : CodeFacts, optional
        Facts about operands that are already quantised.
    blocks : (int, int)
        Rows and keys of a block of the block mask; (0, 0) without one.
    """

    of_call: Settings
    codes: CodeFacts | None = None
    blocks: tuple[int, int] = (0, 0)


def check_settings(settings: Settings) -> None:
    """Raise for settings that no call has."""
    check_kind(settings.tiles)
    if settings.quant is not None and not isinstance(settings.quant, QuantConfig):
        raise TypeError(
            f"quant must be a cupyattn.QuantConfig or None, got {shown(settings.quant)}"
        )
    for name in ("causal", "return_lse", "check_finite"):
        check_switch(name, getattr(settings, name))
    check_accuracy(settings.accuracy)
    check_arch(settings.arch)
    if settings.arch is not None and settings.quant is not None and settings.quant.pv == "fp8":
        check_capability(settings.arch, E4M3_CAPABILITY)
    if settings.layout not in ("BHSD", "BSHD"):
        raise ValueError(f"layout must be 'BHSD' or 'BSHD', got {shown(settings.layout)}")


def check_accuracy(accuracy: Any) -> None:
    """Raise ValueError unless there is an accuracy class of that name."""
    if accuracy not in ACCURACIES:
        raise ValueError(
            f"accuracy must be 'full', 'balanced' or 'aggressive', got {shown(accuracy)}"
        )


def check_switch(name: str, value: Any) -> None:
    """Raise TypeError unless a setting is True or False; None counts as False."""
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


class _Interned(Settings):
    """Settings that are compared by identity.

    Attributes
    ----------
    given : tuple
        Arguments of `interned`, under which `accept` stores the settings.
    """

    given: tuple[Any, ...]
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__
    _make = Settings._make  # type: ignore[assignment]  # with other values: plain settings
    types: ClassVar[tuple[type, ...]] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return interned, self.given  # a copy finds the settings that were accepted


def interned(*values: Any) -> Settings:
    """Return the settings that `accept` was given of equal values and the same types.

    A repeated call then finds its settings by one look-up, which compares types, too. Settings are
    stored only after they are accepted, so nothing of a refused call is kept.

    Parameters
    ----------
    *values
        Fields of `Settings`, in order, at least as far as the window. Plain settings are returned
        if some cannot be hashed, and for a window that is no pair of Python's integers.

    Examples
    --------
    >>> one = interned(*Settings(scale=1.0))
    >>> accept(one)
    >>> same, other = (interned(*Settings(scale=x)) for x in (1.0, True))
    >>> one is same, one == other, Settings(*one) == Settings(*other)
    (True, False, True)
    """
    window = values[5]
    # NOTE: types within the window are no part of the look-up.
    if window is NO_WINDOW or (
        type(window) is tuple and len(window) == 2 and type(window[0]) is type(window[1]) is int
    ):
        try:
            return _accepted(*values)
        except _NotAcceptedError:
            made = _Interned(*values)
            made.given = values
            return made
        except TypeError:  # a list, or an array
            pass
    return Settings(*values)


class _NotAcceptedError(LookupError):
    """No call with these settings was remembered."""


_offered = threading.local()


@functools.lru_cache(maxsize=MOST_REMEMBERED, typed=True)
def _accepted(*values: Any) -> Settings:
    offered: Settings | None = getattr(_offered, "settings", None)
    if offered is None:
        raise _NotAcceptedError  # which is not cached
    return offered


def accept(facts: Any) -> None:
    """Keep settings for `interned`, now that a call with them has passed all checks.

    Parameters
    ----------
    facts : object
        Settings, or a tuple of facts, nested or not, that holds some.
    """
    if isinstance(facts, _Interned):
        _offered.settings = facts
        try:
            _accepted(*facts.given)
        finally:
            del _offered.settings
    elif isinstance(facts, tuple):
        for fact in facts:
            accept(fact)


def parse(
    function: str, q: Any, k: Any, v: Any, options: Mapping[str, Any]
) -> tuple[Settings, dict[str, Any]]:
    """Tell settings and arrays of a call apart.

    Parameters
    ----------
    function : str
        Name of the called function, for the message.
    q, k, v : array, or q a QuantizedQKV and k, v None
    options : mapping
        Keyword arguments of `cupyattn.attention` or `attention_varlen`.

    Returns
    -------
    settings : Settings
    arrays : dict
        ``q``, ``k``, ``v`` and the given arrays named in `ARRAYS`.

    Raises
    ------
    TypeError
        For an unknown argument.

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


def check_attention(q: Any, k: Any, v: Any, **options: Any) -> AttentionSpec:
    """Check three arrays of layout (batch, heads, len, head_dim) and the options of a call.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        float16, bfloat16 or float32, all of the same dtype.
    **options
        As for `cupyattn.attention`; only options that change or mask scores matter.

    Returns
    -------
    AttentionSpec

    Raises
    ------
    TypeError
        For another or a mixed dtype.
    ValueError
        If shapes do not fit together, or a scale, alignment, window or softcap is invalid.
    UnsupportedError
        For sizes that the kernels do not support.
    """
    settings, arrays = parse("check_attention", q, k, v, options)
    sizes = check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    return check_options(
        sizes, check_dtype(q, k, v), settings.scale, settings.scores(arrays),
        return_lse=settings.return_lse,
    )  # fmt: skip


def of_arguments(arguments: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Return settings and arrays of a call, found among all arguments of a function.

    Parameters
    ----------
    arguments : mapping
        ``locals()`` of a function with ``q``, ``k``, ``v`` and options of `cupyattn.attention` in
        its signature, by name or under ``options``. Other names are ignored.

    Examples
    --------
    >>> def bound(q, k, v, *, causal=False, rows=None, **options):
    ...     return of_arguments(locals())
    >>> settings, arrays = bound("q", "k", "v", causal=True, rows=[0])
    >>> settings.causal, sorted(arrays)
    (True, ['k', 'q', 'v'])
    """
    known = {n: x for n, x in arguments.items() if n in ARRAYS or n in Settings._fields}
    known |= arguments.get("options", {})
    return parse("attention", arguments["q"], arguments["k"], arguments["v"], known)


class PlaceOptions(TypedDict, total=False):
    """Options that need no arrays: factor and cap of the scores, and the keys of a row."""

    scale: float | None
    causal: bool
    causal_align: str
    window: tuple[int, int]
    softcap: float


class BlockOptions(TypedDict, total=False):
    """The option that drops blocks of scores."""

    block_mask: BlockMask | None


class MaskedOptions(PlaceOptions, BlockOptions, total=False):
    """Options that change or mask scores."""

    mask: Any
    bias: Any


class PositionOptions(TypedDict, total=False):
    """Options that say how tables turn queries and keys."""

    rope_interleaved: bool
    rope_offset_q: int


class TurnedOptions(MaskedOptions, PositionOptions, total=False):
    """Options of scores, with rotary embedding of queries and keys."""

    rope: Any


class RowOptions(TypedDict, total=False):
    """Options for the layout of rows and for their normalisation."""

    qk_norm_eps: float
    qk_norm_split: int
    layout: str


class LengthOptions(TypedDict, total=False):
    """Options that say how many rows of padded entries count."""

    lengths_q: Any
    lengths_kv: Any


class PaddedOptions(MaskedOptions, LengthOptions, total=False):
    """Options of scores, with lengths of padded entries."""


class ProblemOptions(TurnedOptions, RowOptions, LengthOptions, total=False):
    """Options that decide the exact result."""

    qk_norm: Any


class RunOptions(TypedDict, total=False):
    """Options that say where a call runs."""

    arch: str | None
    backend: str | None


class KernelOptions(RunOptions, total=False):
    """Options that choose the kernel and its results."""

    variant: str
    accuracy: str
    return_lse: bool
    quant: QuantConfig | None
    tiles: Tiles | None


class AttentionOptions(ProblemOptions, KernelOptions, total=False):
    """All options of `cupyattn.attention`."""

    out: Any
    check_finite: bool


class CallOptions(AttentionOptions, total=False):
    """All options of `cupyattn.attention` and of `cupyattn.attention_varlen`."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_len_q: int | None
    max_len_k: int | None


class ModuleOptions(
    PlaceOptions, KernelOptions, BlockOptions, PositionOptions, RowOptions, total=False
):
    """Options of `cupyattn.interop.torch.Attention`; its only array is the block mask."""


class ShardedGradientOptions(PlaceOptions, RunOptions, total=False):
    """Options of the gradients of attention on several ranks."""


class ShardedOptions(PlaceOptions, KernelOptions, total=False):
    """Options of attention on several ranks."""


def parameters(options: str) -> list[inspect.Parameter]:
    """Return the keyword arguments that an annotation stands for, with the defaults of `Settings`.

    Parameters
    ----------
    options : str
        Annotation of ``**options``, such as "Unpack[MaskedOptions]".

    Examples
    --------
    >>> print(*parameters("Unpack[PlaceOptions]")[-2:], sep=", ")
    window: 'tuple[int, int]' = (-1, -1), softcap: 'float' = 0.0
    """
    fields = globals()[options.removeprefix("Unpack[").removesuffix("]")].__annotations__
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=Settings._field_defaults.get(name),
            annotation=kind.__forward_arg__,
        )
        for name, kind in fields.items()
    ]  # fmt: skip


def takes_options(function: Callable[P, R]) -> Callable[P, R]:
    """Show the options of a function one by one in its signature, and refuse all others.

    Parameters
    ----------
    function : callable
        Its last argument is ``**options``, annotated with `Unpack` of a class of this module.
    """
    signature = inspect.signature(function)
    *own, options = signature.parameters.values()
    shown = signature.replace(parameters=[*own, *parameters(options.annotation)])

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in shown.parameters:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                )
        return function(*args, **kwargs)

    called.__signature__ = shown  # type: ignore[attr-defined]
    return called
