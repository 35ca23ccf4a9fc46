"""The arguments of a call of attention as its settings and the arrays that its kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.errors import shown
from cupyattn.kernels import ladder
from cupyattn.ops.operation import ARRAYS, Library
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.row_preparation import BUFFERS_OF, PAIRS, check_turned_before
from cupyattn.problem.sequences import longest
from cupyattn.problem.settings import Asked, Settings
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV

#: Arguments that the codes of a `QuantizedQKV` replace.
_ROWS = ("q", "k", "v")


def named(q: Any, k: Any, v: Any, **others: Any) -> dict[str, Any]:
    """Return the arrays of a call by name, without the absent ones."""
    arrays = {"q": q, "k": k, "v": v}
    for name, array in others.items():
        if array is not None:
            arrays[name] = array
    return arrays


def arguments_of(
    settings: Settings, given: Mapping[str, Any], library: Library = ARRAYS
) -> tuple[Asked, dict[str, Any], tuple[Any, ...] | None]:
    """Return the settings and the arrays of a call of `attention` or `attention_varlen`.

    Parameters
    ----------
    settings : Settings
    given : mapping
        Its arrays and containers of arrays, by the names of `cupyattn.problem.settings.parse`.
        Descriptions are accepted, too.
    library : Library
        Library of the arrays.

    Returns
    -------
    asked : Asked
    arrays : dict of str to array
        By the buffers of plans.
    facts : tuple or None
        Everything else the key of the call must contain; None if the call is not remembered.

    Raises
    ------
    ValueError, TypeError
        For arguments that contain no such arrays.
    """
    q, codes, blocks = given["q"], None, (0, 0)
    if isinstance(q, QuantizedQKV):
        _check_beside_codes(q, given)
        arrays, codes = q.buffers, q.facts
        like = q.q_codes
    else:
        arrays, like = {"q": q, "k": given["k"], "v": given["v"]}, q
    if len(given) > 3:
        for name, value in given.items():
            if name in _ROWS:
                continue
            if name in BUFFERS_OF:
                arrays |= pair_of(name, value)
            elif name == "block_mask":
                if not isinstance(value, BlockMask):
                    raise TypeError(
                        f"block_mask must be a cupyattn.BlockMask or None, got {shown(value)}"
                    )
                arrays["kept_blocks"] = value.kept_blocks(library.beside(like))
                blocks = value.blocks
            else:
                arrays["o" if name == "out" else name] = value
    quant = settings.quant
    if codes is None and isinstance(quant, QuantConfig) and type(quant.scales) is tuple:
        settings = settings._replace(quant=quant.described)
        arrays |= scales_of(quant, arrays, settings.layout, library)
    unlimited = "cu_seqlens_q" in given and None in (settings.max_len_q, settings.max_len_k)
    if unlimited:
        settings = with_limits(settings, arrays, library)
    asked = Asked(settings, codes, blocks)
    if unlimited or settings.check_finite:
        return asked, arrays, None
    try:
        return asked, arrays, (ladder.VARIANTS.get(settings.variant), settings.types)
    except TypeError:  # a list, which `ladder.lookup` refuses
        return asked, arrays, None


def scales_of(
    quant: QuantConfig, arrays: Mapping[str, Any], layout: str, library: Library = ARRAYS
) -> dict[str, Any]:
    """Return the caller's scales by buffer, on the device of q; none if scales are dynamic."""
    if not quant.static:
        return {}
    heads, entries = 1 if layout == "BHSD" else 2, []
    for name in "qk":
        shape: tuple[int, ...] = tuple(getattr(arrays[name], "shape", ()))
        entries.append((shape[0], shape[heads]) if len(shape) == 4 else ())
    of_q, of_k = entries
    return quant.scales_beside(library.beside(arrays["q"]), (of_q, of_k))


def pair_of(option: str, pair: Any) -> dict[str, Any]:
    """Return the arrays of an option that is a pair, by buffer."""
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        names = ", ".join(PAIRS[option])
        raise TypeError(f"{option} must be a pair ({names}) of arrays, got {shown(pair)}")
    return dict(zip(BUFFERS_OF[option], pair, strict=True))


def _check_beside_codes(z: QuantizedQKV, given: Mapping[str, Any]) -> None:
    """Raise for arguments that quantised operands bring themselves."""
    if given["k"] is not None or given["v"] is not None:
        raise ValueError(
            "a QuantizedQKV carries q, k, v and their config: give no k, v or quant beside it"
        )
    if "rope" in given or "qk_norm" in given:
        check_turned_before(z)
    if "cu_seqlens_q" in given or "cu_seqlens_k" in given:
        raise ValueError(
            "a QuantizedQKV says itself where its sequences begin: give no cu_seqlens_q or "
            "cu_seqlens_k beside it"
        )


def with_limits(settings: Any, arrays: Mapping[str, Any], library: Library = ARRAYS) -> Any:
    """Return settings with the longest lengths of sequences, read from the offsets."""
    found: dict[str, Any] = {}
    for name in "qk":
        limit, offsets = f"max_len_{name}", f"cu_seqlens_{name}"
        if getattr(settings, limit) is None and offsets in arrays:
            shape: tuple[int, ...] = getattr(arrays[name], "shape", ())
            values = library.read({offsets: arrays[offsets]})[offsets]
            total = shape[0] if len(shape) == 3 else None
            found[limit] = longest(name, values, total)
    return settings._replace(**found)
