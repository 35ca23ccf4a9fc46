"""The mirror of a request: of the whole call, or of each of its packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.checks import with_lengths
from cupyattn.problem.form import Kernel
from cupyattn.problem.received import Received
from cupyattn.problem.request import Request
from cupyattn.problem.resolve import to_bhsd
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


def run_mirror(request: Request) -> dict[str, Any]:
    """Run a request on the mirror; return what it makes, in the caller's layout.

    The caller's ``out`` receives O.
    """
    call, kernel = request.call, request.kernel
    if call.own_lengths is None:
        whole = Entry(
            request.q, request.k, request.v, request.quantized, request.settings.quant,
            request.mask, request.bias, request.block_mask,
        )  # fmt: skip
        o, lse = _mirror(request, kernel, whole)
    else:
        o = np.zeros(call.output_shape, STORAGE[call.dtype])
        lse = np.full(call.lse_shape, -np.inf, np.float32)
        lse_rows = lse.reshape(o.shape[:3])
        entries = _sequences(request) if call.packed else _padded_entries(request)
        for place, entry in entries:
            own = replace(kernel, call=_own_call(kernel.call, request, entry))
            o[place], lse_rows[place] = _mirror(request, own, entry)
    found = {}
    if request.receiver is not None:
        request.receiver[...] = o
    else:
        o = to_bhsd(o, request.settings.layout)
        found["o"] = np.array(o[0] if call.packed else o, order="C")
    return found | ({"lse": lse} if call.return_lse else {})


def _sequences(request: Request) -> Iterator[tuple[tuple[slice, ...], Entry]]:
    """Yield every packed sequence: its place in O, and its operands as a call of its own."""
    pairs = zip(pairwise(request.cu_seqlens_q), pairwise(request.cu_seqlens_k), strict=True)
    coded = None if request.quantized is None else list(request.quantized.sequences())
    quant = request.settings.quant
    for number, (q_ends, k_ends) in enumerate(pairs):
        rows, keys = slice(*q_ends), slice(*k_ends)
        q, k, v = request.q[:, :, rows], request.k[:, :, keys], request.v[:, :, keys]
        yield (slice(None), slice(None), rows), Entry(
            q, k, v, None if coded is None else coded[number],
            None if quant is None else quant.of_entry(number),
            **scoring_of(request, number, q.shape[2], k.shape[2]),
        )  # fmt: skip


def _padded_entries(request: Request) -> Iterator[tuple[tuple[slice, ...], Entry]]:
    """Yield every padded batch entry that has queries: its place in O, and the rows that count as a
    call of their own."""
    call, quant = request.call, request.settings.quant
    for number in range(call.batch):
        len_q, len_kv = (
            longest if a is None else min(max(int(a[number]), 0), longest)
            for a, longest in ((request.lengths_q, call.len_q), (request.lengths_kv, call.len_kv))
        )
        if not len_q:
            continue
        one, coded = slice(number, number + 1), request.quantized
        rows, keys = (one, slice(None), slice(len_q)), (one, slice(None), slice(len_kv))
        yield rows, Entry(
            request.q[rows], request.k[keys], request.v[keys],
            None if coded is None else cut_entry(coded, number, len_q, len_kv),
            None if quant is None else quant.of_entry(number),
            **scoring_of(request, number, len_q, len_kv),
        )  # fmt: skip


def scoring_of(request: Request, number: int, len_q: int, len_kv: int) -> dict[str, Any]:
    """Return mask, bias and block mask of an entry's first rows and keys: its top left corner."""
    corner = slice(number, number + 1), slice(None), slice(len_q), slice(len_kv)
    masks = {name: getattr(request, name) for name in ("mask", "bias")}
    found = {name: None if a is None else a[corner] for name, a in masks.items()}
    block_mask = request.block_mask
    if block_mask is not None:
        block_mask = block_mask.corner(number, len_q, len_kv)
    return {**found, "block_mask": block_mask}


def _own_call(call: AttentionSpec, request: Request, entry: Entry) -> AttentionSpec:
    """Return what is computed for one entry with lengths of its own."""
    settings, alone = request.settings, replace(call, batch=1, packed=None, padded=None)
    return with_lengths(
        alone, entry.q.shape[2], entry.k.shape[2], causal=settings.causal,
        causal_align=settings.causal_align, window=settings.window,
    )  # fmt: skip


def _mirror(request: Request, kernel: Kernel, entry: Entry) -> tuple[Any, Any]:
    """Return O and the log-sum-exp of a call, or of one sequence, as a kernel computes them."""
    settings, coded = request.settings, entry.quantized
    preparation = request.preparation
    if request.variant.family == "int8":
        if coded is None:
            quant = entry.quant or QuantConfig()
            coded = quantize_mirror(
                entry.q, entry.k, entry.v, quant, request.scale_tiles, preparation=preparation
            )
            coded = coded.in_nibbles() if quant.qk_bits == 4 else coded
        preparation = None
    arrays = entry.q, entry.k, entry.v
    received = Received(kernel, arrays, settings.scores(vars(entry)), coded, preparation)
    o, lse, _ = attention.run_kernel(received)
    return o, lse
