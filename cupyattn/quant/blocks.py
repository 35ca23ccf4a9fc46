"""INT8 weights and activations: groups that share a scale, in blocks or channels.

With blocks, a weight has a float32 scale for each 128 x 128 elements, and an activation for each
128 adjacent channels of a row. A product of codes applies one pair of scales in each step of 128.
With one scale for each row of both, it applies one pair to each element, at the end. Scales and
codes are defined in `cupyattn.quant.quantizers.quantize_symmetric`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE, array_namespace
from cupyattn.errors import UnsupportedError
from cupyattn.quant.rotation import ROTATIONS, check_by_row

Array = Any

#: Default number of rows and columns that share a scale.
BLOCK_SIZE = 128
#: Groups that share a scale: 128 x 128 elements of a weight and 128 adjacent channels of an
#: activation's row. Or an output channel of a weight (a row) and a row of activations.
STRATEGIES = ("block", "channel")
#: The strategy that `cupyattn.checkpoints.choosing` chooses for each model.
AUTO = "auto"
#: Number of products of codes along k that int32 sums without overflow: -128 times -128 is 2^14.
MOST_CHANNEL_CODES = (2**31 - 1) // 2**14
#: Types of float32 weights that stay unquantised and may lose bits, by short name.
FALLBACK_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Int8Config:
    """Choice of a model's weights that become INT8, and of the other weights' types.

    Parameters
    ----------
    block_size : int
        Rows and columns of a weight that share a scale: 128, the size that `cupyattn.int8_gemm` and
        `cupyattn.Int8Linear` support.
    min_elements_for_int8 : int
        Weights with fewer elements are not quantised.
    max_outlier_ratio : float
        Largest share of outliers, a fraction from 0 to 1, that a weight to be quantised may have.
        Outliers are elements beyond `cupyattn.checkpoints.OUTLIER_RMS` times the root mean square
        of their block.
    symmetric : bool
        Codes -127 to 127 without zero points, the only choice for blocks.
    fallback_dtype : {"bf16", "fp16"}
        Type of float32 weights that may lose bits but are not quantised.
    fp32_patterns : sequence of str
        Shell patterns of names whose weights stay unchanged, such as ``"blocks.0.*"``. ``*`` stands
        for any number of characters, including dots.
    min_sqnr_db : float
        Least ratio, in decibels, of the signal without outliers to quantisation noise that a weight
        to be quantised may have. A few enormous outliers do not add to this signal, but fill the
        range of their blocks.
    strategy : {"auto", "block", "channel"}
        The group that shares a scale: a block, or a row of a weight, which is an output channel.
        Activations have a scale for each 128 channels of a row, or for each row. Channels are
        faster, but err more if some channels of the activations are outliers. "auto" chooses
        channels if given activations allow it or, without activations, if measurements of the
        model's family allow it; otherwise blocks.
    rotate : {"auto", None, "hadamard"}
        Rotation of weights with scales of channels, which spreads outlier channels of the
        activations (`cupyattn.Int8Linear`). "auto" rotates where given activations require it,
        None rotates nothing, and "hadamard" rotates all layers whose number of channels is a
        multiple of 64.
    smooth : {False, "auto", True}
        Factors that move the range of outlier channels from given activations into the weight
        (SmoothQuant, `cupyattn.quant.smoothing_factors`), before it is rotated. False has none,
        "auto" has them in layers that would get blocks otherwise, and True in all layers with
        activations. Only layers of torch that are replaced in memory have factors: files have no
        place for them.

    Raises
    ------
    ValueError
        For a value out of its range.
    UnsupportedError
        For ``symmetric=False``, and for a ``block_size`` other than 128.

    Examples
    --------
    >>> Int8Config(fallback_dtype="fp16").block_size
    128
    """

    block_size: int = BLOCK_SIZE
    min_elements_for_int8: int = 4096
    max_outlier_ratio: float = 0.01
    symmetric: bool = True
    fallback_dtype: str = "bf16"
    fp32_patterns: Sequence[str] = ()
    min_sqnr_db: float = 20.0
    strategy: str = AUTO
    rotate: str | None = AUTO
    smooth: str | bool = False

    def __post_init__(self) -> None:
        if self.strategy != AUTO:
            check_strategy(self.strategy)
        if self.rotate not in (AUTO, *ROTATIONS):
            raise ValueError(
                f"rotate must be {' or '.join(map(repr, (AUTO, *ROTATIONS)))}, got "
                f"{self.rotate!r:.40}"
            )
        if self.rotate not in (AUTO, None):
            check_by_row(str(self.rotate), self.strategy)
        if self.smooth != AUTO and not isinstance(self.smooth, bool):
            raise ValueError(f"smooth must be False, {AUTO!r} or True, got {self.smooth!r:.40}")
        if self.smooth is True and self.strategy == "block":
            raise UnsupportedError(
                "smooth=True goes with strategy='channel' or 'auto', got strategy='block': blocks "
                "hold outliers apart"
            )
        check_block_size(self.block_size)
        if self.block_size != BLOCK_SIZE:
            raise UnsupportedError(
                f"block_size must be {BLOCK_SIZE}, got {self.block_size}: the INT8 products take "
                f"weights in blocks of {BLOCK_SIZE} x {BLOCK_SIZE} only"
            )
        if not _is_integer(self.min_elements_for_int8) or self.min_elements_for_int8 < 0:
            raise ValueError(
                "min_elements_for_int8 must be an integer of at least 0, got "
                f"{self.min_elements_for_int8!r}"
            )
        if not _is_number(self.max_outlier_ratio) or not 0 <= self.max_outlier_ratio <= 1:
            raise ValueError(
                "max_outlier_ratio (--max-outliers) must be a fraction from 0 to 1, got "
                f"{self.max_outlier_ratio!r}: write 0.02 for 2 %"
            )
        if not _is_number(self.min_sqnr_db) or not math.isfinite(self.min_sqnr_db):
            raise ValueError(
                "min_sqnr_db (--min-sqnr) must be a finite number of decibels, got "
                f"{self.min_sqnr_db!r}"
            )
        if self.symmetric is not True:
            raise UnsupportedError(
                f"symmetric={self.symmetric!r} is not supported in models and files, which have "
                "scales alone: use symmetric=True, or cupyattn.AffineInt8Linear for one layer"
            )
        if self.fallback_dtype not in FALLBACK_DTYPES:
            raise ValueError(
                f"fallback_dtype must be {' or '.join(map(repr, FALLBACK_DTYPES))}, "
                f"got {self.fallback_dtype!r}"
            )
        patterns = self.fp32_patterns
        if (
            isinstance(patterns, (str, bytes))
            or not isinstance(patterns, Iterable)
            or not all(isinstance(p, str) for p in patterns)
        ):
            raise ValueError(
                "fp32_patterns must be a sequence of str, such as ('blocks.0.*',), got "
                f"{patterns!r:.60}"
            )
        object.__setattr__(self, "fp32_patterns", tuple(patterns))


def as_matrix(w: Array) -> Array:
    """View a weight (out, in, ...) as (out, everything else).

    Examples
    --------
    >>> as_matrix(np.zeros((4, 3, 2, 2))).shape
    (4, 12)
    """
    columns = 1
    for size in w.shape[1:]:
        columns *= size
    return w.reshape(w.shape[0], columns)


def scale_shape(
    shape: tuple[int, ...], block_size: int, strategy: str = "block"
) -> tuple[int, int]:
    """Return the shape of the scales of a weight of this shape.

    Examples
    --------
    >>> scale_shape((129, 256), 128), scale_shape((8, 3, 3, 3), 16), scale_shape((0, 5), 16)
    ((2, 2), (1, 2), (0, 1))
    >>> scale_shape((129, 256), 128, "channel")
    (129, 1)
    """
    if strategy == "channel":
        return shape[0], 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return -(-shape[0] // block_size), -(-columns // block_size)


def strips(count: int, step: int) -> Iterator[slice]:
    """Yield slices of at most `step` that cover `count`."""
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def panels(
    shape: tuple[int, ...], block_size: int, elements: int = 2**17
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Cut a matrix into parts of whole blocks.

    Parameters
    ----------
    shape : (rows, columns)
    block_size : int
    elements : int
        Approximate number of elements of a part.

    Yields
    ------
    part : (slice, slice)
        Rows and columns: some lines of blocks, or the last line if it is shorter.
    blocks : (slice, slice)
        The places of their scales.

    Examples
    --------
    >>> for (rows, columns), blocks in panels((5, 3), 2, 8):
    ...     print(rows.start, rows.stop, columns.start, columns.stop)
    0 2 0 3
    2 4 0 3
    4 5 0 3
    """
    for columns in strips(shape[1], max(1, elements // block_size**2) * block_size):
        blocks = slice(columns.start // block_size, -(-columns.stop // block_size))
        lines = max(1, elements // (block_size**2 * (blocks.stop - blocks.start)))
        whole = shape[0] // block_size * block_size
        for rows in (*strips(whole, lines * block_size), slice(whole, shape[0])):
            if rows.start < rows.stop:
                line = slice(rows.start // block_size, -(-rows.stop // block_size))
                yield (rows, columns), (line, blocks)


def row_strips(shape: tuple[int, ...], elements: int = 2**17) -> Iterator[slice]:
    """Cut the rows of a matrix into parts of about equal numbers of elements.

    Examples
    --------
    >>> [(rows.start, rows.stop) for rows in row_strips((5, 3), 8)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return strips(shape[0], max(1, elements // max(1, shape[1])))


def by_line(part: Array, block_size: int) -> Array:
    """View a part that `panels` cut as (lines of blocks, rows of a line, columns)."""
    return part.reshape(-1, min(part.shape[0], block_size), part.shape[1])


def block_max(magnitudes: Array, block_size: int) -> Array:
    """Return the maximum of each `block_size` numbers along the last axis; NaN if one is NaN."""
    xp = array_namespace(magnitudes)
    length = magnitudes.shape[-1]
    block_size = min(block_size, max(length, 1))
    blocks = -(-length // block_size)
    if length != blocks * block_size:
        padded = xp.zeros((*magnitudes.shape[:-1], blocks * block_size), np.float32)
        padded[..., :length] = magnitudes
        magnitudes = padded
    grouped = magnitudes.reshape(*magnitudes.shape[:-1], blocks, block_size)
    return grouped.max(axis=-1)


def row_max(magnitudes: Array) -> Array:
    """Return the largest number of each row; 0 for an empty row, NaN if a number is NaN."""
    if magnitudes.shape[-1] == 0:
        return array_namespace(magnitudes).zeros((*magnitudes.shape[:-1], 1), np.float32)
    return magnitudes.max(axis=-1, keepdims=True)


def strategy_of_weight(shape: tuple[int, ...], scales_shape: tuple[int, ...]) -> str:
    """Return the strategy of a weight (out, in), from the shape of its scales.

    Returns
    -------
    str
        ``"block"``, too, if the shape fits neither, or both, as for one row in one block.

    Examples
    --------
    >>> strategy_of_weight((300, 256), (300, 1)), strategy_of_weight((300, 256), (3, 2))
    ('channel', 'block')
    """
    if tuple(scales_shape) == scale_shape(shape, BLOCK_SIZE):
        return "block"
    return "channel" if tuple(scales_shape) == (shape[0], 1) else "block"


def strategy_of(a: Array, a_scales: Array, b: Array, b_scales: Array) -> str:
    """Return the strategy of a product's codes, from the shapes of its scales.

    Parameters
    ----------
    a : array, (..., k)
    a_scales : array, (..., ceil(k / 128)) or (..., 1)
    b : array, (n, k)
    b_scales : array, (ceil(n / 128), ceil(k / 128)) or (n, 1)

    Returns
    -------
    str
        ``"block"``, too, if the shapes fit neither.
    """
    of_rows = tuple(a_scales.shape) == (*a.shape[:-1], 1)
    return strategy_of_weight(b.shape, b_scales.shape) if of_rows and len(b.shape) == 2 else "block"


def by_column(scales: Array, block_size: int, columns: int) -> Array:
    return scales.repeat(min(block_size, columns), axis=-1)[..., :columns]


def rounded_codes(values: Array, inverse: Array) -> Array:
    """Return the codes of float32 numbers, which are overwritten; 0 unless they are finite."""
    xp = array_namespace(values)
    values *= inverse
    xp.rint(values, out=values)
    if xp is np and inverse.all():  # only a scale that is not finite has the inverse 0
        return values.astype(np.int8)
    return xp.where(xp.isnan(values), np.float32(0), values).astype(np.int8)


def check_values(name: str, x: Array, *, least_axes: int) -> None:
    """Raise unless an array has a supported type and enough axes."""
    if x.dtype.name not in STORAGE:
        raise TypeError(
            f"{name} must be {', '.join(STORAGE)}, got {x.dtype.name}: convert it to one of these"
        )
    if x.ndim < least_axes:
        raise ValueError(f"{name} must have {least_axes} or more axes, got shape {tuple(x.shape)}")


def check_codes(codes: Array, scales: Array, block_size: int, strategy: str = "block") -> None:
    """Raise TypeError or ValueError unless these are codes of a weight and their scales."""
    if codes.dtype != np.int8 or codes.ndim < 2 or scales.dtype != np.float32:
        raise TypeError(
            "codes must be int8 with two axes or more and scales float32, got "
            f"{codes.dtype} {tuple(codes.shape)} and {scales.dtype}"
        )
    expected = scale_shape(codes.shape, block_size, strategy)
    if tuple(scales.shape) != expected:
        kind = f"in blocks of {block_size}" if strategy == "block" else "by channel"
        raise ValueError(
            f"scales of codes {tuple(codes.shape)} {kind} must have shape {expected}, got "
            f"{tuple(scales.shape)}"
        )


def check_strategy(strategy: str) -> None:
    """Raise ValueError for a name that is not in `STRATEGIES`."""
    if strategy not in STRATEGIES:
        names = " or ".join(map(repr, STRATEGIES))
        raise ValueError(f"strategy must be {names}, got {strategy!r:.40}")


def check_blocks(strategy: str, block_size: int) -> None:
    """Raise ValueError for a block size that the strategy does not use."""
    check_strategy(strategy)
    check_block_size(block_size)
    if strategy == "channel" and block_size != BLOCK_SIZE:
        raise ValueError(
            f"block_size goes with strategy='block', got {block_size} and strategy='channel': "
            "leave it out"
        )


def check_weight_of(weight: Any, codes: Any) -> None:
    """Raise ValueError for a weight of another shape than the codes of a layer."""
    if tuple(weight.shape) != tuple(codes.shape):
        raise ValueError(
            f"weight must be the weight of this layer, {tuple(codes.shape)}, got "
            f"{tuple(weight.shape)}"
        )


def check_out_dtype(out_dtype: str) -> None:
    """Raise ValueError for a type that weights cannot have."""
    if out_dtype not in STORAGE:
        raise ValueError(f"out_dtype must be {' or '.join(STORAGE)}, got {out_dtype!r}")


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless a block size is an integer of at least 1."""
    if not _is_integer(block_size) or block_size < 1:
        raise ValueError(f"block_size must be an integer of at least 1, got {block_size!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
