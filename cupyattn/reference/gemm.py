"""Definition of a product of INT8 codes, its mirror, and the bound of its error.

All of it on NumPy arrays. The kernels and docs/MATH_REFERENCE.md use the same tags G1 to G7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import operand, operands
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.quant.activation import GLU, gate_and_other
from cupyattn.quant.blocks import BLOCK_SIZE, strategy_of
from cupyattn.reference.rounding import fma32

Array = Any
Float64 = npt.NDArray[np.float64]


def activate(x: Float64, activation: str) -> Float64:
    """Return an activation of float64 numbers.

    Parameters
    ----------
    x : array, float64
    activation : {"", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}
        ``x Φ(x)``; the same with ``tanh(sqrt(2/π) (x + 0.044715 x³))`` in place of the error
        function; ``x / (1 + exp(-x))``. Gated linear units halve the last axis: SiLU or a form of
        GELU of the first half, times the second; with ``_gate_last`` the other way round.

    Examples
    --------
    >>> from cupyattn.quant.activation import ACTIVATIONS
    >>> [round(float(activate(np.float64(1.0), name)), 4) for name in ACTIVATIONS]
    [1.0, 0.8413, 0.8412, 0.7311]
    >>> activate(np.float64([[1.0, 2.0]]), "swiglu").round(4).tolist()
    [[1.4621]]
    """
    # NOTE: here, since it takes 0.2 s to import, and attention needs none of it.
    from scipy.special import erf, expit

    if activation in GLU:
        gate, up = gate_and_other(x, activation)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(activate(gate, GLU[activation]) * up)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "gelu":
            return np.asarray(0.5 * x * (1 + erf(x * np.sqrt(0.5))))
        if activation == "gelu_tanh":
            return np.asarray(x * expit(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return np.asarray(x * expit(x)) if activation == "silu" else x


Terms = Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.float32], npt.NDArray[np.float32]]]


def scaled_terms(a: Array, a_scales: Array, b: Array, b_scales: Array) -> Terms:
    """Yield whole numbers, exact sums of products of codes, and both scales of each.

    In blocks of every 128 codes along k, in float32; of channels once, of all codes, in float64.
    """
    if strategy_of(a, a_scales, b, b_scales) == "channel":
        yield as_float64(a) @ as_float64(b).T, a_scales, b_scales.T
        return
    of_b = b_scales.repeat(BLOCK_SIZE, axis=0)[: b.shape[0]]
    for number in range(a_scales.shape[1]):
        here = slice(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE)
        # NOTE: every partial sum stays below 2^24, so float32 is exact in any order.
        dot = a[:, here].astype(np.float32) @ b[:, here].astype(np.float32).T
        yield dot, a_scales[:, number, None], of_b[None, :, number]


def product_operands(
    a: Array, a_scales: Array, b: Array, b_scales: Array, bias: Array | None,
    outliers: tuple[Array, Array] | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arrays of a product as `cupyattn.arrays.interchange.operand` does."""
    if outliers is not None:
        x, w = outliers
        outliers = operand("outliers of x", x), operand("outliers of the weight", w)
    taken = operands(a=a, a_scales=a_scales, b=b, b_scales=b_scales, bias=bias)
    return (*taken, outliers)


def sum_operands(residual: Array | None, gate: Array | None) -> tuple[Any, Any]:
    """Return the addend of a product and its factors, as `product_operands` does."""
    if gate is not None and residual is None:
        raise ValueError("gate goes with residual, got residual=None: give zeros to add nothing")
    residual, gate = operands(residual=residual, gate=gate)
    return residual, gate


def gemm_exact(
    a: Array, a_scales: Array, b: Array, b_scales: Array, *, bias: Array | None = None,
    activation: str = "", outliers: tuple[Array, Array] | None = None,
    residual: Array | None = None, gate: Array | None = None,
) -> Float64:  # fmt: skip
    """Return the product of the numbers behind the codes, in float64.

    Parameters
    ----------
    a : array, (m, k), int8
    a_scales : array, (m, ceil(k / 128)) or (m, 1), float32
    b : array, (n, k), int8
    b_scales : array, (ceil(n / 128), ceil(k / 128)) or (n, 1), float32
        In blocks, or of channels: `cupyattn.quant.blocks.strategy_of`.
    bias : array, (n,), optional
    activation : {"", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}
        A gated linear unit takes a weight of 2 n rows: the gate's first, or last by its name.
    outliers : (array, array), optional
        (m, outliers) and (n, outliers), 16-bit: further columns, which have no scales.
    residual : array, (m, n), optional
        Array to which the result is added.
    gate : array, (n,) or (groups, n), optional
        Factors of the result beforehand, for as many rows to each group.

    Returns
    -------
    array, (m, n), float64

    Examples
    --------
    >>> a, b = np.int8([[1, 2]]), np.int8([[3, 4], [5, 6]])
    >>> gemm_exact(a, np.float32([[0.5]]), b, np.float32([[2.0]])).tolist()
    [[11.0, 17.0]]
    """
    a, a_scales, b, b_scales, bias, outliers = product_operands(
        a, a_scales, b, b_scales, bias, outliers
    )
    residual, gate = sum_operands(residual, gate)
    c = np.zeros((a.shape[0], b.shape[0]))
    with np.errstate(invalid="ignore"):
        for dot, of_a, of_b in scaled_terms(a, a_scales, b, b_scales):
            c += as_float64(dot) * (as_float64(of_a) * as_float64(of_b))
        if outliers is not None:
            c += as_float64(outliers[0]) @ as_float64(outliers[1]).T
        if bias is not None:
            c += as_float64(bias)
        c = activate(c, activation)
        if residual is not None:
            factor = 1.0 if gate is None else as_float64(by_row(gate, len(c)))
            c = as_float64(residual) + factor * c
        return c


