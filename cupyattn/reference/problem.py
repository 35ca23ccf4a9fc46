"""The mirror of a problem: of the whole call, or of each of its packed sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.problem.attention import AttentionProblem, KernelCall
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.checks import with_lengths
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.sequences import LENGTHS, SEQUENCES
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.packed import cut_entry
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.reference import attention
from cupyattn.reference.quantize import quantize_mirror

#: Masks that are arrays of numbers for each score.
OF_NUMBERS = ("mask", "bias")


def run_mirror(problem: AttentionProblem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Run a call on the mirror; return the results in the caller's layout.

    The caller's ``out`` receives O. `arrays` are the operands of the problem, by buffer.
    """
    call, whole = problem.call, _whole(problem, arrays)
    if call.own_lengths is None:
        o, lse = _mirror(problem, whole)
    else:
        o = np.zeros(call.output_shape, STORAGE[call.dtype])
        lse = np.full(call.lse_shape, -np.inf, np.float32)
        lse_rows = lse.reshape(o.shape[:3])
        entries = (_sequences if call.packed else _padded_entries)(problem, whole, arrays)
        for place, entry in entries:
            o[place], lse_rows[place] = _mirror(problem, entry)
    found = {}
    if "o" in problem.received:
        arrays["o"][...] = o
    else:
        o = to_bhsd(o, problem.settings.layout)
        found["o"] = np.array(o[0] if call.packed else o, order="C")
    return found | ({"lse": lse} if call.return_lse else {})


def _whole(problem: AttentionProblem, arrays: Mapping[str, Any]) -> KernelCall:
    """Return a call with its arrays, all of its entries together."""
    z, preparation, settings = problem.quantized, problem.preparation, problem.settings
    if settings.quant is not None:
        settings = settings._replace(quant=settings.quant.with_scales(arrays))
    rows = {name: None if z else arrays[name] for name in "qkv"}
    return KernelCall(
        problem.kernel, settings, {**rows, **masks_of(problem, arrays)},
        None if z is None else QuantizedQKV.of_buffers(z.facts, arrays),
        None if preparation is None else preparation.with_arrays(arrays),
    )  # fmt: skip


def masks_of(problem: AttentionProblem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return mask, bias and block mask of a call by name; None where it has none."""
    block_mask = None
    if "kept_blocks" in arrays:
        block_mask = BlockMask.of_kept(arrays["kept_blocks"], problem.call.block_mask)
    return {"mask": arrays.get("mask"), "bias": arrays.get("bias"), "block_mask": block_mask}


def corner_of(
    masks: Mapping[str, Any], number: int, len_q: int, len_kv: int
) -> dict[str, Any]:
    """Return `masks_of` an entry's first rows and keys: its top left corner."""
    corner = slice(number, number + 1), slice(None), slice(len_q), slice(len_kv)
    found = {name: None if masks[name] is None else masks[name][corner] for name in OF_NUMBERS}
    block_mask = masks["block_mask"]
    if block_mask is not None:
        block_mask = block_mask.corner(number, len_q, len_kv)
    return {**found, "block_mask": block_mask}


def _sequences(
    problem: AttentionProblem, whole: KernelCall, arrays: Mapping[str, Any]
) -> Iterator[tuple[tuple[slice, ...], KernelCall]]:
    """Yield every packed sequence: its place in O, and its operands as a separate call."""
    pairs = zip(*(pairwise(arrays[name]) for name in SEQUENCES), strict=True)
    coded = None if whole.quantized is None else list(whole.quantized.sequences())
    for number, (q_ends, k_ends) in enumerate(pairs):
        rows, keys = (slice(None), slice(None), slice(*q_ends)), slice(*k_ends)
        lengths = int(q_ends[1] - q_ends[0]), int(k_ends[1] - k_ends[0])
        yield rows, _cut(
            whole, number, lengths, rows, (slice(None), slice(None), keys),
            None if coded is None else coded[number],
        )  # fmt: skip


def _padded_entries(
    problem: AttentionProblem, whole: KernelCall, arrays: Mapping[str, Any]
) -> Iterator[tuple[tuple[slice, ...], KernelCall]]:
    """Yield every padded batch entry that has queries: its place in O, and the rows that count as a
    call of their own."""
    call = problem.call
    for number in range(call.batch):
        len_q, len_kv = (
            min(max(int(arrays[name][number]), 0), most) if name in arrays else most
            for name, most in zip(LENGTHS, (call.len_q, call.len_kv), strict=True)
        )
        if not len_q:
            continue
        one, coded = slice(number, number + 1), whole.quantized
        rows, keys = (one, slice(None), slice(len_q)), (one, slice(None), slice(len_kv))
        if coded is not None:
            coded = cut_entry(coded, number, len_q, len_kv)
        yield rows, _cut(whole, number, (len_q, len_kv), rows, keys, coded)


def _cut(
    whole: KernelCall,
    number: int,
    lengths: tuple[int, int],
    rows: tuple[slice, ...],
    keys: tuple[slice, ...],
    coded: QuantizedQKV | None,
) -> KernelCall:
    """Return one entry, whose rows and keys lie at these places: of masks its top left corner."""
    settings, quant = whole.settings, whole.settings.quant
    cut = {
        name: None if x is None else x[at]
        for name, x, at in zip("qkv", whole.rows, (rows, keys, keys), strict=True)
    }
    if quant is not None:
        settings = settings._replace(quant=quant.of_entry(number))
    call = replace(whole.kernel.call, batch=1, packed=None, padded=None)
    kernel = replace(whole.kernel, call=with_lengths(call, *lengths, **settings.places))
    arrays = {**cut, **corner_of(whole.arrays, number, *lengths)}
    return replace(whole, kernel=kernel, settings=settings, arrays=arrays, quantized=coded)


def _mirror(problem: AttentionProblem, one: KernelCall) -> tuple[Any, Any]:
    """Return O and the log-sum-exp of a call, or of one sequence, as a kernel computes them."""
    if problem.variant.family == "int8":
        coded = one.quantized
        if coded is None:
            quant = one.settings.quant or QuantConfig()
            coded = quantize_mirror(
                *one.rows, quant, problem.scale_tiles, preparation=one.preparation
            )
            coded = coded.in_nibbles() if quant.qk_bits == 4 else coded
        one = replace(one, quantized=coded, preparation=None)
    o, lse, _ = attention.run_kernel(one)
    return o, lse
