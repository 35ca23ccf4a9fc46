"""The mirror of the attention kernels on NumPy: the same blocks, rounded at the same points.

`attention_mirror` follows the kernels' steps S0 to S6 and rounds at the points R2 to R7 that a
`cupyattn.kernels.numerics.Numerics` record names. It mirrors rounding points and block order, not
thread order: inside one product or one sum the order is NumPy's.
"""

# ruff: noqa: E741  (O and l are the paper's letters)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from cupyattn.arrays.groups import merge_heads, scale_of_row, split_heads
from cupyattn.arrays.kinds import NEG_INF, STORAGE, Array, array_namespace
from cupyattn.kernels.numerics import UNIT_ROUNDOFF, Numerics, check_features
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.attention import KernelCall, kernel_call_of
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.checks import check_dtype, check_smoothing
from cupyattn.problem.form import Kernel
from cupyattn.problem.settings import TurnedOptions, Unpack, takes_options
from cupyattn.quant.operand_protocol import (
    Quantized,
    check_one_sequence,
    codes_less_zero,
)
from cupyattn.reference.attention_8bit import by_shifts, by_tile
from cupyattn.reference.rounding import ex2, fma32, from_sum, round_to
from cupyattn.reference.scores import Scores, prepare_scores
from cupyattn.reference.scoring import Scoring
from cupyattn.reference.softmax_state import Float32, RowState, Step, inverse, softmax_of_rows


def require_numpy(*arrays: Array) -> None:
    """Raise TypeError for arrays of another kind."""
    if array_namespace(*arrays) is not np:
        raise TypeError("the mirror computes on NumPy arrays: bring CuPy arrays over with .get()")


def storage_name(q: Array, k: Array, v: Array) -> str:
    """Return the one storage type of three NumPy arrays."""
    require_numpy(q, k, v)
    return check_dtype(q, k, v)


@explains_foreign_arguments
@takes_options
def attention_mirror(
    q: Array | Quantized,
    k: Array | None = None,
    v: Array | None = None,
    *,
    variant: str = "fa",
    tiles: Tiles | None = None,
    return_lse: bool = False,
    trace: bool = False,
    numerics: Numerics | None = None,
    form: str | None = None,
    **options: Unpack[TurnedOptions],
) -> Any:
    """Attention as a kernel computes it: the same blocks, rounded at the same points, on NumPy.

    Parameters
    ----------
    q : (batch, heads, len_q, head_dim) array or QuantizedQKV
        float16, bfloat16 or float32. Quantised operands hold all three: k and v stay None.
    k, v : (batch, heads_kv, len_kv, head_dim) array
        Same type as q.
    variant : str
        The rung to mirror; it gives `numerics` and `tiles` where they are not given.
    tiles : Tiles, optional
        Block sizes; keys are taken ``tiles.block_kv`` at a time.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for `attention_exact`.
    rope, rope_interleaved, rope_offset_q
        As for `cupyattn.attention`; q and k are turned as the kernels turn them (R0). Quantised
        operands are turned beforehand.
    return_lse : bool
        Also return the log-sum-exp.
    trace : bool
        Also return a list of `Step`, one for each block of keys.
    numerics : Numerics, optional
        Rounding points to use in place of the variant's own.
    form : {"portable", "sm90", "split"}, optional
        Form to mirror; the one that takes calls of these lengths and tiles when omitted.

    Returns
    -------
    o : (batch, heads, len_q, head_dim) array, ``numerics.out_type``
    lse : (batch, heads, len_q) array, float32
        Only with `return_lse`.
    steps : list of Step
        Only with `trace`.

    Raises
    ------
    TypeError
        If the arrays are not NumPy's or not of one storage type.
    ValueError
        If shapes disagree, an option is unknown, arrays meet a rung that wants codes, or a softcap
        meets smoothed keys (it would feel their mean).

    Notes
    -----
    R2 and R6 accumulate in float32, in NumPy's order for FMA chains and tensor cores alike (an
    order inside one product is the device's own affair; the bound holds for any). A block's P V is
    summed by itself and then added to O, one rounding more than a chain that starts from O. int32
    products are exact. S c - M is formed in float64 and rounded once.

    As in every rung, M = fl(m c) is one rounded number that all exponents of a row share. So P
    reaches exp2(m c - M), which is capped at 2^8 for scores from 2^27 in log2 units on. Operands in
    float16 reach it with entries of several thousand. With softcap or bias the maximum itself is
    subtracted, and P never exceeds 1.

    Examples
    --------
    >>> x = np.ones((1, 1, 3, 8), np.float16)
    >>> o, steps = attention_mirror(x, x, x, variant="fa_tc", tiles=Tiles(16, 2, 1), trace=True)
    >>> bool((o == 1).all()), [step.kv0 for step in steps]
    (True, [0, 2])
    """
    quantized = None
    if isinstance(q, Quantized):
        if k is not None or v is not None:
            raise ValueError("k and v must be None where q holds all three quantised operands")
        quantized = q.unpacked()
        coded_arrays(quantized)
    else:
        if k is None or v is None:
            raise TypeError("k and v may only be left out where q is a QuantizedQKV")
        storage_name(q, k, v)
    received = kernel_call_of(locals())
    o, lse, steps = run_kernel(received, numerics=numerics, trace=trace)
    results = (o, *([lse] if return_lse else []), *([steps] if trace else []))
    return results if len(results) > 1 else o


