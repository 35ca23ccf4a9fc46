"""The arguments of a call of attention as its settings and the arrays that its kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.arrays.interchange import imported, is_cupy
from cupyattn.errors import shown
from cupyattn.kernels import ladder
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.row_preparation import BUFFERS_OF, PAIRS, check_turned_before
from cupyattn.problem.sequences import longest
from cupyattn.problem.settings import Asked, Settings
from cupyattn.quant.quantized import QuantizedQKV


class Arguments(NamedTuple):
    """A call, as `cupyattn.ops.operation.run` takes it.

    Parameters
    ----------
    asked : Asked
    arrays : mapping of str to array
        By the buffers of plans.
    facts : tuple or None
        What the call depends on beside these; None where it is not remembered.
    """

    asked: Asked
    arrays: dict[str, Any]
    facts: tuple[Any, ...] | None


def arguments_of(settings: Settings, given: Mapping[str, Any]) -> Arguments:
    """Return the settings and the arrays of a call of `attention` or `attention_varlen`.

    Parameters
    ----------
    settings : Settings
    given : mapping
        Its arrays and what holds some, as `cupyattn.problem.settings.parse` names them; of another
        call descriptions of arrays.

    Raises
    ------
    ValueError, TypeError
        For what holds no such arrays.
    """
    q, codes, blocks = given["q"], None, (0, 0)
    if isinstance(q, QuantizedQKV):
        _check_beside_codes(q, given)
        arrays, codes = q.buffers, q.facts
        like = q.q_codes
    else:
        arrays, like = {"q": q, "k": given["k"], "v": given["v"]}, q
    if len(given) > 3:
        for name, value in list(given.items())[3:]:
            if name in BUFFERS_OF:
                arrays |= pair_of(name, value)
            elif name == "block_mask":
                arrays["kept_blocks"], blocks = lists_of(value, like), value.blocks
            else:
                arrays["o" if name == "out" else name] = value
    asked = Asked(settings, codes, blocks)
    if "cu_seqlens_q" in given and None in (settings.max_len_q, settings.max_len_k):
        return Arguments(*_with_limits(asked, arrays), None)
    if settings.check_finite:
        return Arguments(asked, arrays, None)
    try:
        return Arguments(asked, arrays, (ladder.VARIANTS.get(settings.variant), settings.types))
    except TypeError:  # a list, which `ladder.lookup` refuses
        return Arguments(asked, arrays, None)


def pair_of(option: str, pair: Any) -> dict[str, Any]:
    """Return the arrays of an option that is a pair, by buffer."""
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        names = ", ".join(PAIRS[option])
        raise TypeError(f"{option} must be a pair ({names}) of arrays, got {shown(pair)}")
    return dict(zip(BUFFERS_OF[option], pair, strict=True))


def lists_of(block_mask: Any, like: Any) -> Any:
    """Return what kernels read of a block mask, beside an operand."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask must be a cupyattn.BlockMask or None, got {shown(block_mask)}"
        )
    if not (is_cupy(like) or isinstance(like, (np.ndarray, Described))):
        like = imported({"q": like})[0]["q"]
    return block_mask.kept_blocks(like)


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


def _with_limits(asked: Asked, arrays: dict[str, Any]) -> tuple[Asked, dict[str, Any]]:
    """Return a call with the longest lengths of its sequences, which offsets are looked at for."""
    settings = asked.of_call
    found: dict[str, Any] = {}
    for name in "qk":
        offsets = arrays.get(f"cu_seqlens_{name}")
        if getattr(settings, f"max_len_{name}") is None and offsets is not None:
            own, _ = imported({name: arrays[name], f"cu_seqlens_{name}": offsets})
            rows, offsets = own.values()
            total = rows.shape[0] if rows.ndim == 3 else None
            found[f"max_len_{name}"] = longest(name, offsets, total)
    return asked._replace(of_call=settings._replace(**found)), arrays
