"""Outliers and errors of one weight in INT8 codes, in one pass that also makes the codes.

Sums of squares go over the rows of a block in float32, and from there in float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.threads import in_threads, thread_count
from cupyattn.quant.blocks import (
    as_matrix,
    block_max,
    by_column,
    by_line,
    panels,
    row_strips,
    scale_shape,
    strips,
)
from cupyattn.quant.quantizers import scale_of_absmax
from cupyattn.reference.act_quant import row_scales

Array = Any

#: An outlier is an element beyond so many times the root mean square of its block. Of normal data
#: one in 16,000 is; more than one in 16 can never be.
OUTLIER_RMS = 4.0
#: Number of elements that a thread processes at a time: with intermediate results they fit in an L2
#: cache.
PART_ELEMENTS = 2**17
#: Blocks whose largest magnitude lies outside of these limits: float32 may not hold their squares.
NARROW_SQUARES = (2.0**-40, 2.0**60)


@dataclass(frozen=True)
class WeightErrors:
    """Sums over the elements of a weight.

    Parameters
    ----------
    elements, nonfinite : int
        Of these, how many are NaN or infinite; if any are, only `largest` means something.
    largest : float
        Largest finite magnitude.
    outliers : int
    max_error, total_error : float
        Largest and summed difference between the weight and what its codes stand for.
    noise, signal, loud : float
        Sums of squares: of those differences, of the weight, and of its outliers.
    """

    elements: int
    nonfinite: int = 0
    largest: float = 0.0
    outliers: int = 0
    max_error: float = 0.0
    total_error: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    outlier_power: float = 0.0

    @classmethod
    def sum_of(cls, parts: Iterable[WeightErrors]) -> WeightErrors:
        """Return the sums over all parts, added in their order."""
        n, nonfinite, largest, outliers, worst = 0, 0, 0.0, 0, 0.0
        total, noise, signal, outlier_power = 0.0, 0.0, 0.0, 0.0
        for one in parts:
            n, nonfinite = n + one.elements, nonfinite + one.nonfinite
            outliers += one.outliers
            largest, worst = max(largest, one.largest), max(worst, one.max_error)
            total, noise = total + one.total_error, noise + one.noise
            signal, outlier_power = signal + one.signal, outlier_power + one.outlier_power
        return cls(n, nonfinite, largest, outliers, worst, total, noise, signal, outlier_power)

    def figures(self) -> dict[str, float | None]:
        """Return the figures of a `TensorReport` that follow from the sums."""
        return {
            "outlier_ratio": self.outliers / self.elements,
            "max_error": self.max_error,
            "mean_error": self.total_error / self.elements,
            "sqnr_db": decibels(self.signal, self.noise),
            "inlier_sqnr_db": decibels(self.signal - self.outlier_power, self.noise),
        }


def decibels(signal: float, noise: float) -> float | None:
    """Return the ratio of two sums of squares in decibels, None without noise."""
    if not noise:
        return None
    return 10 * math.log10(max(signal, sys.float_info.min) / noise)


def outlier_limit(mean_square: Array) -> Array:
    """Return the largest float32 numbers that are no outliers of blocks of such mean squares.

    A float32 magnitude lies beyond this limit exactly if its square, which float64 holds, lies
    beyond `OUTLIER_RMS` squared times the mean.
    """
    bound = OUTLIER_RMS**2 * mean_square
    with np.errstate(over="ignore", invalid="ignore"):
        limit = np.sqrt(bound).astype(np.float32)
        above = np.nextafter(limit, np.float32(np.inf))
        limit = np.where(np.square(above.astype(np.float64)) <= bound, above, limit)
        below = np.nextafter(limit, np.float32(0))
        return np.where(np.square(limit.astype(np.float64)) <= bound, limit, below)


def weight_errors(
    w: Array, block_size: int, strategy: str, made: tuple[Array, Array] | None = None
) -> WeightErrors:
    """Return the errors of a weight's codes.

    Parameters
    ----------
    w : array, (out, in) or (out, in, ...), float16, bfloat16 or float32
    block_size : int
    strategy : {"block", "channel"}
        Groups that share a scale. Outliers are always counted by blocks.
    made : (codes, scales), optional
        Empty arrays as `made_for` returns them, which are filled as `cupyattn.weight_quant` would.

    Returns
    -------
    WeightErrors

    Notes
    -----
    The sums are the same with any number of threads.
    """
    matrix = as_matrix(w)
    threads = thread_count(matrix.size)
    codes, scales = (as_matrix(made[0]), made[1]) if made else (None, None)
    of_rows: list[Array] | None = None
    if strategy == "channel":
        runs_of_rows = in_threads(
            lambda run: [row_scales(matrix[rows]) for rows in run],
            [*row_strips(matrix.shape)], threads,
        )  # fmt: skip
        in_order = [pair for run in runs_of_rows for pair in run]
        of_rows = [np.concatenate(x) for x in zip(*in_order, strict=True)]
        if scales is not None:
            scales[...] = of_rows[0]

    def work(cut: Sequence[tuple[Any, Any]]) -> list[WeightErrors]:
        found, scratch = [], _Scratch()
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for part, blocks in cut:
                values = scratch.taken(matrix[part], block_size)
                coding = None
                if of_rows is not None:
                    coding = [by_line(x[part[0]], block_size) for x in of_rows]
                into = None if codes is None else codes[part]
                one, scales_here = _errors_of(values, block_size, coding, scratch, into)
                found.append(one)
                if scales is not None and of_rows is None:
                    scales[blocks] = scales_here
        return found

    cut = [*panels(matrix.shape, block_size, PART_ELEMENTS)]
    runs = in_threads(work, cut, threads)
    return WeightErrors.sum_of(one for run in runs for one in run)


def made_for(shape: tuple[int, ...], block_size: int, strategy: str) -> tuple[Array, Array]:
    """Return arrays for the codes and the scales of a weight of such a shape."""
    scales = np.empty(scale_shape(shape, block_size, strategy), np.float32)
    return np.empty(shape, np.int8), scales


def magnitudes(tensor: Array) -> WeightErrors:
    """Return how many elements are not finite, and the largest finite magnitude, nothing else."""
    flat = tensor.reshape(-1)
    # NOTE: float32 holds every type but float64, and the parts of complex numbers.
    wide = np.float64 if tensor.dtype == np.float64 else np.float32
    nonfinite, largest = 0, 0.0
    for part in strips(flat.size, PART_ELEMENTS):
        values = np.abs(flat[part].real.astype(wide))
        if flat.dtype.kind == "c":  # no sum of squares, which may overflow
            np.maximum(values, np.abs(flat[part].imag), out=values)
        top = float(values.max())
        if not math.isfinite(top):
            finite = np.isfinite(values)
            nonfinite += values.size - int(np.count_nonzero(finite))
            top = float(values.max(where=finite, initial=0))
        largest = max(largest, top)
    return WeightErrors(flat.size, nonfinite, largest)


class _Scratch:
    """Memory of a thread for the part in work: to allocate it again and again takes longer."""

    def __init__(self) -> None:
        self._values, self._sizes, self._work = (np.empty(0, np.float32) for _ in range(3))

    def taken(self, part: Array, block_size: int) -> Array:
        """Return a part that `panels` cut as float32, as `by_line` views it."""
        if part.size > self._values.size:
            names = ("_values", "_sizes", "_work")
            for name in names:
                setattr(self, name, np.empty(part.size, np.float32))
        values = self._values[: part.size].reshape(part.shape)
        np.copyto(values, part, casting="unsafe")
        return by_line(values, block_size)

    def beside(self, values: Array) -> tuple[Array, Array]:
        """Return memory for two more arrays of that shape."""
        return tuple(
            x[: values.size].reshape(values.shape) for x in (self._sizes, self._work)
        )  # type: ignore[return-value]


def _errors_of(
    values: Array, block_size: int, coding: Sequence[Array] | None, scratch: _Scratch, into: Array
) -> tuple[WeightErrors, Array]:
    """Return the sums over a part, and the scales of its blocks.

    Parameters
    ----------
    values : array, (lines of blocks, rows of a line, columns), float32
    block_size : int
    coding : scale and inverse scale, (lines of blocks, rows of a line, 1), optional
        Counts of the blocks when omitted.
    scratch : _Scratch
        Arrays whose memory is overwritten.
    into : array, (rows, columns), int8, optional
        Gets the codes.
    """
    columns = values.shape[2]
    sizes, work = scratch.beside(values)
    np.abs(values, out=sizes)
    top = block_max(sizes.max(axis=1), block_size)
    scales, inverse = scale_of_absmax(top)
    if coding is None:
        by, back = (by_column(x, block_size, columns)[:, None, :] for x in (inverse, scales))
    else:
        back, by = coding
    np.multiply(values, by, out=work)
    np.rint(work, out=work)
    if not by.all():  # 0 alone is the inverse of a scale that is not finite
        np.copyto(work, 0, where=np.isnan(work))
    if into is not None:
        np.copyto(into, work.reshape(into.shape), casting="unsafe")
    if not by.all() or not np.isfinite(top).all():
        finite = np.isfinite(sizes)
        bad = int(finite.size - np.count_nonzero(finite))
        largest = float(sizes.max(where=finite, initial=0))
        return WeightErrors(values.size, bad, largest), scales
    work *= back
    work -= values
    error = np.abs(work, out=work)
    worst, total = float(error.max()), float(error.sum(axis=1).sum(dtype=np.float64))
    least, largest = float(top.min(where=top > 0, initial=np.inf)), float(top.max())
    if NARROW_SQUARES[0] <= least and largest <= NARROW_SQUARES[1]:
        squares = np.square(error, out=work)
        noise = float(squares.sum(axis=1).sum(dtype=np.float64))
        np.square(values, out=work)
    else:
        squares = np.square(error, dtype=np.float64)
        noise = float(squares.sum())
        work = np.square(values, out=squares, dtype=np.float64)
    of_blocks = _block_sums(work.sum(axis=1), block_size)
    widths = np.minimum(block_size, columns - block_size * np.arange(of_blocks.shape[1]))
    limit = outlier_limit(of_blocks / (widths * values.shape[1]))
    far = sizes > by_column(limit, block_size, columns)[:, None, :]
    outliers = int(np.count_nonzero(far))
    outlier_power = float(work[far].sum(dtype=np.float64)) if outliers else 0.0
    found = WeightErrors(
        values.size, 0, largest, outliers, worst, total, noise, float(of_blocks.sum()),
        outlier_power,
    )
    return found, scales


def _block_sums(of_columns: Array, block_size: int) -> Array:
    """Return the sums of each `block_size` numbers along the last axis, in float64."""
    starts = np.arange(0, of_columns.shape[1], block_size)
    return np.add.reduceat(of_columns.astype(np.float64), starts, axis=1)
