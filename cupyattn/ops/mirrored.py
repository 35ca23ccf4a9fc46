"""Runs a request on the mirror: NumPy, with the kernels' blocks and rounding points."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE, array_namespace
from cupyattn.ops.quantize import quantize
from cupyattn.plans.stages import stages
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.form import Kernel
from cupyattn.problem.request import Request
from cupyattn.problem.resolve import resolve
from cupyattn.problem.row_preparation import OPTIONS
from cupyattn.problem.scoring import ScoreOptions


def new_output(call: AttentionSpec, layout: str, xp: Any) -> Any:
    """Return where O goes, in layout BHSD, contiguous in the caller's layout."""
    batch, heads, len_q, head_dim = call.output_shape
    if layout == "BSHD":
        shape = (batch, len_q, heads, head_dim)
        return xp.empty(shape, STORAGE[call.dtype]).swapaxes(1, 2)
    return xp.empty(call.output_shape, STORAGE[call.dtype])


def run_mirror(request: Request) -> tuple[Any, Any]:
    """Run a request on the mirror; return O in layout BHSD and the log-sum-exp."""
    options = request.options
    stages(request)  # refuses what no kernel takes
    o, lse = _mirror_packed(request) if request.call.packed else _mirror(request, request.kernel)
    receiver = request.receiver
    if receiver is None:
        receiver = new_output(request.call, options.layout, array_namespace(o))
    receiver[...] = o
    return receiver, lse


def _mirror_packed(request: Request) -> tuple[Any, Any]:
    """Run every sequence as a call of its own."""
    o = np.zeros(request.call.output_shape, STORAGE[request.call.dtype])
    lse = np.zeros(request.call.lse_shape, np.float32)
    kernel = request.kernel
    options = replace(
        request.options, variant=request.variant.name, layout="BHSD", check_finite=False, out=None,
        cu_seqlens_q=None, cu_seqlens_k=None, max_len_q=None, max_len_k=None, tiles=kernel.tiles,
    )  # fmt: skip
    pairs = zip(pairwise(request.cu_seqlens_q), pairwise(request.cu_seqlens_k), strict=True)
    parts = None if request.quantized is None else list(request.quantized.sequences())
    quant = request.options.quant
    for number, (q_ends, k_ends) in enumerate(pairs):
        rows, keys = slice(*q_ends), slice(*k_ends)
        q, k, v = request.q[:, :, rows], request.k[:, :, keys], request.v[:, :, keys]
        own = scoring_of(request, number, q.shape[2], k.shape[2])
        if parts is not None:
            q, k, v = parts[number], None, None
        own["quant"] = None if quant is None else quant.of_entry(number)
        one = resolve(q, k, v, replace(options, **own))
        o[:, :, rows], lse[None, :, rows] = _mirror(one, replace(kernel, call=one.call))
    return o, lse


def scoring_of(request: Request, number: int, len_q: int, len_kv: int) -> dict[str, Any]:
    """Return mask, bias and block mask of one packed sequence: the top left corner of its entry."""
    corner = slice(number, number + 1), slice(None), slice(len_q), slice(len_kv)
    masks = {name: getattr(request, name) for name in ("mask", "bias")}
    found = {name: None if a is None else a[corner] for name, a in masks.items()}
    block_mask = request.options.block_mask
    if block_mask is not None:
        block_mask = block_mask.corner(number, len_q, len_kv)
    return {**found, "block_mask": block_mask}


def _mirror(request: Request, kernel: Kernel) -> tuple[Any, Any]:
    from cupyattn.reference import mirror

    options, z = request.options, request.quantized
    operands: tuple[Any, ...] = (request.q, request.k, request.v)
    if request.variant.family == "int8":
        z = z or quantize(
            *operands, quant=options.quant, tiles=options.tiles, arch=options.arch,
            backend=request.backend,
            **{name: getattr(options, name) for name in OPTIONS},
        )  # fmt: skip
        z = z.unpacked()
        operands = mirror.coded_arrays(z)
    elif request.preparation is not None:
        operands = (*request.preparation.stored(request.q, request.k), request.v)
    scores = ScoreOptions(
        options.causal, options.causal_align, options.window, options.softcap,
        request.mask, request.bias, options.block_mask,
    )  # fmt: skip
    o, lse, _ = mirror.run_kernel(kernel, operands, scores, quantized=z)
    return o, lse
