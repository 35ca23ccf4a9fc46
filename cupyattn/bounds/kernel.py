"""Element-wise a-priori bounds of the error of a kernel against exact attention, in float64.

`attention` bounds the error of the kernel itself for the operands that it received (judgement J2,
rounding points R2 to R7). `quantisation` bounds the error of INT8 operands against the caller's
arrays (J3, R1). Both are computed from the actual inputs and scales, never from an output, on NumPy
or CuPy arrays.

Every formula is proved in docs/MATH_REFERENCE.md: [L33] and the like are its lemmas. In short: one
number d_j per score bounds all perturbations of the score (R2, R3, R4). `softmax_perturbation`
turns d into a bound on the output. The roundings of P, of the two sums and of the result (R5, R6,
R7) follow as factors 1 + theta.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupyattn.arrays.groups import merge_heads, value_scale_of_key
from cupyattn.arrays.interchange import operands, unchanged
from cupyattn.arrays.kinds import Array, as_float64, check_values
from cupyattn.bounds import codes
from cupyattn.bounds.bound import Bound, assemble, empty, of_block, widest
from cupyattn.bounds.foreign import bound_foreign
from cupyattn.bounds.rows import TERMS as TERMS
from cupyattn.bounds.rows import Shared, block_bound
from cupyattn.bounds.scores import perturb, scaling_errors
from cupyattn.kernels.numerics import MOST_PIECES, Numerics, check_features
from cupyattn.kernels.tile_pieces import share_out
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.attention import KernelCall, in_every_form, kernel_call_of
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.checks import check_smoothing
from cupyattn.problem.form import Kernel
from cupyattn.problem.settings import TurnedOptions, Unpack, takes_options
from cupyattn.quant.operand_protocol import check_one_sequence
from cupyattn.reference.exact import ScoreBlock, blocks_of


@explains_foreign_arguments
@takes_options
def attention(
    q: Array | None,
    k: Array | None,
    v: Array | None,
    *,
    variant: str = "fa",
    numerics: Numerics | None = None,
    tiles: Tiles | None = None,
    form: str | None = None,
    rows: Array | None = None,
    quantized: Any = None,
    **options: Unpack[TurnedOptions],
) -> Bound:
    r"""Bound ``|kernel - exact attention|`` of the operands that the kernel received (J2).

    Parameters
    ----------
    q : (batch, heads, len_q, head_dim) array or None
        float16, bfloat16 or float32. Ignored if `quantized` is given.
    k, v : (batch, heads_kv, len_kv, head_dim) array or None
        Same type as q.
    variant : str
        The rung. It determines `numerics` and `tiles` if they are omitted.
    numerics : Numerics, optional
        Rounding points and types of the kernel. The bound uses nothing else of it.
    tiles : Tiles, optional
        Block sizes. Only ``block_kv`` matters, the number of keys between two rescalings.
    form : {"portable", "sm90", "split"}, optional
        Form of the kernel. When omitted, and `numerics` with it, the bound is the widest of the
        forms that this version runs for such operands on any architecture.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask, rows
        As for `cupyattn.reference.attention_exact`.
    rope, rope_interleaved, rope_offset_q
        As for `cupyattn.attention`. The bound refers to attention of the operands as the kernel
        turns them, `cupyattn.problem.row_preparation.Rope.turned`. `rotation` bounds the rounding
        of turning (R0).
    quantized : QuantizedQKV, optional
        INT8 operands. The bound then refers to attention of ``quantized.dequantize()``.

    Returns
    -------
    Bound
        Terms R2 to R7, each (batch, heads, len(rows), head_dim), float64.

    Raises
    ------
    TypeError, ValueError
        For operands or options that do not fit together.

    Notes
    -----
    With W_j the weight that the kernel in effect gives key j and p'_j = W_j / Σ W, the output is

    .. math:: fl\left(\frac{(1+ε_1)(1+ε_2)}{1+θ_l} \sum_j p'_j (1+ρ_j)(1+θ_j) v_j\right)

    p' is a softmax of scores perturbed by R2, R3 and R4. The bound of `softmax_perturbation` is
    split among them in proportion to Σ p_j d_j. R5 is ρ, R6 is θ and θ_l, and R7 is ε and the final
    rounding. All products are multiplied out, without first-order approximation.

    Examples
    --------
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> bound = attention(x, x, x, variant="fa_tc")
    >>> bound.total.shape, bool((bound.total < 2e-3).all())
    ((1, 1, 8, 16), True)
    """
    q, k, v = operands(q=q, k=k, v=v)
    check_values("rows", rows)
    if quantized is None and (q is None or k is None or v is None):
        raise TypeError("q, k and v may only be None where quantized is given")
    given = locals()
    received = kernel_call_of(given)
    if form is not None or numerics is not None:
        return bound_kernel(received, rows=rows, numerics=numerics)
    return widest([bound_kernel(one, rows=rows) for one in in_every_form(received)])


def bound_kernel(
    received: KernelCall, *, rows: Array | None = None, numerics: Numerics | None = None
) -> Bound:
    """Bound the error of a kernel for the operands that it received.

    Parameters
    ----------
    received : KernelCall
    rows, numerics
        As for `attention`.
    """
    if numerics is not None and numerics.foreign is not None:
        return bound_foreign(received, numerics, rows=rows)
    (q, k, v), shared = taken_by(received, numerics)
    terms, lse = empty(q, k, v, rows, TERMS)
    for block in blocks_of(q, k, v, shared.sigma, received.scores, rows):
        found, lse[block.index] = block_bound(block, shared)
        for tag, term in found.items():
            terms[tag][block.index] = term
    return assemble(terms, lse)


def predict_kernel(received: KernelCall, *, rows: Array | None = None) -> codes.Prediction:
    """Predict the codes of P and the output of a kernel with codes of P.

    Parameters
    ----------
    received : KernelCall
        Has the tiles of the call.
    rows
        As for `attention`.

    Returns
    -------
    Prediction
        Arrays of shapes (batch, heads, len(rows), head_dim) and (batch, heads, len(rows)).
    """
    (q, k, v), shared = taken_by(received)
    n, tiles = shared.n, shared.tiles
    if not n.by_tile:
        raise ValueError(f"codes of P are predicted, and P of this kernel is {n.p_type}")
    if not _may_cut(received.kernel):
        n = replace(n, pieces=0)
    found, in_doubt = empty(q, k, v, rows, ("o", "bound"))
    for block in blocks_of(q, k, v, shared.sigma, received.scores, rows):
        if not block.S.shape[-1]:
            continue
        score = perturb(block, n, tiles, shared.sigma, shared.scaling)
        mean, v_scale = of_block(shared.v_mean, block), of_block(shared.v_scale, block)
        if n.values == "fp8":
            v_scale = _scales_by_key(received.quantized, block)
        one = codes.predict(block, score, n, tiles, shared.scaling.common, mean, v_scale)
        found["o"][block.index], found["bound"][block.index] = one.o, one.bound
        in_doubt[block.index] = one.in_doubt
    return codes.Prediction(*map(merge_heads, (found["o"], found["bound"], in_doubt)))


def _may_cut(kernel: Kernel) -> bool:
    """Whether the lengths of a call let its tiles be cut into pieces along the keys."""
    call, tiles = kernel.launched, kernel.tiles
    # A record of form and tiles alone does not say whether heads that share keys were stacked.
    whole = call.causal and not call.stack and call.heads == call.heads_kv
    if not kernel.row.pieces or call.window or whole:
        return False
    steps = -(-call.len_kv // tiles.block_kv)
    return share_out(1, steps, MOST_PIECES + 1, tiles.block_kv).cut > 0


def taken_by(
    received: KernelCall, numerics: Numerics | None = None
) -> tuple[tuple[Array, Array, Array], Shared]:
    """Return q, k and v as a kernel multiplies and sums them, and the values that its bounds share.

    Parameters
    ----------
    received, numerics
        As for `bound_kernel`.
    """
    kernel, options, quantized = received.kernel, received.scores, received.quantized
    call = kernel.call
    n = numerics or kernel.numerics(quantized and quantized.config)
    check_features(n, options["softcap"], options["bias"])
    if (quantized is None) != (n.scaling != "dequantised"):
        way_out = (
            "works on quantised operands: give quantized=cupyattn.quantize(q, k, v), with the "
            "quant of the call"
            if quantized is None
            else "works on q, k and v as they are: leave quantized out, or name fa_int8"
        )
        raise ValueError(f"{kernel.variant.name} {way_out}")
    if quantized is None:
        q, k, v = received.prepared
    else:
        quantized = quantized.unpacked()
        q, k, v = kernel_operands(quantized)
        if quantized.v_codes is not None:  # the kernel sums V without its mean
            v = quantized.centred_values()
        check_smoothing(options["softcap"], quantized.k_mean)
    shared = Shared(
        n, kernel.tiles, call.scale, scaling_errors(n, call.scale, quantized, call.softcap),
        None if quantized is None else quantized.k_mean,
        quantized.v_mean if n.value_codes else None,
        _largest_scales(quantized.v_scale) if _sums_codes(n) else None,
        kernel.cut if n.splits else None,
    )  # fmt: skip
    return (q, k, v), shared


def _sums_codes(n: Numerics) -> bool:
    """Whether a kernel drops bits of its sums in units of codes."""
    return bool(n.shifts) or n.values == "fp8" or (n.value_codes and n.values == "tensor_core")


def _largest_scales(v_scale: Array) -> Array:
    """Return the largest scale of each channel of V, 0 where there are no keys."""
    return v_scale.max(axis=2) if v_scale.shape[2] else v_scale.sum(axis=2)


def _scales_by_key(quantized: Any, block: ScoreBlock) -> Array:
    """Return the scales of codes of V as the values of a block, (..., keys, head_dim)."""
    batch, head, _, _ = block.index
    scale, keys = quantized.v_scale[batch, head], block.v.shape[-2]
    return as_float64(value_scale_of_key(scale, quantized.group_v, keys))[:, :, None]


def kernel_operands(quantized: Any) -> tuple[Array, Array, Array]:
    """Return the operands that an INT8 kernel multiplies: dequantised, in float64, without mean.

    Any mean is valid [L17], also the mean that pruning passes on [L53].

    The mean that smoothing subtracted from the keys shifts all scores of a row by sigma q.mean. The
    kernel adds this shift to lse alone.
    """
    check_one_sequence(quantized)
    q, k, v = replace(quantized, k_mean=None, as_given=unchanged).dequantize("float64")
    return q, k, v
