"""The operands of a call as kernels know them, and what a call on CuPy arrays depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.arrays.interchange import as_it_is, is_cupy
from cupyattn.kernels import ladder
from cupyattn.ops.operation import Known
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.row_preparation import BUFFERS
from cupyattn.problem.settings import Settings
from cupyattn.quant.quantized import BUFFERS as QUANTIZED
from cupyattn.quant.quantized import QuantizedQKV

#: Names of the buffers of arguments that are pairs of arrays.
PAIRS = {"rope": BUFFERS[:2], "qk_norm": BUFFERS[2:]}


def known_call(settings: Settings, arrays: Mapping[str, Any]) -> Known | None:
    """Return what a call of `attention` depends on; None where it is not to be remembered.

    Parameters
    ----------
    settings : Settings
    arrays : mapping
        As `cupyattn.problem.settings.parse` names them.
    """
    if settings.check_finite or "out" in arrays:
        return None
    operands = direct_operands(arrays)
    if operands is None:
        return None
    q, block_mask = arrays["q"], arrays.get("block_mask")
    try:
        facts: tuple[Any, ...] = (ladder.VARIANTS.get(settings.variant), settings.types)
    except TypeError:  # a list, which `ladder.lookup` refuses
        return None
    if isinstance(q, QuantizedQKV):
        facts += (
            q.group_q, q.group_kv, q.group_v, q.config, q.out_dtype, q.max_len_q, q.max_len_k,
            q.has_queries,
        )  # fmt: skip
    elif "cu_seqlens_q" in arrays and None in (settings.max_len_q, settings.max_len_k):
        return None  # offsets are looked at
    if block_mask is not None:
        facts += (block_mask.blocks,)
    return Known(operands, facts)


def direct_operands(arrays: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a call's arrays by the buffers of its plan, None where some are no arrays yet,
    or results go to another library."""
    q = arrays["q"]
    if isinstance(q, QuantizedQKV) and q.as_given is not as_it_is:
        return None  # results go to another library
    if isinstance(q, QuantizedQKV) and arrays["k"] is arrays["v"] is None:
        operands = {name: a for name in QUANTIZED if (a := getattr(q, name)) is not None}
        like = q.q_codes
    else:
        operands, like = {"q": q, "k": arrays["k"], "v": arrays["v"]}, q
    if len(arrays) > 3:
        for name, value in list(arrays.items())[3:]:
            if name in PAIRS:
                if not (isinstance(value, tuple) and len(value) == 2):
                    return None
                operands |= zip(PAIRS[name], value, strict=True)
            elif name != "block_mask":
                operands[name] = value
            elif isinstance(value, BlockMask) and is_cupy(like):
                operands["kept_blocks"] = value.kept_blocks(like)
            else:
                return None
    return operands
