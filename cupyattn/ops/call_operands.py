"""The form of an array, all of it but values: what plans are made for, and calls are known by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupyattn.arrays.interchange import is_cupy
from cupyattn.compiler import modules as compiler
from cupyattn.kernels import ladder
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.row_preparation import BUFFERS
from cupyattn.quant.quantized import QuantizedQKV

#: Buffers of a quantised call, as fields of `QuantizedQKV`.
QUANTIZED = (
    "q_codes", "k_codes", "v", "q_scale", "k_scale", "k_mean", "v_codes", "v_scale", "v_mean",
    "q_zero", "k_zero", "v_zero", "q_code_sum", "k_code_sum", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


def operands_key(
    options: Sequence[Any], operands: Mapping[str, Any], q: Any, *, block_mask: Any = None
) -> Any:
    """Return what a call on CuPy arrays depends on beside their values, None if that is not known.

    Checking, planning and packing depend on the options and on the forms of the arrays alone: a
    call with the same key needs none of it again. Options that are arrays have no key.

    Parameters
    ----------
    options : sequence
        The call's other options, the variant's name first.
    operands : mapping
        What `direct_operands` found.
    q : array or QuantizedQKV
        As the caller gave it.
    block_mask : BlockMask, optional
    """
    key: list[Any] = [*options, ladder.VARIANTS.get(options[0]), compiler.generation()]
    for name, a in operands.items():
        data = a.data
        key += (name, a.shape, a.strides, a.dtype, data.ptr % 16, data.device_id)
    if block_mask is not None:
        key.append(block_mask.blocks)
    if isinstance(q, QuantizedQKV):
        key += (q.group_q, q.group_kv, q.group_v, q.config, q.out_dtype, q.max_len_q, q.max_len_k)
    found = tuple(key)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def direct_operands(
    q: Any,
    k: Any,
    v: Any,
    *,
    block_mask: Any = None,
    rope: Any = None,
    qk_norm: Any = None,
    **added: Any,
) -> dict[str, Any] | None:
    """Return the operands by name where all of them are CuPy arrays, else None."""
    if isinstance(q, QuantizedQKV) and k is None and v is None:
        operands = {name: a for name in QUANTIZED if (a := getattr(q, name)) is not None}
    else:
        operands = {"q": q, "k": k, "v": v}
    for name, a in added.items():
        if a is not None:
            operands[name] = a
    for pair, names in ((rope, BUFFERS[:2]), (qk_norm, BUFFERS[2:])):
        if pair is not None:
            if not (isinstance(pair, tuple) and len(pair) == 2):
                return None
            operands |= zip(names, pair, strict=True)
    if not all(map(is_cupy, operands.values())):
        return None
    if isinstance(block_mask, BlockMask):
        operands["kept_blocks"] = block_mask.kept_blocks(next(iter(operands.values())))
    return operands if block_mask is None or "kept_blocks" in operands else None
