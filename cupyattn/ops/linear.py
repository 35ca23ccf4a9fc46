"""`Int8Linear`: a linear layer whose weight and activations are INT8 codes."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import take, taken
from cupyattn.arrays.kinds import STORAGE, array_namespace, as_float64, as_host_array
from cupyattn.bounds.products import gated_error, gemm_error
from cupyattn.bounds.values import rounding_to_codes
from cupyattn.errors import UnsupportedError, shown
from cupyattn.ops.act_quant import act_quant, act_quant_but, places
from cupyattn.ops.gemm import int8_gemm
from cupyattn.ops.weights import weight_quant
from cupyattn.plans.act_quant import padded
from cupyattn.quant.activation import ACTIVATION_SLOPE, GLU, check_activation, columns_of
from cupyattn.quant.blocks import BLOCK_SIZE, check_codes, strategy_of_weight
from cupyattn.reference.gemm import by_row

Array = Any
Float64 = npt.NDArray[np.float64]

#: Magnitude from which on an activation counts as an outlier (Dettmers et al. 2022, LLM.int8).
OUTLIER_THRESHOLD = 6.0


class Int8Linear:
    """A linear layer: ``activation(x W^T + bias)`` with W in INT8 and x quantised in each call.

    Parameters
    ----------
    codes : array, (out, in), int8
        Of W, as `weight_quant` makes them. NumPy, CuPy, or anything with DLPack; the layer keeps
        NumPy or CuPy arrays of the same memory.
    scales : array, (ceil(out / 128), ceil(in / 128)) or (out, 1), float32
        Of blocks, or of channels: then x gets a scale for each row, and outliers have no place.
    bias : array, (out,), float16, bfloat16 or float32, optional
    activation : {"gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}, optional
        The last three are gated linear units: W has the rows of the gate, then as many others, and
        the result ``out / 2`` columns.
    outlier_columns : sequence of int
        Columns of x, each once, that are not quantised but multiplied in 16 bits; what `codes` has
        of them is multiplied by zeros.
    outlier_weight : array, (out, outliers), float16 or bfloat16, optional
        These columns of W.
    block_size : int
        Rows and columns of W that share a scale: 128.

    Raises
    ------
    TypeError, ValueError
        For arrays that do not fit together.
    UnsupportedError
        For another `block_size`, and for outliers beside scales of channels.

    Notes
    -----
    `strategy`, ``"block"`` or ``"channel"``, says what shares a scale. A call takes two launches:
    codes and dynamic scales of x, then the product, in which outliers, bias and activation are.
    Which columns are outliers has to be known beforehand: to look for them in every call would take
    a wait for the device. `outlier_columns` finds them in samples.

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
        block_size: int = BLOCK_SIZE,
    ) -> None:
        if block_size != BLOCK_SIZE:
            raise UnsupportedError(
                f"products take blocks of {BLOCK_SIZE}, got block_size={block_size!r}: quantise "
                "the weight again"
            )
        for name, size in (("codes", codes), ("scales", scales)):
            if size is None or isinstance(size, numbers.Number):
                raise TypeError(
                    f"{name} must be an array, got {size!r}: Int8Linear takes codes and scales, "
                    "and Int8Linear.from_weight(weight) makes them of an array (out, in)"
                )
        codes, scales, bias = taken(codes=codes, scales=scales, bias=bias)
        if codes.ndim != 2:
            raise TypeError(f"codes of a layer must have two axes, got {tuple(codes.shape)}")
        self.strategy = strategy_of_weight(codes.shape, scales.shape)
        check_codes(codes, scales, BLOCK_SIZE, self.strategy)
        check_activation(activation or "", codes.shape[0])
        if bias is not None and tuple(bias.shape) != codes.shape[:1]:
            raise ValueError(f"bias must have shape {codes.shape[:1]}, got {tuple(bias.shape)}")
        self.codes, self.scales, self.bias, self.activation = codes, scales, bias, activation
        columns = _columns(outlier_columns, codes.shape[1])
        if columns.size and self.strategy == "channel":
            raise UnsupportedError(
                f"outlier_columns go with scales of blocks, got {columns.size} beside scales of "
                "channels: use strategy='block', or no outliers"
            )
        self._keep(columns, outlier_weight)

    def _keep(self, columns: npt.NDArray[np.int32], weight: Array | None) -> None:
        """Take the columns that are kept in 16 bits, padded as the product reads them."""
        self.outlier_columns, self.outlier_weight = columns, None
        if (weight is None) != (columns.size == 0):
            raise ValueError("outlier_columns and outlier_weight go together")
        if weight is None:
            return
        weight, _ = take("outlier_weight", weight)
        xp = array_namespace(self.codes, weight)
        expected = (self.codes.shape[0], columns.size)
        if tuple(weight.shape) != expected or weight.dtype.name not in ("float16", "bfloat16"):
            raise ValueError(
                f"outlier_weight must be float16 or bfloat16 of shape {expected}, got "
                f"{weight.dtype.name} {tuple(weight.shape)}"
            )
        self.outlier_weight = xp.zeros((expected[0], padded(columns.size)), weight.dtype)
        self.outlier_weight[:, : columns.size] = weight
        self._places = xp.asarray(places(columns, self.codes.shape[1]))

    @classmethod
    def from_weight(
        cls,
        weight: Array,
        bias: Array | None = None,
        *,
        strategy: str = "block",
        activation: str | None = None,
        outlier_columns: Sequence[int] = (),
        outlier_dtype: str | None = None,
    ) -> Int8Linear:
        """Quantise a weight, but for its outlier columns, which are 0 to the scales of the others.

        Parameters
        ----------
        weight : array, (out, in), float16, bfloat16 or float32
            NumPy, CuPy, or anything with DLPack. Not modified.
        strategy : {"block", "channel"}
            What shares a scale: 128 x 128 of the weight and 128 channels of a row of x, or an
            output channel and a row of x.
        bias, activation, outlier_columns
            As for `Int8Linear`.
        outlier_dtype : {"float16", "bfloat16"}, optional
            What outliers are kept in; the weight's own type, bfloat16 for float32.

        Returns
        -------
        Int8Linear

        Raises
        ------
        TypeError, ValueError
            As for `weight_quant` and `Int8Linear`.
        """
        weight, _ = take("weight", weight)
        if weight.ndim != 2:
            raise ValueError(f"weight must have two axes, got shape {tuple(weight.shape)}")
        if outlier_dtype is None:
            outlier_dtype = "float16" if weight.dtype == np.float16 else "bfloat16"
        if outlier_dtype not in ("float16", "bfloat16"):
            raise ValueError(f"outlier_dtype must be float16 or bfloat16, got {outlier_dtype!r}")
        columns = _columns(outlier_columns, weight.shape[1])
        kept = None
        if columns.size:
            index = array_namespace(weight).asarray(columns)
            kept = weight[:, index].astype(STORAGE[outlier_dtype])
            weight = weight.copy()
            weight[:, index] = 0
        return cls(
            *weight_quant(weight, strategy=strategy), bias, activation=activation,
            outlier_columns=columns.tolist(), outlier_weight=kept,
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
            NumPy, CuPy, or anything with DLPack, where the weight lies. With outliers in 16 bits,
            of their type or float32.
        out_dtype : {"float16", "bfloat16", "float32"}, optional
            The type of x when omitted.
        residual, gate : array, optional
            As for `int8_gemm`: the call returns ``residual + gate layer(x)``.
        arch, backend
            As for `int8_gemm`.

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
        if not x.ndim or x.shape[-1] != self.codes.shape[1]:
            raise ValueError(f"x must have shape (..., {self.codes.shape[1]}), got {x.shape}")
        out_dtype = x.dtype.name if out_dtype is None else out_dtype
        outliers = None
        if self.outlier_weight is None:
            codes, scales = act_quant(x, strategy=self.strategy, backend=backend)
        else:
            dtype = self.outlier_weight.dtype.name
            if x.dtype.name not in (dtype, "float32"):
                raise TypeError(
                    f"x must be {dtype} or float32, as outliers are kept in {dtype}, got "
                    f"{x.dtype.name}"
                )
            codes, scales, kept = act_quant_but(
                x, self.outlier_columns, self._places, dtype, backend=backend
            )
            outliers = kept, self.outlier_weight
        y = int8_gemm(
            codes, scales, self.codes, self.scales, out_dtype, bias=self.bias,
            activation=self.activation, outliers=outliers, residual=residual, gate=gate,
            arch=arch, backend=backend,
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
    ) -> Float64:
        """Return how far each element of a call may be from the layer in exact arithmetic.

        Parameters
        ----------
        x : array, (..., in)
            On the host, finite, as are the layer's own arrays.
        weight : array, (out, in)
            What the layer was made of.
        out_dtype : {"float16", "bfloat16", "float32"}, optional
        residual, gate : array, optional
            As for the call.

        Returns
        -------
        numpy.ndarray, (..., out), float64
            Of ``|layer(x) - activation(x W^T + bias)|``, or with these of
            ``|layer(x) - residual - gate activation(x W^T + bias)|``.

        Notes
        -----
        With Δ the error of a code (Q1), or of 16 bits in a column that is kept: the operands are
        off by ``|x| Δw + Δx (|w| + Δw)``, summed over k, of which an activation passes on its
        slope; the product adds `gemm_error`. docs/MATH_REFERENCE.md, "Block-wise products".
        """
        x, weight = taken(x=x, weight=weight)
        out_dtype = x.dtype.name if out_dtype is None else out_dtype
        rows = x.reshape(-1, x.shape[-1])
        kept = self.outlier_columns
        if self.outlier_weight is None:
            (codes, scales), outliers = act_quant(rows, strategy=self.strategy), None
        else:
            dtype = self.outlier_weight.dtype.name
            codes, scales, of_x = act_quant_but(rows, kept, self._places, dtype)
            outliers = of_x, self.outlier_weight
        if residual is not None:
            residual = residual.reshape(-1, columns_of(self.codes.shape[0], self.activation or ""))
        own = gemm_error(
            codes, scales, self.codes, self.scales, out_dtype, bias=self.bias,
            activation=self.activation or "", outliers=outliers, residual=residual, gate=gate,
        )  # fmt: skip
        size_x, size_w = abs(as_float64(rows)), abs(as_float64(weight))
        step_x, step_w = as_float64(scales), as_float64(self.scales)  # (rows, 1), by channel
        if self.strategy == "block":
            step_x = _spread(scales, size_x.shape, across=False)
            step_w = _spread(self.scales, size_w.shape, across=True)
        error_x, error_w = rounding_to_codes(size_x, step_x), rounding_to_codes(size_w, step_w)
        if outliers is not None:
            for error, exact, made in (
                (error_x, rows, outliers[0]),
                (error_w, weight, outliers[1]),
            ):
                rounded = as_float64(made[:, : kept.size])
                error[:, kept] = abs(rounded - as_float64(exact)[:, kept])
        inputs = size_x @ error_w.T + error_x @ (size_w + error_w).T
        if self.activation in GLU:
            sums = as_float64(rows) @ as_float64(weight).T
            sums += 0.0 if self.bias is None else as_float64(self.bias)
            inputs = gated_error(sums, inputs, self.activation) * (1 + 2.0**-20)
        else:
            inputs = ACTIVATION_SLOPE[self.activation or ""] * inputs * (1 + 2.0**-20)
        if gate is not None:
            inputs = abs(as_float64(by_row(gate, len(rows)))) * inputs
        return np.asarray((own + inputs).reshape(*x.shape[:-1], own.shape[1]))


def outlier_columns(x: Array, threshold: float = OUTLIER_THRESHOLD) -> list[int]:
    """Return the columns of activations in which some magnitude reaches a threshold.

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
    x, _ = take("x", x)
    xp = array_namespace(x)
    largest = xp.abs(x.reshape(-1, x.shape[-1]).astype(np.float32)).max(axis=0)
    found: list[int] = xp.flatnonzero(~(largest < threshold)).tolist()
    return found


def _columns(columns: Sequence[int], channels: int) -> npt.NDArray[np.int32]:
    """Return columns as an array; TypeError or ValueError for what names none."""
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


def _spread(scales: Array, shape: tuple[int, ...], *, across: bool) -> Float64:
    """Return the scale of every element; across: blocks span rows, too."""
    spread = as_float64(scales).repeat(BLOCK_SIZE, axis=1)[:, : shape[1]]
    return np.asarray(spread.repeat(BLOCK_SIZE, axis=0)[: shape[0]] if across else spread)
