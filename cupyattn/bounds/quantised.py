"""Bound of the error of INT8 operands against the caller's arrays: J3, rounding point R1."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays.groups import scale_of_row, split_heads, value_scale_of_key
from cupyattn.arrays.interchange import operand, operands
from cupyattn.arrays.kinds import (
    FINITE_MAX,
    NEG_INF,
    Array,
    array_namespace,
    as_float64,
    check_values,
)
from cupyattn.bounds import values as value_bounds
from cupyattn.bounds.bound import Bound, assemble, empty, exact, of_block
from cupyattn.bounds.perturbation import gamma, half_ulp, softmax_perturbation
from cupyattn.bounds.scores import REFERENCE, U64, U, far_below, far_keys
from cupyattn.kernels.numerics import numerics as compose_numerics
from cupyattn.problem.checks import check_scale, check_smoothing
from cupyattn.problem.settings import MaskedOptions, Unpack, parse, takes_options
from cupyattn.quant.operand_protocol import check_queries
from cupyattn.reference.exact import ScoreBlock, blocks_of

#: Largest loss by underflow in float64 of a product of a probability and a value, in both results
#: and in the bound.
FLOAT64_UNDERFLOW = 2.0**-1060


@takes_options
@np.errstate(over="ignore", invalid="ignore")  # of operands that are not finite
def quantisation(
    q: Array,
    k: Array,
    v: Array,
    quantized: Any,
    *,
    rows: Array | None = None,
    prepared: tuple[Array, Array] | None = None,
    **options: Unpack[MaskedOptions],
) -> Bound:
    r"""Bound the error of exact attention of INT8 operands against the caller's arrays (J3).

    Parameters
    ----------
    q : (batch, heads, len_q, head_dim) array
        The caller's arrays, before quantisation.
    k, v : (batch, heads_kv, len_kv, head_dim) array
    quantized : QuantizedQKV
        The quantised arrays. Scales, zero points and mean are used, codes are not.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask, rows
        As for `cupyattn.reference.attention_exact`.
    prepared : (array, array), optional
        Bounds of the errors of the prepared operands that were quantised (`preparation`). q and k
        are then the results of `cupyattn.problem.row_preparation.Preparation.exact`.

    Returns
    -------
    Bound
        One term, R1.

    Notes
    -----
    Codes of scale s leave ``|x - s code| <= max(s/2 (1 + 2^-15), |x| - 127 s) =: Δ``, where the
    second number counts only if a static scale clips. With zero points the first number is s/2 (1 +
    2^-12). Hence, with centred keys [L18],

    .. math:: |δS_{ij}| \le σ \sum_d Δq_{id} |k_{jd}| + (|q_{id}| + Δq_{id}) Δk_{jd}

    where prepared operands add their error to Δ [L19], and the rounding of V to 16 bits adds ``Σ
    p'_j |δv_j|``. A softcap is 1-Lipschitz, and a bias is the same on both sides: neither adds
    anything.
    """
    check_queries(quantized)
    q, k, v = operands(q=q, k=k, v=v)
    settings, arrays = parse("quantisation", q, k, v, options)
    xp = array_namespace(q, k, v)
    check_values("rows", rows)
    head_dim = q.shape[-1]
    sigma = check_scale(settings.scale, head_dim)
    chosen = xp.arange(q.shape[2]) if rows is None else operand("rows", xp.asarray(rows))
    largest = quantized.config.largest_code
    of_q, of_k = (
        [
            None if a is None else _row_scales(a, group, shape)
            for a in (getattr(quantized, f"{name}_scale"), getattr(quantized, f"{name}_zero"))
        ]
        for name, group, shape in (
            ("q", quantized.group_q, q.shape[:3]),
            ("k", quantized.group_kv, k.shape[:3]),
        )
    )
    q_scale, q_zero = (
        None if a is None else split_heads(a[:, :, chosen], k.shape[1])[..., None] for a in of_q
    )
    k_scale, k_zero = (None if a is None else a[:, :, None, :, None] for a in of_k)
    errors = None
    if prepared is not None:
        errors = split_heads(prepared[0][:, :, chosen], k.shape[1]), prepared[1][:, :, None]
    terms, lse = empty(q, k, v, rows, ("R1",))
    check_smoothing(settings.softcap, quantized.k_mean)
    for block in blocks_of(q, k, v, settings.scale, settings.scores(arrays), rows):
        if block.S.shape[-1] == 0:
            continue
        batch, head, _, _ = block.index
        P, exact_lse, values, o, spoilt = exact(block)
        mean, subtraction = xp.zeros_like(block.k[..., :1, :]), 0.0
        if quantized.k_mean is not None:
            mean, subtraction = of_block(quantized.k_mean, block), U  # R0
        centred = block.k - mean
        q_abs, k_abs = xp.abs(block.q), xp.abs(centred)
        dq, dk = (0.0, 0.0) if errors is None else (errors[0][block.index], errors[1][batch, head])
        dq = _code_rounding(block.q, dq, q_scale, q_zero, block.index, largest)
        dk = dk + subtraction * (k_abs + dk)
        dk = _code_rounding(centred, dk, k_scale, k_zero, (batch, head), largest)
        d = sigma * (dq @ k_abs.swapaxes(-1, -2) + (q_abs + dq) @ dk.swapaxes(-1, -2))  # R1
        float64 = (q_abs + dq) @ (xp.abs(block.k) + k_abs + dk).swapaxes(-1, -2)
        d = (d + 2 * gamma(head_dim + 8, U64) * sigma * float64) * REFERENCE + 2.0**-45
        fine = xp.isfinite(block.S) & xp.isfinite(d)
        usable = (fine | ~block.admitted).all(axis=-1)
        counts = block.admitted & fine
        S = xp.where(counts, block.S, NEG_INF)
        top = xp.where(counts.any(axis=-1), S.max(axis=-1), 0.0)
        S = xp.where(counts, S, top[..., None])
        d = xp.where(counts, d + 4 * U64 * xp.abs(S), 0.0)  # the softcap and the bias of float64
        far = counts & far_below(S, top, d)
        d = xp.where(far, 0.0, d)
        delta_o, P_plus, delta_lse, _ = softmax_perturbation(P, d, values, o)
        total = delta_o + far_keys(far, values)
        total = total + gamma(2 * block.S.shape[-1] + 8, U64) * (P_plus @ xp.abs(values))
        total = total + FLOAT64_UNDERFLOW * block.S.shape[-1]
        dv = _value_rounding(values, v.dtype.name, quantized, block)
        total = total + P_plus @ xp.where(xp.isfinite(dv), dv, 0.0)
        spoilt = spoilt | (~xp.isfinite(dv)).any(axis=-2, keepdims=True)
        attends = block.admitted.any(axis=-1)
        total = xp.where(usable[..., None] & ~spoilt, total, xp.inf)
        # NOTE: a score of -inf drops its key, but no code stands for the infinity that made it.
        endless = xp.isinf(block.q).any(axis=-1) | xp.isinf(block.k).any(axis=(-2, -1))[..., None]
        total = xp.where(attends[..., None], total, 0.0)
        terms["R1"][block.index] = xp.where(endless[..., None], xp.inf, total)
        delta_lse = delta_lse + REFERENCE * sigma * (dq * xp.abs(mean)).sum(axis=-1)
        delta_lse = delta_lse + 2.0**-45 * (1 + xp.abs(xp.where(usable, exact_lse, 0.0)))
        delta_lse = xp.where(attends, xp.where(usable, delta_lse, xp.inf), 0.0)
        lse[block.index] = xp.where(endless, xp.inf, delta_lse)
    return assemble(terms, lse)


def _code_rounding(
    x: Array, error: Any, scale: Array, zero: Array, index: Any, largest: int
) -> Array:
    """R1: bound the error of each number of a block of Q or K after quantising, given a previous
    error."""
    xp = array_namespace(x)
    if zero is None:
        size = xp.abs(x) + error
        return error + value_bounds.rounding_to_codes(size, scale[index], largest)
    ends = (
        value_bounds.rounding_with_zero_points(x + e, scale[index], zero[index])
        for e in (error, -error)
    )
    return error + xp.maximum(*ends)


def _value_rounding(values: Array, dtype: str, quantized: Any, block: ScoreBlock) -> Array:
    """R1 of V: bound the error of each value in 16 bits or codes; infinite for values past their
    range."""
    xp = array_namespace(values)
    if quantized.form == "portable":
        v_type = quantized.v.dtype.name
        if v_type == dtype:
            return xp.zeros_like(values)
        error = half_ulp(xp.abs(values), v_type)
        return xp.where(xp.abs(values) > FINITE_MAX[v_type], xp.inf, error)
    batch, head, _, _ = block.index
    by_key = value_scale_of_key(quantized.v_scale[batch, head], quantized.group_v, values.shape[-2])
    mean, subtraction = of_block(quantized.v_mean, block), 0.0
    centred, scale = values, as_float64(by_key)[:, :, None]
    if mean is not None:
        centred, subtraction = values - mean, U  # R0
    n = compose_numerics("int8", quantized.form, dtype, quantized.config)
    size, widened = xp.abs(centred), centred * (1 + subtraction)
    if quantized.v_zero is None:
        error = value_bounds.rounding_of_values(xp.abs(widened), scale, n)
    else:
        zero = quantized.v_zero[batch, head]
        zero = value_scale_of_key(zero, quantized.group_v, values.shape[-2])[:, :, None]
        error = value_bounds.rounding_with_zero_points(widened, scale, zero)
    return error + subtraction * size


def _row_scales(scale: Array, group: int, shape: tuple[int, ...]) -> Array:
    """Return the scale of every row in float64, as (batch, heads, length)."""
    xp = array_namespace(scale)
    return xp.broadcast_to(scale_of_row(as_float64(scale), group, shape[2]), shape)
