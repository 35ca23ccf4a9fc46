"""`AffineInt8Linear`: a linear layer whose weight is INT8 codes with zero points."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host, take, taken
from cupyattn.arrays.kinds import STORAGE, array_namespace, as_float64
from cupyattn.bounds.products import affine_error
from cupyattn.bounds.values import rounding_to_codes, rounding_with_zero_points
from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.target import check_backend
from cupyattn.ops.act_quant import act_quant
from cupyattn.ops.gemm import int8_gemm
from cupyattn.ops.linear import check_bias, check_given, check_input
from cupyattn.quant.blocks import (
    BLOCK_SIZE,
    check_codes,
    check_out_dtype,
    check_values,
    check_weight_of,
)
from cupyattn.reference.weights import quantize_channels_affine

Array = Any


class AffineInt8Linear:
    """A linear layer: ``x W^T + bias`` with ``W = scale (code - zero)`` and x quantised in a call.

    Each output channel has a scale and a zero point. Its codes fill the range of its weights, even
    if this range is not centred at 0. The product of codes is that of `Int8Linear`. Row sums of the
    codes of x then correct it for the zero points.

    Parameters
    ----------
    codes : array, (out, in), int8
        -128 to 127. NumPy, CuPy, or anything with DLPack.
    scales : array, (out, 1), float32
    zeros : array, (out, 1), int32
        The code of 0 in each channel, -128 to 127.
    bias : array, (out,), float16, bfloat16 or float32, optional
    arch, backend : str, optional
        As for `int8_gemm`; a call may name others.

    Raises
    ------
    TypeError, ValueError
        For arrays that do not fit together.

    Notes
    -----
    With codes a and scale s of a row of x the product is
    ``s scale (Σ a code - zero Σ a)``. The second sum is exact. Separate passes over the result
    subtract its multiple in float32; the kernel is that of symmetric weights. Activations, outliers
    and residuals are not supported: `Int8Linear` has them, and is faster. Zero points gain almost
    nothing for weights whose channels have a mean of about 0.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> w, x = rng.uniform(0, 1, (40, 300)), rng.standard_normal((2, 5, 300))
    >>> w, x = w.astype(np.float16), x.astype(np.float16)
    >>> layer = AffineInt8Linear.from_weight(w)
    >>> y, exact = layer(x), x.astype(np.float64) @ w.astype(np.float64).T
    >>> y.shape, bool((abs(y - exact) <= layer.error(x, w)).all())
    ((2, 5, 40), True)
    """

    def __init__(
        self,
        codes: Array,
        scales: Array,
        zeros: Array,
        bias: Array | None = None,
        *,
        arch: str | None = None,
        backend: str | None = None,
    ) -> None:
        check_given("from_weight(weight) makes them of an array (out, in)", codes, scales)
        codes, scales, zeros = taken(codes=codes, scales=scales, zeros=zeros)
        if bias is not None:
            bias, _ = take("bias", bias, of_parameter=True)
        check_codes(codes, scales, BLOCK_SIZE, "channel")
        if tuple(zeros.shape) != tuple(scales.shape) or zeros.dtype.name != "int32":
            raise ValueError(
                f"zeros must be int32 of shape {tuple(scales.shape)}, one for each channel, got "
                f"{zeros.dtype.name} of shape {tuple(zeros.shape)}"
            )
        check_bias(bias, codes)
        check_arch(arch)
        check_backend(backend)
        self.codes, self.scales, self.zeros, self.bias = codes, scales, zeros, bias
        self.arch, self.backend = arch, backend

    @classmethod
    def from_weight(
        cls,
        weight: Array,
        bias: Array | None = None,
        *,
        arch: str | None = None,
        backend: str | None = None,
    ) -> AffineInt8Linear:
        """Quantise a weight.

        Parameters
        ----------
        weight : array, (out, in), float16, bfloat16 or float32
            NumPy, CuPy, or anything with DLPack. Not modified.
        bias, arch, backend
            As for `AffineInt8Linear`.

        Returns
        -------
        AffineInt8Linear

        Raises
        ------
        TypeError, ValueError
            For an array of another type or shape.
        """
        weight, _ = take("weight", weight, of_parameter=True)
        check_values("weight", weight, least_axes=2)
        if weight.ndim != 2:
            raise ValueError(f"weight must have two axes, got shape {tuple(weight.shape)}")
        return cls(*quantize_channels_affine(weight), bias, arch=arch, backend=backend)

    def __call__(
        self,
        x: Array,
        *,
        out_dtype: str | None = None,
        arch: str | None = None,
        backend: str | None = None,
    ) -> Array:
        """Apply the layer.

        Parameters
        ----------
        x : array, (..., in), float16, bfloat16 or float32
            NumPy, CuPy, or anything with DLPack, on the device of the weight.
        out_dtype : {"float16", "bfloat16", "float32"}, optional
            The type of x when omitted.
        arch, backend
            As for `int8_gemm`; those of the layer when omitted.

        Returns
        -------
        array, (..., out), out_dtype
            Of the kind of x.

        Raises
        ------
        TypeError, ValueError
            For an x that does not fit.
        """
        x, as_given = take("x", x)
        check_input(x, self.codes, None)
        out_dtype = x.dtype.name if out_dtype is None else out_dtype
        check_out_dtype(out_dtype)
        backend = self.backend if backend is None else backend
        codes, scales = act_quant(x, strategy="channel", backend=backend)
        y = int8_gemm(
            codes, scales, self.codes, self.scales, "float32", backend=backend,
            arch=self.arch if arch is None else arch,
        )  # fmt: skip
        sums = codes.sum(axis=-1, keepdims=True, dtype=np.int32)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            of_rows = sums.astype(np.float32) * scales
            of_channels = (self.zeros.astype(np.float32) * self.scales)[:, 0]
            y -= of_rows * of_channels
            if self.bias is not None:
                y += self.bias.astype(np.float32)
            return as_given(y.astype(STORAGE[out_dtype], copy=False))

    def error(self, x: Array, weight: Array, out_dtype: str | None = None) -> Array:
        """Return how far each element of a call may be from the layer in exact arithmetic.

        Parameters
        ----------
        x : array, (..., in)
            Finite, as the layer's arrays must be. Arrays on a device are copied to the host, which
            computes the bound.
        weight : array, (out, in)
            The weight that the layer was made from.
        out_dtype : {"float16", "bfloat16", "float32"}, optional

        Returns
        -------
        array, (..., out), float64
            A bound of ``|layer(x) - x W^T - bias|``.

        Notes
        -----
        The sum of the error of the codes, as for `Int8Linear.error` with [L15] for the weight, and
        of `affine_error`: docs/MATH_REFERENCE.md [L81].
        """
        x, as_given = take("x", x)
        xp = array_namespace(x)
        check_input(x, self.codes, None)
        out_dtype = x.dtype.name if out_dtype is None else out_dtype
        check_out_dtype(out_dtype)
        (weight,) = taken(weight=weight)
        check_weight_of(weight, self.codes)
        given = x, weight, self.codes, self.scales, self.zeros
        rows, weight, of_w, scales_of_w, zeros = map(on_host, given)
        rows = rows.reshape(-1, rows.shape[-1])
        bias = None if self.bias is None else on_host(self.bias)
        codes, scales = act_quant(rows, strategy="channel")
        product = affine_error(codes, scales, of_w, scales_of_w, zeros, out_dtype, bias=bias)
        size_x, exact_w = abs(as_float64(rows)), as_float64(weight)
        error_x = rounding_to_codes(size_x, as_float64(scales))
        error_w = rounding_with_zero_points(exact_w, as_float64(scales_of_w), as_float64(zeros))
        inputs = size_x @ error_w.T + error_x @ (abs(exact_w) + error_w).T
        found = product + inputs * (1 + 2.0**-20)
        return as_given(xp.asarray(found.reshape(*x.shape[:-1], of_w.shape[0])))
