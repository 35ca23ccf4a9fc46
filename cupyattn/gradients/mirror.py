"""Mirror of the backward kernels: the same blocks, rounded at the same points.

As in `cupyattn.reference.attention`, the order inside one product or one sum is NumPy's.
"""

# ruff: noqa: E741  (O and l are the paper's letters)

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.kinds import NEG_INF, STORAGE, Array
from cupyattn.gradients.exact import BiasSums, Gradients, GradientsWithBias, coarse_rows
from cupyattn.gradients.problem import BackwardProblem
from cupyattn.kernels.numerics import LARGEST_EXPONENT, Numerics, numerics
from cupyattn.problem.backward_form import NO_DQ, BackwardKernel, check_backward
from cupyattn.problem.checks import check_scale
from cupyattn.problem.settings import MaskedOptions, Unpack, takes_options
from cupyattn.reference.attention import require_numpy
from cupyattn.reference.rounding import ex2, fma32, round_to
from cupyattn.reference.scores import prepare_scores
from cupyattn.reference.scoring import Scoring
from cupyattn.reference.softmax_state import Float32, row_maximum


@takes_options
def backward_mirror(
    d_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    d_lse: Array | None = None,
    grad_bias: bool = False,
    deterministic: bool = False,
    all_keys: bool = True,
    **options: Unpack[MaskedOptions],
) -> Gradients | GradientsWithBias:
    """Gradients of attention as the kernels compute them, on NumPy.

    Parameters
    ----------
    d_out, q, k, v, out : array
        float16 or bfloat16, all of one type; shapes as for `cupyattn.gradients.backward_exact`.
    lse : (batch, heads, len_q) array, float32
    d_lse : (batch, heads, len_q) array, float32, optional
    grad_bias : bool
        As for `cupyattn.gradients.backward_exact`.
    deterministic : bool
        Whether to mirror the ordered form. This decides how many keys are added to dQ at a time.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for `cupyattn.reference.attention_exact`.
    all_keys : bool
        As for `cupyattn.gradients.backward_exact`.

    Returns
    -------
    Gradients
        Same type as q.

    Raises
    ------
    TypeError, ValueError
        For arrays that are not NumPy's, or do not fit together.

    Examples
    --------
    >>> x = np.ones((1, 1, 3, 8), np.float16)
    >>> lse = np.full((1, 1, 3), 8**0.5 + np.log(3), np.float32)
    >>> dq, dk, dv = backward_mirror(x, x, x, x, x, lse)
    >>> dq[0, 0, 0, :2].tolist(), dv[0, 0, :, 0].tolist()
    ([0.0, 0.0], [1.0, 1.0, 1.0])
    """
    require_numpy(d_out, q, k, v, out, lse, *([] if d_lse is None else [d_lse]))
    problem = BackwardProblem.of(
        "backward_mirror", (d_out, out, lse, d_lse), q, k, v, options, all_keys, grad_bias
    )
    found = mirror_gradients(problem, problem.portable_kernel(deterministic=deterministic))
    if not isinstance(found, GradientsWithBias):
        return found
    return found._replace(dbias=found.dbias.astype(problem.options["bias"].dtype))  # R12