def gemm_mirror(
    a: Array, a_scales: Array, b: Array, b_scales: Array, out_dtype: str = "float16", *,
    bias: Array | None = None, activation: str = "",
    outliers: tuple[Array, Array] | None = None, residual: Array | None = None,
    gate: Array | None = None, splits: int = 1, shared: Array | None = None,
) -> Array:  # fmt: skip
    """Return the product as the kernels round it.

    Parameters
    ----------
    a, a_scales, b, b_scales, bias, activation, outliers, residual, gate
        As for `gemm_exact`.
    out_dtype : {"float16", "bfloat16", "float32"}
    splits : int
        Thread blocks that share a tile: `cupyattn.kernels.tiles.GemmTiles`. The sums of channels
        are exact, whoever adds them up.
    shared : array, (m, n), bool, optional
        Elements whose tiles are shared, all when omitted:
        `cupyattn.problem.gemm_form.where_shared`.

    Returns
    -------
    array, (m, n), out_dtype
        The kernels' bits, but for an activation, which is exact here before it is rounded, and for
        outliers, whose sum is.
    """
    a, a_scales, b, b_scales, bias, outliers = product_operands(
        a, a_scales, b, b_scales, bias, outliers
    )
    residual, gate = sum_operands(residual, gate)
    by_channel = strategy_of(a, a_scales, b, b_scales) == "channel"
    if shared is not None and not by_channel:
        (shared,) = operands(shared=shared)
        after: dict[str, Any]
        after = {
            "bias": bias, "activation": activation, "outliers": outliers, "residual": residual,
            "gate": gate,
        }  # fmt: skip
        alone, merged = (
            gemm_mirror(a, a_scales, b, b_scales, out_dtype, **after, splits=s) for s in (1, splits)
        )
        return np.where(shared, merged, alone)
    slices = a_scales.shape[1]
    ends = {rank * slices // splits for rank in range(1, splits)}
    c, part = None, np.zeros((a.shape[0], b.shape[0]), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for number, (dot, of_a, of_b) in enumerate(scaled_terms(a, a_scales, b, b_scales), 1):
            if by_channel:
                part = dot.astype(np.float32) * (of_a * of_b)  # G1, G2
                continue
            part = fma32(dot, of_a * of_b, part)  # G1, G2
            if number in ends:
                c, part = part if c is None else c + part, np.zeros_like(part)  # G2
        if outliers is not None:
            added = as_float64(outliers[0]) @ as_float64(outliers[1]).T
            part = (part + added).astype(np.float32)  # G2
        c = part if c is None else c + part  # G2, from block to block
        if bias is not None:
            c = c + bias.astype(np.float32)  # G3
        if activation in GLU:
            gates, c = gate_and_other(c, activation)
            c = activate(as_float64(gates), GLU[activation]).astype(np.float32) * c  # G4, G7
        else:
            c = activate(as_float64(c), activation).astype(np.float32)  # G4
        if residual is not None:
            factor = np.float32(1) if gate is None else by_row(gate, len(c)).astype(np.float32)
            c = fma32(c, factor, residual.astype(np.float32))  # G6
        return c.astype(STORAGE[out_dtype])  # G5


def by_row(gate: Array, rows: int) -> Array:
    """Return the factors of each row: as many rows, one after the other, share a row of `gate`.

    Examples
    --------
    >>> by_row(np.float32([[1], [2]]), 4).tolist()
    [[1.0], [1.0], [2.0], [2.0]]
    """
    groups = gate if gate.ndim == 2 else gate[None]
    return groups.repeat(max(1, rows // max(1, len(groups))), axis=0)[:rows]
