"""Sums over the channels of a row, which show errors of P that single elements hide.

An error of one weight moves all channels of a row along the value of its key. So the sum of a row's
errors along a direction has a narrower certain bound than its elements have together. The proof is
docs/MATH_REFERENCE.md, §15.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyattn.arrays.groups import split_heads
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.bounds.bound import Bound
from cupyattn.bounds.kernel import taken_by
from cupyattn.bounds.perturbation import worst_of
from cupyattn.bounds.rows import FLUSHED_WEIGHT
from cupyattn.bounds.scores import REFERENCE
from cupyattn.bounds.signed import WeightErrors, weight_errors
from cupyattn.kernels.numerics import Numerics
from cupyattn.problem.attention import KernelCall
from cupyattn.reference.exact import ScoreBlock, blocks_of

#: Keys of a group that is tested for a wrong scale of K.
GROUP = 64
#: Share of the elements' bounds that covers float64's own roundings of a sum.
FLOAT64 = 2.0**-20


@dataclass(frozen=True)
class FunctionalRatio:
    """The largest error of one kind of sum.

    Parameters
    ----------
    name : str
        Direction along which errors of a row are summed, named by the kind of fault that moves a
        row so.
    ratio : float
        As a fraction of its bound; it must not exceed 1.
    index : tuple of int
        Place of the error: (batch, head, row), and the key or the first key of the group, if any.
    """

    name: str
    ratio: float
    index: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"  along {self.name}: errors of a row sum to {self.ratio:.3g} of their bound "
            f"at {self.index}"
        )


def sums_over_channels(
    received: KernelCall,
    residual: Array,
    bound: Bound,
    rows: Array,
    *,
    numerics: Numerics | None = None,
) -> tuple[FunctionalRatio, ...]:
    """Hold sums of a row's errors to their bounds, and return the worst of each kind [L78].

    Parameters
    ----------
    received : KernelCall
    residual : (batch, heads, len(rows), head_dim) array
        Output less exact attention, float64.
    bound : Bound
        Bound of these rows.
    rows : 1-D integer array
    numerics : Numerics, optional
        As for `cupyattn.bounds.attention`.

    Returns
    -------
    tuple of FunctionalRatio
        Along exact attention, the derivative by the softmax scale, the sum of channels, the scale
        of a group of keys, and the weight of one key. Nothing for kernels whose P is codes.
    """
    (q, k, v), shared = taken_by(received, numerics)
    if shared.n.by_tile:
        return ()
    heads_kv, group = k.shape[1], residual.shape[1] // k.shape[1]
    error = split_heads(residual, heads_kv)
    total = split_heads(bound.total, heads_kv)
    certain = split_heads(bound.terms["R6"] + bound.terms["R7"], heads_kv)
    worst: dict[str, FunctionalRatio] = {}
    for block in blocks_of(q, k, v, shared.sigma, received.scores, rows):
        if block.S.shape[-1] == 0:
            continue
        part = _Part.of(block, error, total, certain, weight_errors(block, shared))
        for name, first_key, ratio in part.ratios():
            most, at = worst_of(ratio)
            if at and (name not in worst or most > worst[name].ratio):
                places = [np.arange(n)[s] for n, s in zip(error.shape, block.index, strict=False)]
                batch, head, member, row = (int(p[i]) for p, i in zip(places, at, strict=False))
                where = (batch, head * group + member, int(rows[row]))
                key = (at[4],) if len(at) == 5 else first_key
                worst[name] = FunctionalRatio(name, most, (*where, *key))
    return tuple(worst.values())


@dataclass(frozen=True, eq=False)
class _Part:
    """A block of rows: errors, bounds of their elements, and bounds of the errors of its
    weights."""

    block: ScoreBlock
    v: Array
    o: Array
    error: Array
    certain: Array
    total: Array
    usable: Array
    weights: WeightErrors

    @classmethod
    def of(
        cls, block: ScoreBlock, error: Array, total: Array, certain: Array, weights: WeightErrors
    ) -> _Part:
        xp = array_namespace(error)
        v = xp.where(xp.isfinite(block.v), block.v, 0.0)
        error, total, certain = (x[block.index] for x in (error, total, certain))
        usable = (xp.isfinite(error) & xp.isfinite(total)).all(axis=-1)
        usable &= xp.isfinite(weights.c).all(axis=-1)
        error, total, certain = (
            xp.where(usable[..., None], x, 0.0) for x in (error, total, certain)
        )
        flushed = FLUSHED_WEIGHT * xp.abs(v).sum(axis=-2, keepdims=True) * weights.inverse_l
        return cls(block, v, weights.P @ v, error, certain + flushed, total, usable, weights)

    def ratios(self) -> Iterator[tuple[str, tuple[int, ...], Array]]:
        """Yield names, places and ratios of all sums."""
        xp = array_namespace(self.v)
        P, block = self.weights.P, self.block
        S = xp.where(block.admitted & xp.isfinite(block.S), block.S, 0.0)
        yield "exact attention (a scale of O)", (), self._ratio(self.o)
        moved = P * (S - (P * S).sum(axis=-1, keepdims=True))
        yield "the softmax scale", (), self._ratio(moved @ self.v)
        yield "the sum of channels", (), self._ratio(xp.ones_like(self.o))
        for first in range(0, P.shape[-1], GROUP):
            some = slice(first, first + GROUP)
            weight = P[..., some] * S[..., some]
            along = weight @ self.v[..., some, :] - weight.sum(axis=-1)[..., None] * self.o
            yield "the scale of a group of keys", (first,), self._ratio(along)
        yield "the weight of one key", (), self._of_keys()

    def _ratio(self, w: Array) -> Array:
        """Return |sum of w times errors| over its bound: (..., rows)."""
        xp = array_namespace(w)
        along = w @ self.v.swapaxes(-1, -2)
        centre = (w * self.o).sum(axis=-1, keepdims=True)
        bound = (self._scores() * xp.abs(along - centre)).sum(axis=-1)
        bound = bound + (self.weights.rounding * xp.abs(along)).sum(axis=-1)
        size = xp.abs(w)
        bound = bound + (size * (self.certain + FLOAT64 * self.total)).sum(axis=-1)
        return self._over((w * self.error).sum(axis=-1), bound)

    def _of_keys(self) -> Array:
        """Return the same along the value of each key less the output: (..., rows, keys)."""
        xp = array_namespace(self.v)
        values = self.v.swapaxes(-1, -2)
        found = self.error @ values - (self.error * self.o).sum(axis=-1, keepdims=True)
        c = xp.where(self.usable[..., None], self.weights.c, 0.0)
        bound = c @ xp.abs(self.v @ values)
        bound = bound + (c * xp.abs(self.o @ values)).sum(axis=-1, keepdims=True)
        rest = self.certain + FLOAT64 * self.total
        bound = bound + rest @ xp.abs(values)
        bound = bound + (rest * xp.abs(self.o)).sum(axis=-1, keepdims=True)
        return self._over(found, bound)

    def _scores(self) -> Array:
        xp = array_namespace(self.v)
        return xp.where(self.usable[..., None], self.weights.of_scores, 0.0)

    def _over(self, found: Array, bound: Array) -> Array:
        xp = array_namespace(found)
        usable = self.usable if found.ndim == self.usable.ndim else self.usable[..., None]
        bound = bound * REFERENCE
        ratio = xp.abs(found) / xp.where(bound > 0, bound, 1.0)
        return xp.where(usable & (bound > 0), ratio, 0.0)