def coded_arrays(quantized: Quantized) -> tuple[Array, Array, Array]:
    """Return the arrays that an INT8 kernel multiplies: codes of Q and K, and V or its codes."""
    check_one_sequence(quantized)
    v = quantized.value_codes() if quantized.v is None else quantized.v
    require_numpy(quantized.q_codes, quantized.k_codes, v)
    return quantized.q_codes, quantized.k_codes, v


def run_kernel(
    received: KernelCall, *, numerics: Numerics | None = None, trace: bool = False
) -> tuple[Array, Float32, list[Step]]:
    """Compute attention as a kernel does.

    Parameters
    ----------
    received : KernelCall
    numerics : Numerics, optional
        Rounding points in place of the kernel's own.
    trace : bool
        Whether to keep the steps.

    Returns
    -------
    o, lse : array
    steps : list of Step
        Steps of a kernel with P and V in 8 bits; of other kernels with `trace`.
    """
    kernel, options, quantized = received.kernel, received.scores, received.quantized
    if quantized is None:
        q, k, v = received.prepared
    else:
        quantized = quantized.unpacked()
        q, k, v = coded_arrays(quantized)
    tiles, sigma = kernel.tiles, kernel.call.scale
    n = numerics or kernel.numerics(quantized and quantized.config)
    check_features(n, options["softcap"], options["bias"])
    scoring = Scoring.of(q, k, options)
    check_smoothing(options["softcap"], None if quantized is None else quantized.k_mean)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        # S0 locate, S1 load Q
        scores = prepare_scores(q, k, sigma, scoring, n, quantized)
        if kernel.row.on_hopper:
            scores = replace(scores, listed_rows=tiles.block_q)
        steps: list[Step] = []
        if n.shifts and quantized is not None:
            O, state = by_shifts(scores, quantized, n.shifts, tiles, steps)
        elif n.by_tile and quantized is not None:
            O, state = by_tile(scores, quantized, n, tiles, steps)
        else:
            # NOTE: a type of 16 bits holds every code.
            V = (v if n.value_codes else round_to(v, n.v_type))[:, :, None]
            kept = steps if trace else None
            if n.splits:
                O, state = _slices(scores, V, n, kernel, kept)
            else:
                O, state = (_online if n.online else _whole_rows)(scores, V, n, tiles, kept)
            if quantized is not None and n.value_codes:
                O = _scaled(O, state, quantized)

        # S6 store
        rounded = from_sum(O, n.out_type) if n.online else round_to(O, n.out_type)  # R7
        o = merge_heads(rounded).astype(STORAGE[n.out_type])
        lse = merge_heads(state.lse())
        if quantized is not None and quantized.k_mean is not None:
            given_back = _smoothing_shift(quantized, quantized.k_mean, sigma)
            lse = np.where(lse == NEG_INF, lse, lse + given_back)  # an empty row stays empty
    return o, lse, steps


def _online(
    scores: Scores, V: Float32, n: Numerics, tiles: Tiles, steps: list[Step] | None
) -> tuple[Float32, RowState]:
    """The fused rungs."""
    summed = np.float32(1 + 2 * UNIT_ROUNDOFF[n.v_type]) if n.sums_operand else None
    if summed is not None:  # l is a column of P V as well
        V = np.concatenate([V, np.full_like(V[..., :1], summed)], axis=-1)
    O, state = _over_keys(scores, V, n, tiles, steps, (0, V.shape[-2]))
    if summed is not None:
        return O[..., :-1] * inverse(O[..., -1:] / summed), state  # R7
    return O * state.inverse_l()[..., None], state  # R7


def _scaled(O: Float32, state: RowState, quantized: Quantized) -> Float32:
    """R7: the scale of each channel of V, and its mean; a row without keys stays 0."""
    scale = cast(Float32, quantized.v_scale)[:, :, None]  # (batch, heads_kv, 1, 1, head_dim)
    mean: Float32 = np.zeros(1, np.float32)
    if quantized.v_mean is not None:
        mean = np.asarray(quantized.v_mean)[:, :, None, None]
    return np.where(state.l[..., None] == 0, np.float32(0), fma32(O, scale, mean))


