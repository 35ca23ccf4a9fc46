"""`Int8Linear`: a linear layer whose weight and activations are INT8 codes."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import is_cupy, on_host, take, taken
from cupyattn.arrays.kinds import STORAGE, array_namespace, as_float64, as_host_array
from cupyattn.bounds.norm_quant import norm_quant_error
from cupyattn.bounds.products import gated_error, gemm_error
from cupyattn.bounds.values import rounding_to_codes
from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.target import check_backend, choose
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels.limits import is_real
from cupyattn.ops.act_quant import act_quant, act_quant_except, places
from cupyattn.ops.gemm import int8_gemm
from cupyattn.ops.layers import LayersSettings, interpret_layer, steps_before
from cupyattn.ops.norm_quant import norm_quant
from cupyattn.ops.weights import weight_quant
from cupyattn.plans.act_quant import padded
from cupyattn.problem.row_preparation import EPS
from cupyattn.quant.activation import ACTIVATION_SLOPE, GLU, check_activation, columns_of
from cupyattn.quant.blocks import (
    BLOCK_SIZE,
    by_column,
    check_codes,
    check_out_dtype,
    check_weight_of,
    strategy_of_weight,
)
from cupyattn.quant.rotation import arranged, check_rotation, rotated
from cupyattn.quant.row_steps import RowSteps
from cupyattn.quant.smoothing import check_powers, check_smooth
from cupyattn.reference.gemm import by_row
from cupyattn.reference.norm_quant import Vectors

Array = Any
Float64 = npt.NDArray[np.float64]

#: Types of scales that a layer takes; it keeps float32.
FLOATS = ("float16", "bfloat16", "float32", "float64")
#: Least magnitude of an activation that counts as an outlier (Dettmers et al. 2022, LLM.int8).
OUTLIER_THRESHOLD = 6.0


class Int8Linear:
    """A linear layer: ``activation(x W^T + bias)`` with W in INT8 and x quantised in each call.

    Parameters
    ----------
    codes : array, (out, in), int8
        Codes of W, as `weight_quant` makes them. NumPy, CuPy, or anything with DLPack; the layer
        keeps NumPy or CuPy arrays of the same memory.
    scales : array, (ceil(out / 128), ceil(in / 128)) or (out, 1)
        Scales of blocks, or of channels. With channels, x gets one scale for each row, and outliers
        are not supported. Any float type; the layer keeps float32.
    bias : array, (out,), float16, bfloat16 or float32, optional
        torch parameters are detached from their gradients, here and in `from_weight`.
    activation : {"gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}, optional
        The last three are gated linear units: the first half of W's rows is the gate. With
        ``"_gate_last"`` at the end of the name the gate comes second, as in diffusers. The result
        has ``out / 2`` columns.
    outlier_columns : sequence of int
        Columns of x, each once, that are multiplied in 16 bits instead of being quantised. Their
        codes in `codes` are multiplied by zeros.
    outlier_weight : array, (out, outliers), float16 or bfloat16, optional
        These columns of W.
    rotate : {None, "hadamard", "hadamard_contiguous"}
        The codes are of `cupyattn.quant.rotated` (W, rotate), and x is rotated in each call, which
        spreads outlier channels. Only with scales of channels. The last, for files of others,
        moves the channels of x first. A row of x whose group sums to more than float32 holds gives
        NaN; up to 1e36 no row does.
    smooth : array, (in,), float32, optional
        Factors of the channels of x, powers of two: the codes are of the weight divided by them,
        and x is multiplied in the pass that makes its codes, before it is rotated. So the weight
        takes over some of the range of outlier channels. Only with scales of channels.
        `cupyattn.quant.smoothing_factors` makes them of samples.
    block_size : int
        Rows and columns of W that share a scale: 128.
    arch, backend : str, optional
        As for `int8_gemm`; a call may name others.

    Raises
    ------
    TypeError, ValueError
        For arrays that do not fit together.
    UnsupportedError
        For another `block_size`, for outliers beside scales of channels, and for `rotate` beside
        scales of blocks or with a number of channels that 64 does not divide.

    Notes
    -----
    `strategy`, ``"block"`` or ``"channel"``, names the group that shares a scale. A call has two
    launches: one makes codes and dynamic scales of x, and one multiplies, including outliers, bias
    and activation. Outlier columns must be known in advance, because a search in every call would
    synchronise with the device. `outlier_columns` finds them in samples.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> w, x = rng.standard_normal((40, 300)), rng.standard_normal((2, 5, 300))
    >>> x[..., 7] *= 100
    >>> w, x = w.astype(np.float16), x.astype(np.float16)
    >>> layer = Int8Linear.from_weight(w, outlier_columns=outlier_columns(x, 50.0))
    >>> y = layer(x)
    >>> exact = x.astype(np.float64) @ w.astype(np.float64).T
    >>> y.shape, bool((abs(y - exact) <= layer.error(x, w)).all())
    ((2, 5, 40), True)
    """

    def __init__(
        self,
        codes: Array,
        scales: Array,
        bias: Array | None = None,
        *,
        activation: str | None = None,
        outlier_columns: Sequence[int] = (),
        outlier_weight: Array | None = None,
        rotate: str | None = None,
        smooth: Array | None = None,
        block_size: int = BLOCK_SIZE,
        arch: str | None = None,
        backend: str | None = None,
    ) -> None:
        check_given(FROM_WEIGHT, codes, scales)
        codes, scales, outlier_weight, smooth = taken(
            codes=codes, scales=scales, outlier_weight=outlier_weight, smooth=smooth
        )
        if scales.dtype.name in FLOATS:
            scales = scales.astype(np.float32, copy=False)
        if bias is not None:
            bias, _ = take("bias", bias, of_parameter=True)
        settings = LayerSettings(activation, outlier_columns, block_size, arch, backend, rotate)
        columns = check_layer(LayerArrays(codes, scales, bias, outlier_weight, smooth), settings)
        if smooth is not None:
            check_powers(on_host(smooth))
        self.codes, self.scales, self.bias, self.activation = codes, scales, bias, activation
        self.strategy = strategy_of_layer(codes.shape, scales.shape, rotate, smooth)
        self.arch, self.backend, self.rotate, self.smooth = arch, backend, rotate, smooth
        self.outlier_columns, self.outlier_weight = columns, None
        if outlier_weight is not None:
            xp, shape = array_namespace(codes, outlier_weight), outlier_weight.shape
            # As wide as the product reads it.
            self.outlier_weight = xp.zeros((shape[0], padded(shape[1])), outlier_weight.dtype)
            self.outlier_weight[:, : shape[1]] = outlier_weight
            self._places = xp.asarray(places(columns, codes.shape[1]))

    @classmethod
    def from_weight(
        cls,
        weight: Array,
        bias: Array | None = None,
        *,
        strategy: str = "block",
        rotate: str | None = None,
        smooth: Array | None = None,
        activation: str | None = None,
        outlier_columns: Sequence[int] = (),
        outlier_dtype: str | None = None,
        arch: str | None = None,
        backend: str | None = None,
    ) -> Int8Linear:
        """Quantise a weight, except its outlier columns, which count as 0 in the scales.

        Parameters
        ----------
        weight : array, (out, in), float16, bfloat16 or float32
            NumPy, CuPy, or anything with DLPack. Not modified.
        strategy : {"block", "channel"}
            The group that shares a scale: 128 x 128 elements of the weight and 128 channels of a
            row of x, or an output channel and a row of x.
        rotate : {None, "hadamard", "hadamard_contiguous"}
            As for `Int8Linear`: the weight is rotated before it is quantised, in the same pass.
        smooth : array, (in,), float32, optional
            As for `Int8Linear`: the weight is divided by them before it is rotated.
        bias, activation, outlier_columns
            As for `Int8Linear`.
        outlier_dtype : {"float16", "bfloat16"}, optional
            Type of outliers; by default that of the weight, or bfloat16 for float32.
        arch, backend
            As for `Int8Linear`.

        Returns
        -------
        Int8Linear

        Raises
        ------
        TypeError, ValueError
            As for `weight_quant` and `Int8Linear`.
        """
        weight, _ = take("weight", weight, of_parameter=True)
        check_weight(weight)
        if outlier_dtype is None:
            outlier_dtype = "float16" if weight.dtype == np.float16 else "bfloat16"
        if outlier_dtype not in ("float16", "bfloat16"):
            raise ValueError(f"outlier_dtype must be float16 or bfloat16, got {outlier_dtype!r}")
        check_rotation(rotate, weight.shape[1], strategy)
        (smooth,) = taken(smooth=smooth)
        columns = _columns(outlier_columns, weight.shape[1])
        kept = None
        if columns.size:
            index = array_namespace(weight).asarray(columns)
            kept = weight[:, index].astype(STORAGE[outlier_dtype])
            weight = weight.copy()
            weight[:, index] = 0
        return cls(
            *quantised_weight(weight, strategy, rotate, smooth), bias, activation=activation,
            outlier_columns=columns.tolist(), outlier_weight=kept, rotate=rotate, smooth=smooth,
            arch=arch, backend=backend,
        )  # fmt: skip

    def __call__(
        self,
        x: Array,
        *,
        out_dtype: str | None = None,
        residual: Array | None = None,
        gate: Array | None = None,
        arch: str | None = None,
        backend: str | None = None,
    ) -> Array:
        """Apply the layer.

        Parameters
        ----------
        x : array, (..., in), float16, bfloat16 or float32
            NumPy, CuPy, or anything with DLPack, on the device of the weight. With outliers in 16
            bits, x has their type or float32.
        out_dtype : {"float16", "bfloat16", "float32"}, optional
            The type of x when omitted.
        residual, gate : array, optional
            As for `int8_gemm`: the call returns ``residual + gate layer(x)``.
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
        outliers = None
        if self.outlier_weight is not None:
            outliers = Outliers(self.outlier_columns, self._places, self.outlier_weight)
        check_input(x, self.codes, self.outlier_weight)
        y = quantised_product(
            x, self.codes, self.scales, x.dtype.name if out_dtype is None else out_dtype,
            bias=self.bias, activation=self.activation, outliers=outliers, residual=residual,
            gate=gate, rotate=self.rotate, smooth=self.smooth,
            arch=self.arch if arch is None else arch,
            backend=self.backend if backend is None else backend,
        )  # fmt: skip
        return as_given(y)

    def error(
        self,
        x: Array,
        weight: Array,
        out_dtype: str | None = None,
        *,
        residual: Array | None = None,
        gate: Array | None = None,
    ) -> Array:
        """Return how far each element of a call may be from the layer in exact arithmetic.

        Parameters
        ----------
        x : array, (..., in)
            Finite, as the layer's arrays must be. Arrays on a device are copied to the host, which
            computes the bound.
        weight : array, (out, in)
            The weight that the layer was made from.
        out_dtype : {"float16", "bfloat16", "float32"}, optional
        residual, gate : array, optional
            As for the call.

        Returns
        -------
        array, (..., out), float64
            Of the kind of x; rounded up to float32 for JAX without 64 bits. A bound of
            ``|layer(x) - activation(x W^T + bias)|``, or with these of
            ``|layer(x) - residual - gate activation(x W^T + bias)|``.

        Notes
        -----
        Let Δ be the error of a code [L14], or of 16 bits in an outlier column. The errors of the
        operands contribute ``|x| Δw + Δx (|w| + Δw)``, summed over k. An activation multiplies this
        by its slope; a gated linear unit changes it to `gated_error` of both halves. The product
        adds `gemm_error`. docs/MATH_REFERENCE.md [L42]. With `rotate` all of this holds for rotated
        rows of x and W, whose codes are bounded by [L82]; with `smooth` for x times the factors and
        W divided by them, which round nothing.
        """
        x, as_given = take("x", x)
        xp = array_namespace(x)
        check_input(x, self.codes, self.outlier_weight)
        out_dtype = x.dtype.name if out_dtype is None else out_dtype
        check_out_dtype(out_dtype)
        x, weight, residual, gate = _on_host(x, *taken(weight=weight, residual=residual, gate=gate))
        check_weight_of(weight, self.codes)
        own = self.codes, self.scales, self.bias, self.outlier_weight
        of_w, scales_of_w, bias, outlier_weight = _on_host(*own)
        columns = columns_of(of_w.shape[0], self.activation or "")
        rows = x.reshape(-1, x.shape[-1])
        kept = self.outlier_columns
        before, vectors = steps_before(self.rotate, self.smooth is not None), Vectors()
        if self.smooth is not None:
            factors = on_host(self.smooth)
            weight = weight.astype(np.float32) / factors
            vectors = Vectors(weight=arranged(factors[None], self.rotate)[0])
        if before is not None:
            rows, weight = (arranged(one, self.rotate) for one in (rows, weight))
            made = norm_quant(rows, weight=vectors.weight, rotate=before.rotate)
            (codes, scales), outliers = made, None
        elif outlier_weight is None:
            (codes, scales), outliers = act_quant(rows, strategy=self.strategy), None
        else:
            place, dtype = places(kept, of_w.shape[1]), outlier_weight.dtype.name
            codes, scales, of_x = act_quant_except(rows, kept, place, dtype)
            outliers = of_x, outlier_weight
        if residual is not None:
            residual = residual.reshape(-1, columns)
        product = gemm_error(
            codes, scales, of_w, scales_of_w, out_dtype, bias=bias,
            activation=self.activation or "", outliers=outliers, residual=residual, gate=gate,
        )  # fmt: skip
        exact_x = as_float64(rows)
        if vectors.weight is not None:
            exact_x = exact_x * as_float64(vectors.weight)
        size_x, size_w = abs(exact_x), abs(as_float64(weight))
        step_x, step_w = as_float64(scales), as_float64(scales_of_w)  # (rows, 1), by channel
        if self.strategy == "block":
            step_x, step_w = (by_column(x, BLOCK_SIZE, size_x.shape[1]) for x in (step_x, step_w))
            step_w = step_w.repeat(BLOCK_SIZE, axis=0)[: len(size_w)]
        error_x, error_w = rounding_to_codes(size_x, step_x), rounding_to_codes(size_w, step_w)
        if before is not None:
            how = RowSteps(None, "", before.rotate, EPS, "channel")
            error_x = norm_quant_error(rows, scales, how, vectors)
        if self.rotate is not None:
            size_x, size_w = (abs(rotated(one)) for one in (exact_x, weight))
            error_w = norm_quant_error(weight, scales_of_w, _ROTATION, Vectors())
        if outliers is not None:
            for error, exact, made in (
                (error_x, rows, outliers[0]),
                (error_w, weight, outliers[1]),
            ):
                rounded = as_float64(made[:, : kept.size])
                error[:, kept] = abs(rounded - as_float64(exact)[:, kept])
        inputs = size_x @ error_w.T + error_x @ (size_w + error_w).T
        if self.activation in GLU:
            sums = exact_x @ as_float64(weight).T
            sums += 0.0 if bias is None else as_float64(bias)
            inputs = gated_error(sums, inputs, self.activation) * (1 + 2.0**-20)
        else:
            inputs = ACTIVATION_SLOPE[self.activation or ""] * inputs * (1 + 2.0**-20)
        if gate is not None:
            inputs = abs(as_float64(by_row(gate, len(rows)))) * inputs
        found = (product + inputs).reshape(*x.shape[:-1], columns)
        bound = as_given(xp.asarray(found))
        if str(getattr(bound, "dtype", "")) != "float32":
            return bound
        # NOTE: JAX without 64 bits rounds to nearest, which could lower a bound.
        narrow = found.astype(np.float32)
        up = np.where(narrow < found, np.nextafter(narrow, np.float32(np.inf)), narrow)
        return as_given(xp.asarray(up))


#: The steps on the rows of a rotated weight before they are quantised.
_ROTATION = RowSteps(None, "", "hadamard", EPS, "channel")


def check_weight(weight: Array) -> None:
    """Raise ValueError unless a weight has two axes."""
    if weight.ndim != 2:
        raise ValueError(
            f"weight must have two axes, (out, in), got shape {tuple(weight.shape)}"
        )


def quantised_weight(
    weight: Array, strategy: str, rotate: str | None, smooth: Array | None = None
) -> tuple[Array, Array]:
    """Return codes and scales of a weight: `weight_quant`, or with a rotation `norm_quant`.

    Parameters
    ----------
    weight : array, (out, in)
    strategy, rotate, smooth
        As for `Int8Linear.from_weight`.
    """
    check_rotation(rotate, weight.shape[1], strategy)
    before, divided = steps_before(rotate, smooth is not None), None
    if before is None:
        return weight_quant(weight, strategy=strategy)
    if smooth is not None:
        check_smooth(smooth, weight.shape[1], strategy)
        check_powers(on_host(smooth))
        divided = arranged((1 / smooth)[None], rotate)[0]
    return norm_quant(arranged(weight, rotate), weight=divided, rotate=before.rotate)


class Outliers(NamedTuple):
    """Columns of x that a layer keeps in 16 bits."""

    #: Their numbers, on the host.
    columns: npt.NDArray[np.int32]
    #: Result of `cupyattn.ops.act_quant.places` for the outlier columns, on the weight's device.
    places: Array
    #: (out, columns rounded up to `KEPT_PAD`), float16 or bfloat16, zeros at the end.
    weight: Array


def quantised_product(
    x: Array,
    codes: Array,
    scales: Array,
    out_dtype: str,
    *,
    outliers: Outliers | None = None,
    rotate: str | None = None,
    smooth: Array | None = None,
    **options: Any,
) -> Array:
    """Quantise x and multiply it by the codes of a weight, as a layer does.

    Parameters
    ----------
    x : array, (..., in)
        NumPy or CuPy, which `check_input` has passed.
    codes, scales : array
        As for `Int8Linear`.
    out_dtype : {"float16", "bfloat16", "float32"}
    outliers : Outliers, optional
    rotate, smooth
        As for `Int8Linear`.
    **options
        The other arguments of `int8_gemm`: bias, activation, residual, gate, arch, backend, out.

    Returns
    -------
    array, (..., out), out_dtype
    """
    kept, backend = None, options.pop("backend", None)
    x, before = arranged(x, rotate), steps_before(rotate, smooth is not None)
    if smooth is not None:
        smooth = arranged(smooth[None], rotate)[0]
    if outliers is None and choose(backend, is_cupy(x)) == "interpret":  # as models launch them
        activations, arch = (options.pop("activation", None) or "",), options.pop("arch", None)
        settings = LayersSettings(out_dtype, activations, arch, backend, before)
        return interpret_layer(x, codes, scales, settings, weight=smooth, **options)
    if before is not None:
        codes_x, scales_x = norm_quant(x, weight=smooth, rotate=before.rotate, backend=backend)
    elif outliers is None:
        strategy = strategy_of_weight(codes.shape, scales.shape)
        codes_x, scales_x = act_quant(x, strategy=strategy, backend=backend)
    else:
        columns, place, weight = outliers
        dtype = weight.dtype.name
        codes_x, scales_x, kept_x = act_quant_except(x, columns, place, dtype, backend=backend)
        kept = kept_x, weight
    return int8_gemm(
        codes_x, scales_x, codes, scales, out_dtype, outliers=kept, backend=backend, **options
    )


# ---- checks of shapes and types -----------------------------------------------------------------


#: The call that makes a layer of a weight, for the message of `check_given`.
FROM_WEIGHT = "from_weight(weight) makes them of an array (out, in)"


def check_given(made_by: str, codes: Any, scales: Any) -> None:
    """Raise TypeError for sizes in place of arrays, and say which method makes the arrays."""
    for name, x in (("codes", codes), ("scales", scales)):
        if x is None or isinstance(x, numbers.Number):
            raise TypeError(
                f"{name} must be an array, got {x!r}: Int8Linear takes codes and scales, and "
                f"Int8Linear.{made_by}"
            )


class LayerArrays(NamedTuple):
    """Arrays of a layer, or anything with their shapes and types: arguments of `Int8Linear`."""

    codes: Any
    scales: Any
    bias: Any
    outlier_weight: Any
    smooth: Any = None


class LayerSettings(NamedTuple):
    """The other arguments of `Int8Linear`."""

    activation: str | None
    outlier_columns: Sequence[int]
    block_size: int
    arch: str | None
    backend: str | None
    rotate: str | None = None


def check_bias(bias: Any, codes: Any) -> None:
    """Raise ValueError unless a bias that is not None has an element for each output channel."""
    if bias is not None and tuple(bias.shape) != tuple(codes.shape[:1]):
        raise ValueError(
            f"bias must have shape {tuple(codes.shape[:1])}, got {tuple(bias.shape)}"
        )


def strategy_of_layer(
    shape: tuple[int, ...],
    scales_shape: tuple[int, ...],
    rotate: str | None,
    smooth: Array | None = None,
) -> str:
    """Return the strategy of a layer. A single block is a channel if it is rotated or smoothed."""
    by_channel = rotate is not None or smooth is not None
    by_row = by_channel and tuple(scales_shape) == (shape[0], 1)
    return "channel" if by_row else strategy_of_weight(shape, scales_shape)


def check_layer(arrays: LayerArrays, settings: LayerSettings) -> npt.NDArray[np.int32]:
    """Raise unless the arguments of a layer fit together, and return its outlier columns.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for `Int8Linear`.
    """
    codes, scales, bias, outlier_weight, smooth = arrays
    activation, outlier_columns, block_size, arch, backend, rotate = settings
    if block_size != BLOCK_SIZE:
        raise UnsupportedError(
            f"products take blocks of {BLOCK_SIZE}, got block_size={block_size!r}: quantise the "
            "weight again"
        )
    if codes.ndim != 2:
        raise TypeError(f"codes of a layer must have two axes, got {tuple(codes.shape)}")
    strategy = strategy_of_layer(codes.shape, scales.shape, rotate, smooth)
    check_codes(codes, scales, BLOCK_SIZE, strategy)
    check_activation(activation or "", codes.shape[0])
    check_rotation(rotate, codes.shape[1], strategy)
    if smooth is not None:
        check_smooth(smooth, codes.shape[1], strategy)
    check_arch(arch)
    check_backend(backend)
    check_bias(bias, codes)
    columns = _columns(outlier_columns, codes.shape[1])
    if columns.size and strategy == "channel":
        raise UnsupportedError(
            f"outlier_columns go with scales of blocks, got {columns.size} beside scales of "
            "channels: use strategy='block', or no outliers"
        )
    if (outlier_weight is None) != (columns.size == 0):
        raise ValueError("outlier_columns and outlier_weight go together")
    if outlier_weight is not None:
        expected, dtype = (codes.shape[0], columns.size), outlier_weight.dtype.name
        if tuple(outlier_weight.shape) != expected or dtype not in ("float16", "bfloat16"):
            raise ValueError(
                f"outlier_weight must be float16 or bfloat16 of shape {expected}, got "
                f"{dtype} {tuple(outlier_weight.shape)}"
            )
    return columns


def check_input(x: Any, codes: Any, outlier_weight: Any) -> None:
    """Raise unless a layer takes an x of this shape and type."""
    if not x.ndim or x.shape[-1] != codes.shape[1]:
        raise ValueError(f"x must have shape (..., {codes.shape[1]}), got {tuple(x.shape)}")
    if outlier_weight is not None and x.dtype.name not in (outlier_weight.dtype.name, "float32"):
        dtype = outlier_weight.dtype.name
        raise TypeError(
            f"x must be {dtype} or float32, as outliers are kept in {dtype}, got {x.dtype.name}"
        )


def outlier_columns(x: Array, threshold: float = OUTLIER_THRESHOLD) -> list[int]:
    """Return the columns of activations in which a magnitude reaches a threshold.

    Parameters
    ----------
    x : array, (..., in)
        Samples, NumPy, CuPy, or anything with DLPack. On a device this waits for the answer.
    threshold : float

    Returns
    -------
    list of int
        Rising.

    Examples
    --------
    >>> outlier_columns(np.float32([[1, -7, 0], [6, 2, 0]]))
    [0, 1]
    """
    x, _ = take("x", x, of_parameter=True)
    if not x.ndim:
        raise ValueError("x must be (..., in), got ()")
    if not is_real(threshold) or threshold != threshold:
        raise ValueError(f"threshold must be a number, got {shown(threshold)}")
    if not x.size:
        return []
    xp = array_namespace(x)
    largest = xp.abs(x.reshape(-1, x.shape[-1]).astype(np.float32)).max(axis=0)
    return [*xp.flatnonzero(~(largest < threshold)).tolist()]


def _columns(columns: Sequence[int], channels: int) -> npt.NDArray[np.int32]:
    """Return columns as an array; raise TypeError or ValueError for invalid columns."""
    numbers = as_host_array("outlier_columns", columns)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise TypeError(
            "outlier_columns must be whole numbers, such as np.flatnonzero(mask) of a mask, got "
            f"{shown(columns)} of {numbers.dtype}"
        )
    found = numbers.astype(np.int64).reshape(-1)
    if found.size and (found.min() < 0 or found.max() >= channels):
        raise ValueError(f"outlier_columns must be 0 to {channels - 1}, got {columns!r}")
    if np.unique(found).size != found.size:
        raise ValueError(f"outlier_columns must name each column once, got {columns!r}")
    return found.astype(np.int32)


def _on_host(*arrays: Array | None) -> Iterator[Any]:
    """Return NumPy arrays of the same numbers; None stays None."""
    return (None if x is None else on_host(x) for x in arrays)
