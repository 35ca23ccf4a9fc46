"""Exact results and bounds with which `cupyattn.testing.judge` compares outputs, and their rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import operand
from cupyattn.arrays.kinds import NEG_INF, Array, array_namespace, as_float64
from cupyattn.bounds import kernel as kernel_bounds
from cupyattn.bounds.bound import Bound
from cupyattn.bounds.codes import Prediction
from cupyattn.bounds.perturbation import ratio_to_bound, worst_of
from cupyattn.kernels.numerics import Numerics
from cupyattn.problem.attention import KernelCall
from cupyattn.problem.checks import check_scale
from cupyattn.reference.exact import attention_exact

#: Largest number of scores (batch heads len_q len_kv) of a call of which every row is judged.
SMALL_CELL = 2**22
#: Tag of an element that is worse against the prediction of its codes than against exact attention.
PREDICTED = "predicted codes"
#: Number of random query rows in larger calls. At most as many at edges of tiles are added.
SAMPLED_ROWS = 64


def sample_rows(
    len_q: int, block_q: int, seed: int = 0, count: int = SAMPLED_ROWS
) -> npt.NDArray[np.int64]:
    """Choose query rows: drawn ones, the first and the last, and those at the edges of tiles.

    Parameters
    ----------
    len_q : int
        Query rows.
    block_q : int
        Rows of a tile.
    seed : int
        Seed of the draw.
    count : int
        Rows to draw, and the largest number of rows at edges of tiles.

    Returns
    -------
    1-D array, int64
        Sorted, without repeats; all rows where there are no more than `count`.

    Examples
    --------
    >>> rows = sample_rows(1000, 128)
    >>> bool({0, 127, 128, 895, 896, 999} <= set(rows.tolist())), len(rows) >= 64
    (True, True)
    """
    if len_q <= count:
        return np.arange(len_q)
    rng = np.random.default_rng(seed)
    starts = np.arange(0, len_q, block_q)
    edges = np.concatenate([starts, starts[1:] - 1])
    if edges.size > count:
        edges = rng.choice(edges, size=count, replace=False)
    drawn = rng.choice(len_q, size=count, replace=False)
    return np.unique(np.concatenate([[0, len_q - 1], edges, drawn]))


@dataclass(frozen=True)
class Element:
    """An element of O, with the fields of `cupyattn.testing.Report`."""

    ratio: float
    at: tuple[int, ...]
    value: float
    expected: float
    bound: float
    tag: str


@dataclass(frozen=True, eq=False)
class Expectation:
    """Exact results and bounds with which `judge` compares the output of a kernel.

    Parameters
    ----------
    rows : 1-D integer array
        Query rows that are judged.
    o : (batch, heads, len(rows), head_dim) array
        Exact attention of the operands that the kernel multiplies, float64.
    lse : (batch, heads, len(rows)) array
        Log-sum-exp of the same. If smoothing subtracted the mean of K, its score is included.
    bound : Bound
        Bound of the error of an output.
    predicted : Prediction or None
        The output of predicted codes. None if P is not codes or the tiles are unknown.
    of_exact : (array, array)
        Result of `exact` for these rows.
    """

    rows: Array
    o: Array
    lse: Array
    bound: Bound
    predicted: Prediction | None
    of_exact: tuple[Array, Array]

    @property
    def width(self) -> Array:
        """The narrower bound of each element of O."""
        total = self.bound.total
        if self.predicted is None:
            return total
        return array_namespace(total).minimum(total, self.predicted.bound)

    @property
    def unbounded(self) -> Array:
        """Rows in which any output passes, (batch, heads, len(rows)), bool.

        Exact attention is finite there, and no element has a bound.
        """
        xp = array_namespace(self.o)
        return (xp.isfinite(self.o) & ~xp.isfinite(self.width)).all(axis=-1)

    def ratios(self, value: Array) -> Array:
        """Return the errors of O as fractions of their bounds, the larger of both.

        Parameters
        ----------
        value : (batch, heads, len(rows), head_dim) array
            float64.
        """
        xp = array_namespace(value)
        return functools.reduce(xp.maximum, (one[0] for one in self._judgements(value)))

    def worst(self, value: Array) -> Element:
        """Return the worst element of O, given as for `ratios`."""
        judged = [(*worst_of(ratio), *rest) for ratio, *rest in self._judgements(value)]
        ratio, at, beside, total, tag = max(judged, key=lambda one: one[0])
        if not at:
            return Element(ratio, (), 0.0, 0.0, 0.0, "")
        here = (*at[:2], int(self.rows[at[2]]), at[3])
        tag = tag or self.bound.dominant(at)
        return Element(ratio, here, float(value[at]), float(beside[at]), float(total[at]), tag)

    def _judgements(self, value: Array) -> Iterator[tuple[Array, Array, Array, str]]:
        """Yield ratios of O, the expected values, their bounds, and a tag if all elements share
        it."""
        total = self.bound.total
        yield ratio_to_bound(value, self.o, total), self.o, total, ""
        if (of_codes := self.predicted) is not None:
            ratio = ratio_to_bound(value, of_codes.o, of_codes.bound)
            yield ratio, of_codes.o, of_codes.bound, PREDICTED


def expectation(
    received: KernelCall,
    *,
    numerics: Numerics | None = None,
    rows: Array | None = None,
    seed: int = 0,
    exact: Callable[..., Any] = attention_exact,
    codes: bool = True,
    of_exact: tuple[Array, tuple[Array, Array]] | None = None,
) -> Expectation:
    """Compute exact results and bounds once, for many outputs of the same operands.

    Parameters
    ----------
    received : KernelCall
    numerics, rows, seed, exact
        As for `cupyattn.testing.judge`.
    codes : bool
        Whether the call ran with form and tiles of `received`, as in the record of a plan. If so,
        codes of P can be predicted. Codes of given `numerics` are never predicted.
    of_exact : (array, (array, array)), optional
        Rows, and exact attention in them, of an `Expectation` of the same operands.
    """
    kernel, quantized, multiplied = received.kernel, received.quantized, operands_of(received)
    call = kernel.call
    if rows is None:
        small = math.prod(call.score_shape) <= SMALL_CELL
        block_q = kernel.tiles.block_q
        rows = np.arange(call.len_q) if small else sample_rows(call.len_q, block_q, seed)
    rows = operand("rows", array_namespace(*multiplied).asarray(rows))
    if rows.size == 0 and call.len_q > 0:
        raise ValueError(
            f"rows must name at least one of the {call.len_q} query rows, got none: leave it out "
            "to have them chosen"
        )
    if of_exact is None:
        o, lse = exact(*multiplied, return_lse=True, **options_of_exact(received, rows))
    else:
        rows, (o, lse) = of_exact
    known = o, lse
    bound = kernel_bounds.bound_kernel(received, rows=rows, numerics=numerics)
    if quantized is not None and quantized.k_mean is not None:
        # NOTE: a row without keys has lse = -inf, even if its query holds a NaN.
        of_mean = mean_score(multiplied[0], quantized, rows, call.scale)
        lse = array_namespace(lse).where(lse == NEG_INF, lse, lse + of_mean)
    predicted = None
    coded = codes and numerics is None and quantized is not None
    if coded and kernel.numerics(quantized.config).by_tile:
        predicted = kernel_bounds.predict_kernel(received, rows=rows)
    return Expectation(rows, o, lse, bound, predicted, known)


def options_of_exact(received: KernelCall, rows: Array) -> dict[str, Any]:
    """Return the options of exact attention."""
    call = received.kernel.call
    # NOTE: a cache of exact attention has the options as its key, the default scale as None.
    scale = None if call.scale == check_scale(None, call.head_dim) else call.scale
    return {"scale": scale, "rows": rows, **received.scores}


def operands_of(received: KernelCall) -> tuple[Any, Any, Any]:
    """Return q, k, v as the kernel multiplies them."""
    if received.quantized is not None:
        return kernel_bounds.kernel_operands(received.quantized)
    return received.prepared


def mean_score(q: Array, quantized: Any, rows: Array, scale: float | None) -> Array:
    """Return sigma q.mean, which the mean of the keys adds to every score of a row."""
    sigma = check_scale(scale, q.shape[-1])
    mean = as_float64(quantized.k_mean).repeat(q.shape[1] // quantized.k_mean.shape[1], axis=1)
    with np.errstate(invalid="ignore"):  # infinities
        return sigma * (q[:, :, rows] * mean[:, :, None]).sum(axis=-1)