def _slices(
    scores: Scores, V: Float32, n: Numerics, kernel: Kernel, steps: list[Step] | None
) -> tuple[Float32, RowState]:
    """The split form: merge the slices of a block, then the blocks' results."""
    cut = kernel.cut
    found = [_over_keys(scores, V, n, kernel.tiles, steps, keys) for keys in cut.ranges()]
    many = cut.block_slices
    of_blocks = [_together(found[i : i + many]) for i in range(0, cut.slices, many)]
    O, state = _together(of_blocks)
    return O * state.inverse_l()[..., None], state  # R7


def _together(partials: Sequence[tuple[Float32, RowState]]) -> tuple[Float32, RowState]:
    """Merge partial results over parts of the keys; a single part stays unchanged."""
    O, first = partials[0]
    if len(partials) == 1:
        return O, first
    state = RowState(first.M.shape, first.subtracts_first)
    for _, part in partials:
        state.M = np.fmax(state.M, part.M)
    O = np.zeros_like(O)
    for part_O, part in partials:
        weight = ex2(part.M - state.M_finite())  # R4
        state.l = fma32(weight, part.l, state.l)  # R6
        O = fma32(weight[..., None], part_O, O)  # R6
    return O, state


def _over_keys(
    scores: Scores,
    V: Float32,
    n: Numerics,
    tiles: Tiles,
    steps: list[Step] | None,
    keys: tuple[int, int],
) -> tuple[Float32, RowState]:
    """The loop over keys, from one to before another; O is not divided by l."""
    first, end = keys
    state = RowState(scores.rows, scores.subtracts_first)
    O = np.zeros((*scores.rows, V.shape[-1]), np.float32)
    for kv0 in range(first, end, tiles.block_kv):
        # S2 load K, V
        kv1 = min(kv0 + tiles.block_kv, end)
        V_tile = V[..., kv0:kv1, :]

        # S3 scores
        S = scores.block(kv0, kv1)

        # S4 softmax
        m = np.fmax.reduce(S, axis=-1, initial=NEG_INF)  # ignores NaN, as fmaxf does
        if n.headroom:
            m = np.where(state.raised_by(m, scores.exponent_factor, n.headroom), m, NEG_INF)
        alpha = state.advance(m, scores.exponent_factor)
        P = round_to(state.exponentials(S, scores.exponent_factor), n.p_type)  # R5; l has it whole

        # S5 output
        O *= alpha[..., None]  # R6
        # NOTE: tiles of query rows that attend to nothing here skip the step. It changes no bit
        # unless V is not finite.
        rows = scores.visitors(kv0, tiles)
        products = scores.kept(_products(P[..., rows, :], V_tile, n), rows, kv0)
        O[..., rows, :] += scores.listed(products, rows, slice(kv0, kv1))  # R6
        if steps is not None:
            merged = (merge_heads(x) for x in (S, P, state.M, state.l, alpha))
            steps.append(Step(kv0, *merged))
    return O, state


def _products(P: Float32, V: Float32, n: Numerics) -> Float32:
    """P V of a step. For tensor cores it is rounded once: no order of BLAS is theirs [L80]."""
    if n.values == "tensor_core":
        return (P.astype(np.float64) @ V.astype(np.float64)).astype(np.float32)
    return P @ V


def _whole_rows(
    scores: Scores, V: Float32, n: Numerics, tiles: Tiles, steps: list[Step] | None
) -> tuple[Float32, RowState]:
    """The three kernels of the unfused rung: one step over all keys, and P divided by l in it."""
    S = scores.block(0, V.shape[-2])  # S3 scores
    P, state = softmax_of_rows(S, scores.exponent_factor, scores.subtracts_first)  # S4 softmax
    P = round_to(P, n.p_type)  # R5
    finite = np.isfinite(V) | (scores.scoring.kept is None)
    O = P @ np.where(finite, V, np.float32(0))  # S5 output, R6
    if not finite.all():  # dropped blocks are not read
        for kv0 in range(0, V.shape[-2], tiles.block_kv):
            keys = slice(kv0, kv0 + tiles.block_kv)
            spoilt = np.where(finite, np.float32(0), V)[..., keys, :]
            O += scores.kept(P[..., keys] @ spoilt, slice(0, None), kv0)
    if steps is not None:
        merged = (merge_heads(x) for x in (S, P, state.M, state.l, np.zeros_like(state.l)))
        steps.append(Step(0, *merged))
    return O, state


def _smoothing_shift(quantized: Quantized, mean: Array, sigma: float) -> Float32:
    """The number that subtracting the keys' mean takes from every score of a row: sigma q.mean."""
    codes = codes_less_zero(quantized.q_codes, quantized.q_zero, quantized.group_q)
    q_scale = scale_of_row(quantized.q_scale, quantized.group_q, codes.shape[2])
    q = split_heads(codes * q_scale[..., None], mean.shape[1])
    dot = q @ mean[:, :, None, :, None]  # (batch, heads_kv, group, len_q, 1)
    return cast(Float32, merge_heads(dot[..., 0]) * np.float32(sigma))
