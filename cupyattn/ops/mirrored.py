"""Attention on the mirror: NumPy, with the kernels' blocks and rounding points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.plans.records import Plan
from cupyattn.plans.stages import stages, tiles_of_scales
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.request import Request
from cupyattn.problem.resolve import to_bhsd
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.reference import mirror
from cupyattn.reference.quantize import quantize_mirror


@dataclass(frozen=True)
class Entry:
    """Operands of a call, or of one of its packed sequences, in layout BHSD."""

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
    plan = stages(request).plans[-1]  # first: it refuses what no kernel takes
    call = request.call
    if call.packed is None:
        whole = Entry(
            request.q, request.k, request.v, request.quantized, request.settings.quant,
            request.mask, request.bias, request.block_mask,
        )  # fmt: skip
        o, lse = _mirror(request, plan, whole)
    else:
        o = np.zeros(call.output_shape, STORAGE[call.dtype])
        lse = np.zeros(call.lse_shape, np.float32)
        for rows, entry in _sequences(request):
            o[:, :, rows], lse[None, :, rows] = _mirror(request, plan, entry)
    found = {}
    if request.receiver is not None:
        request.receiver[...] = o
    else:
        o = to_bhsd(o, request.settings.layout)
        found["o"] = np.array(o[0] if call.packed else o, order="C")
    return found | ({"lse": lse} if call.return_lse else {})


def _sequences(request: Request) -> Iterator[tuple[slice, Entry]]:
    """Yield every packed sequence: its rows of Q, and its operands as a call of its own."""
    pairs = zip(pairwise(request.cu_seqlens_q), pairwise(request.cu_seqlens_k), strict=True)
    coded = None if request.quantized is None else list(request.quantized.sequences())
    quant = request.settings.quant
    for number, (q_ends, k_ends) in enumerate(pairs):
        rows, keys = slice(*q_ends), slice(*k_ends)
        q, k, v = request.q[:, :, rows], request.k[:, :, keys], request.v[:, :, keys]
        yield rows, Entry(
            q, k, v, None if coded is None else coded[number],
            None if quant is None else quant.of_entry(number),
            **scoring_of(request, number, q.shape[2], k.shape[2]),
        )  # fmt: skip


def scoring_of(request: Request, number: int, len_q: int, len_kv: int) -> dict[str, Any]:
    """Return mask, bias and block mask of one packed sequence: the top left corner of its entry."""
    corner = slice(number, number + 1), slice(None), slice(len_q), slice(len_kv)
    masks = {name: getattr(request, name) for name in ("mask", "bias")}
    found = {name: None if a is None else a[corner] for name, a in masks.items()}
    block_mask = request.block_mask
    if block_mask is not None:
        block_mask = block_mask.corner(number, len_q, len_kv)
    return {**found, "block_mask": block_mask}


def _mirror(request: Request, plan: Plan, entry: Entry) -> tuple[Any, Any]:
    """Return O and the log-sum-exp of a call, or of one sequence, in the form of the plan."""
    settings, packed = request.settings, request.call.packed is not None
    operands: tuple[Any, ...] = (entry.q, entry.k, entry.v)
    if request.variant.family == "int8":
        coded = entry.quantized
        if coded is None:
            quant = entry.quant or QuantConfig()
            tiles = tiles_of_scales(request, quant)
            coded = quantize_mirror(
                entry.q, entry.k, entry.v, quant, tiles, preparation=request.preparation
            )
            coded = coded.in_nibbles() if quant.qk_bits == 4 else coded
        operands = (coded, None, None)
    elif request.preparation is not None:
        operands = (*request.preparation.stored(entry.q, entry.k), entry.v)
    o, lse = mirror.attention_mirror(
        *operands, variant=request.variant.name, tiles=plan.tiles if packed else settings.tiles,
        form=plan.form, scale=settings.scale, causal=settings.causal,
        causal_align=settings.causal_align, window=settings.window, softcap=settings.softcap,
        mask=entry.mask, bias=entry.bias, block_mask=entry.block_mask, return_lse=True,
    )  # fmt: skip
    return o, lse
