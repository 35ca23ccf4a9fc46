"""The mirror of a problem: of the whole call, or of each of its packed sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.checks import AttentionSpec, with_lengths
from cupyattn.problem.form import Kernel
from cupyattn.problem.received import Received
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.row_preparation import Preparation
from cupyattn.problem.sequences import LENGTHS, SEQUENCES
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.packed import cut_entry
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.reference import attention
from cupyattn.reference.quantize import quantize_mirror


@dataclass(frozen=True)
class Entry:
    """Operands of a call, or of one of its entries with lengths of their own, in layout BHSD."""

    q: Any
    k: Any
    v: Any
    quantized: QuantizedQKV | None
    quant: QuantConfig | None
    mask: Any
    bias: Any
    block_mask: BlockMask | None


def run_mirror(problem: AttentionProblem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Run a call on the mirror; return what it makes, in the caller's layout.

    The caller's ``out`` receives O. `arrays` are those of the problem, by buffer.
    """
    call, kernel, whole = problem.call, problem.kernel, entry_of(problem, arrays)
    preparation = problem.preparation
    if preparation is not None:
        preparation = preparation.with_arrays(arrays)
    if call.own_lengths is None:
        o, lse = _mirror(problem, kernel, whole, preparation)
    else:
        o = np.zeros(call.output_shape, STORAGE[call.dtype])
        lse = np.full(call.lse_shape, -np.inf, np.float32)
        lse_rows = lse.reshape(o.shape[:3])
        entries = (_sequences if call.packed else _padded_entries)(problem, whole, arrays)
        for place, entry in entries:
            own = replace(kernel, call=_own_call(kernel.call, problem, entry))
            o[place], lse_rows[place] = _mirror(problem, own, entry, preparation)
    found = {}
    if "o" in problem.received:
        arrays["o"][...] = o
    else:
        o = to_bhsd(o, problem.settings.layout)
        found["o"] = np.array(o[0] if call.packed else o, order="C")
    return found | ({"lse": lse} if call.return_lse else {})


def entry_of(problem: AttentionProblem, arrays: Mapping[str, Any]) -> Entry:
    """Return the operands of a call, all of its entries together."""
    z, block_mask = problem.quantized, None
    if "kept_blocks" in arrays:
        block_mask = BlockMask.of_kept(arrays["kept_blocks"], problem.call.block_mask)
    q, k, v = (None if z else arrays[name] for name in "qkv")
    return Entry(
        q, k, v, None if z is None else QuantizedQKV.of_buffers(z.facts, arrays),
        problem.settings.quant, arrays.get("mask"), arrays.get("bias"), block_mask,
    )  # fmt: skip


def _sequences(
    problem: AttentionProblem, whole: Entry, arrays: Mapping[str, Any]
) -> Iterator[tuple[tuple[slice, ...], Entry]]:
    """Yield every packed sequence: its place in O, and its operands as a call of its own."""
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
    problem: AttentionProblem, whole: Entry, arrays: Mapping[str, Any]
) -> Iterator[tuple[tuple[slice, ...], Entry]]:
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
    whole: Entry,
    number: int,
    lengths: tuple[int, int],
    rows: tuple[slice, ...],
    keys: tuple[slice, ...],
    coded: QuantizedQKV | None,
) -> Entry:
    """Return one entry, whose rows and keys lie at these places: of masks its top left corner."""
    quant = whole.quant
    q, k, v = (
        None if x is None else x[at]
        for x, at in zip((whole.q, whole.k, whole.v), (rows, keys, keys), strict=True)
    )
    return Entry(
        q, k, v, coded, None if quant is None else quant.of_entry(number),
        **scoring_of(whole, number, *lengths),
    )  # fmt: skip


def scoring_of(whole: Entry, number: int, len_q: int, len_kv: int) -> dict[str, Any]:
    """Return mask, bias and block mask of an entry's first rows and keys: its top left corner."""
    corner = slice(number, number + 1), slice(None), slice(len_q), slice(len_kv)
    masks = {"mask": whole.mask, "bias": whole.bias}
    found = {name: None if a is None else a[corner] for name, a in masks.items()}
    block_mask = whole.block_mask
    if block_mask is not None:
        block_mask = block_mask.corner(number, len_q, len_kv)
    return {**found, "block_mask": block_mask}


def _own_call(call: AttentionSpec, problem: AttentionProblem, entry: Entry) -> AttentionSpec:
    """Return what is computed for one entry with lengths of its own."""
    alone, coded = replace(call, batch=1, packed=None, padded=None), entry.quantized
    lengths = (
        (entry.q.shape[2], entry.k.shape[2]) if coded is None else (coded.len_q, coded.len_kv)
    )
    return with_lengths(alone, *lengths, **problem.settings.places)


def _mirror(
    problem: AttentionProblem, kernel: Kernel, entry: Entry, preparation: Preparation | None
) -> tuple[Any, Any]:
    """Return O and the log-sum-exp of a call, or of one sequence, as a kernel computes them."""
    coded = entry.quantized
    if problem.variant.family == "int8":
        if coded is None:
            quant = entry.quant or QuantConfig()
            coded = quantize_mirror(
                entry.q, entry.k, entry.v, quant, problem.scale_tiles, preparation=preparation
            )
            coded = coded.in_nibbles() if quant.qk_bits == 4 else coded
        preparation = None
    arrays, scores = (entry.q, entry.k, entry.v), problem.settings.scores(vars(entry))
    o, lse, _ = attention.run_kernel(Received(kernel, arrays, scores, coded, preparation))
    return o, lse