def mirror_gradients(
    problem: BackwardProblem, kernel: BackwardKernel
) -> Gradients | GradientsWithBias:
    """Return the gradients as a given kernel computes them, in its tiles. dbias is in float32.

    Parameters
    ----------
    problem : BackwardProblem
        Arguments of `backward_mirror`.
    kernel : BackwardKernel
    """
    (d_out, q, k, v, out, lse), options = problem.arrays, problem.options
    (*_, len_q, len_kv, head_dim), dtype = check_backward(*problem.arrays, d_lse=problem.d_lse)
    sigma = check_scale(problem.scale, head_dim)
    features = {"softcap": bool(options["softcap"]), "bias": options["bias"] is not None}
    n = numerics("tensor_core", "portable", dtype, **features)
    scoring = Scoring.of(q, k, options)
    keys_tiles, queries_tiles = kernel.keys_tiles, kernel.queries_tiles
    heads_kv = k.shape[1]
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        scores = prepare_scores(q, k, sigma, scoring, n, None)
        Q, dO, O = (split_heads(round_to(x, dtype), heads_kv) for x in (q, d_out, out))
        V = round_to(v, dtype)[:, :, None]
        delta = (dO * O).sum(axis=-1, dtype=np.float32)  # R8
        if problem.d_lse is not None:
            of_lse = split_heads(problem.d_lse, heads_kv)
            delta = np.where(split_heads(lse, heads_kv) == NEG_INF, delta, delta - of_lse)  # R8
        to_log2 = np.float32(1) if n.subtracts_first else np.float32(np.log2(np.e))
        M = split_heads(lse, heads_kv) * to_log2  # R9
        M = np.where(split_heads(lse, heads_kv) == NEG_INF, np.float32(np.inf), M)[..., None]

        coarse = coarse_rows(split_heads(lse, heads_kv))[..., None]
        step, factor = keys_tiles.block_kv, np.ones_like(M)
        if problem.sums is not None:
            given_M, given = (split_heads(x, heads_kv)[..., None] for x in problem.sums)
            M, factor = np.where(coarse, given_M, M), np.where(coarse, given, factor)
        else:
            coarse = coarse & problem.all_keys

        def exponentials(kv0: int, kv1: int) -> Float32:
            return _exponentials(scores.block(kv0, kv1), M, n, scores.exponent_factor)

        def capped(kv0: int, kv1: int) -> Float32:
            return np.minimum(exponentials(kv0, kv1), np.float32(2.0**LARGEST_EXPONENT))

        if problem.sums is None and coarse.any():
            m, l = _sums(scores, n, len_kv, step)
            M = np.where(coarse, np.where(m == NEG_INF, np.float32(np.inf), m), M)  # R9
            factor = np.where(coarse, np.where(l == 0, np.float32(0), np.float32(1) / l), factor)

        biases = None if problem.of_bias is None else BiasSums(problem, np.float32)

        def of_keys(kv0: int, kv1: int) -> tuple[Float32, Float32, Float32]:
            """Return P and dS of some keys, as operands, and the gradient of their biases."""
            P = exponentials(kv0, kv1)
            P = np.where(coarse, capped(kv0, kv1) * factor, P) if coarse.any() else P  # R9
            dP = dO @ V[..., kv0:kv1, :].swapaxes(-1, -2)  # R10
            of_bias = P * (dP - delta[..., None])  # R11
            dS = of_bias * scores.slope(kv0, kv1)  # R11
            return round_to(P, dtype), round_to(dS, dtype), of_bias  # R9, R11

        dQ = np.zeros(Q.shape, np.float32)
        dK, dV = np.zeros(k.shape, np.float32), np.zeros(v.shape, np.float32)
        for kv0 in range(0, len_kv, keys_tiles.block_kv):
            keys = slice(kv0, min(kv0 + keys_tiles.block_kv, len_kv))
            P, dS, of_bias = of_keys(keys.start, keys.stop)
            if biases is not None:
                biases.add((*[slice(None)] * 4, keys), of_bias)  # R12
            if kernel.dq != NO_DQ:
                dQ += dS @ scores.K[..., keys, :]  # R12
            for head in range(Q.shape[2]):
                for q0 in range(0, len_q, keys_tiles.block_q):
                    at = (slice(None), slice(None), head, slice(q0, q0 + keys_tiles.block_q))
                    dV[:, :, keys] += P[at].swapaxes(-1, -2) @ dO[at]  # R12
                    dK[:, :, keys] += dS[at].swapaxes(-1, -2) @ Q[at]  # R12
        if kernel.dq == NO_DQ:
            for kv0 in range(0, len_kv, queries_tiles.block_kv):
                keys = slice(kv0, min(kv0 + queries_tiles.block_kv, len_kv))
                dQ += of_keys(keys.start, keys.stop)[1] @ scores.K[..., keys, :]  # R12
        scaled = (merge_heads(dQ) * np.float32(sigma), dK * np.float32(sigma), dV)  # R12
        found: Any = tuple(x.astype(STORAGE[dtype]) for x in scaled)  # R12
    if biases is None:
        return Gradients(*found)
    dq, dk, dv = found
    return GradientsWithBias(dq, dk, dv, biases.total)


def part_sums(problem: BackwardProblem, kernel: BackwardKernel) -> tuple[Array, Array]:
    """Return M and the sums of all rows over the keys of a problem, as ``backward_coarse.cu`` does.

    Parameters
    ----------
    problem : BackwardProblem
        Only its q, k, scale and options are read.
    kernel : BackwardKernel

    Returns
    -------
    M, l : (batch, heads, len_q) array, float32
        -inf and 0 for rows without keys.
    """
    q, k, options = problem.q, problem.k, problem.options
    dtype = kernel.call.dtype
    features = {"softcap": bool(options["softcap"]), "bias": options["bias"] is not None}
    n = numerics("tensor_core", "portable", dtype, **features)
    sigma = check_scale(problem.scale, q.shape[-1])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scores = prepare_scores(q, k, sigma, Scoring.of(q, k, options), n, None)
        m, l = _sums(scores, n, k.shape[2], kernel.keys_tiles.block_kv)
    return merge_heads(m)[..., 0], merge_heads(l)[..., 0]


def _exponentials(S: Float32, M: Float32, n: Numerics, exponent_factor: Any) -> Float32:
    if n.subtracts_first:
        return ex2((S - M) * exponent_factor)  # R9
    return ex2(fma32(S, exponent_factor, -M))  # R9


def _sums(scores: Any, n: Numerics, len_kv: int, step: int) -> tuple[Float32, Float32]:
    """Return M, -inf without keys, and the sum of the exponentials of rows, (..., rows, 1)."""
    blocks = [(kv0, min(kv0 + step, len_kv)) for kv0 in range(0, len_kv, step)]
    m = np.full((*scores.block(0, 0).shape[:-1], 1), NEG_INF, np.float32)
    for ends in blocks:
        m = np.fmax(m, np.fmax.reduce(scores.block(*ends), axis=-1, keepdims=True))
    if not n.subtracts_first:
        m = row_maximum(m, scores.exponent_factor)
    M = np.where(m == NEG_INF, np.float32(np.inf), m)
    most, l = np.float32(2.0**LARGEST_EXPONENT), np.zeros_like(m)
    for ends in blocks:
        found = _exponentials(scores.block(*ends), M, n, scores.exponent_factor)
        l = l + np.minimum(found, most).sum(axis=-1, keepdims=True, dtype=np.float32)  # R9
    return m, l
