"""Bounds of gradients from the bounds of their blocks, for kernels of any library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.kinds import Array, array_namespace, as_float64
from cupyattn.bounds.scores import REFERENCE
from cupyattn.gradients.exact import BiasSums, GradientBlock, over_rows
from cupyattn.gradients.problem import BackwardProblem

#: The terms, in the order in which the kernels round.
TERMS = ("R8", "R9", "R10", "R11", "R12")

#: Function that returns R12 of a gradient. Arguments: its name, the sizes of its terms with their
#: errors, the number of terms, and which elements have no bound.
Summed = Callable[[str, Array, Array, Array], Array]


@dataclass(frozen=True)
class GradientBounds:
    """Bounds of the error of each gradient, element by element.

    Parameters
    ----------
    dq, dk, dv : dict of str to array
        For each gradient, one array for each rounding point. Their sum is its bound.
    dbias, dq_weight, dk_weight : dict of str to array, optional
        The same for the bias and for the weights of `qk_norm`. None if it was not requested.

    Notes
    -----
    +inf means that there is no bound: an operand of the key head is not finite, or a number leaves
    the range of its type.
    """

    dq: dict[str, Array]
    dk: dict[str, Array]
    dv: dict[str, Array]
    dbias: dict[str, Array] | None = None
    dq_weight: dict[str, Array] | None = None
    dk_weight: dict[str, Array] | None = None

    def total(self, name: str) -> Array:
        """Return the bound of a gradient by its name, ``"dq"`` for example."""
        return sum(getattr(self, name).values())

    def dominant(self, name: str, index: tuple[int, ...]) -> str:
        """Return the tag with the largest share of one element of `total`."""
        terms: dict[str, Array] = getattr(self, name)
        return max(terms, key=lambda tag: float(terms[tag][index]))


@dataclass(frozen=True)
class OperandErrors:
    """Magnitudes of Q and K where dS multiplies them, and bounds of their errors there."""

    q: Array
    k: Array
    off_q: Array
    off_k: Array


@dataclass(frozen=True)
class BlockErrors:
    """Bounds of the errors and magnitudes of P and dS of a block as operands, by tag."""

    P: Array  # R9
    largest_P: Array
    dS: dict[str, Array]  # R8 to R11
    largest_dS: Array
    of_bias: dict[str, Array]  # R8 to R11 of P (dP - Delta)
    largest_of_bias: Array
    bad: Array  # boolean: there is no bound, and the others are 0
    operands: OperandErrors | None = None  # None: dS multiplies Q and K as they were received


class BlockSums:
    """Sums of the bounds of blocks, which give the bounds of the gradients.

    Parameters
    ----------
    problem : BackwardProblem
    sigma : float
        The factor of the scores.
    usable : (batch, heads_kv) array of bool
        Whether all operands of a key head are finite.
    summed : callable
        R12 of the kernel.
    """

    def __init__(
        self, problem: BackwardProblem, sigma: float, usable: Array, summed: Summed
    ) -> None:
        q, k = problem.q, problem.k
        xp = array_namespace(q, k)
        self._sigma, self._usable, self._summed = sigma, usable, summed
        self._dq = {tag: xp.zeros(split_heads(q, k.shape[1]).shape) for tag in TERMS}
        self._dk, self._dv = ({tag: xp.zeros(k.shape) for tag in TERMS} for _ in range(2))
        self._size_k, self._size_v = xp.zeros(k.shape), xp.zeros(k.shape)
        self._rows_of_key = xp.zeros(k.shape[:3])
        self._bad_keys = xp.zeros(k.shape[:3], bool)
        self._of_bias = None if problem.of_bias is None else _BiasSums(problem)

    def add(self, block: GradientBlock, e: BlockErrors) -> None:
        """Add the bounds of a block."""
        index, at, admitted = block.scores.index, block.scores.index[:2], block.scores.admitted
        xp, sigma = array_namespace(admitted), self._sigma
        of_k, of_q, of_out = (xp.abs(x) for x in (block.scores.k, block.scores.q, block.d_out))
        if e.operands is not None:
            of_q, of_k = e.operands.q, e.operands.k
        for tag, error in e.dS.items():
            self._dq[tag][index] = sigma * (error @ of_k)
            self._dk[tag][at] += sigma * over_rows(error, of_q)
        if e.operands is not None:
            off_q, off_k = e.operands.off_q, e.operands.off_k
            self._dq["R11"][index] += sigma * (e.largest_dS @ off_k)
            self._dk["R11"][at] += sigma * over_rows(e.largest_dS, off_q)
            of_q, of_k = of_q + off_q, of_k + off_k
        self._dv["R9"][at] += over_rows(e.P, of_out)
        self._size_v[at] += over_rows(e.largest_P, of_out)
        self._size_k[at] += sigma * over_rows(e.largest_dS, of_q)
        self._rows_of_key[at] += admitted.sum(axis=(2, 3))
        self._bad_keys[at] |= e.bad.any(axis=(2, 3))
        size = sigma * (e.largest_dS @ of_k)
        count = admitted.sum(axis=-1).astype(np.float64)[..., None]
        self._dq["R12"][index] = self._summed("dq", size, count, e.bad.any(axis=-1)[..., None])
        if self._of_bias is not None:
            self._of_bias.add(block, e, self._usable[at])

    def bounds(self) -> GradientBounds:
        """Return the bounds, once all blocks have been added."""
        count, bad = self._rows_of_key[..., None], self._bad_keys[..., None]
        self._dk["R12"] = self._summed("dk", self._size_k, count, bad)
        self._dv["R12"] = self._summed("dv", self._size_v, count, bad)
        usable = self._usable[..., None, None]
        dq = self._shown(self._dq, usable[..., None])
        dk, dv = (self._shown(terms, usable) for terms in (self._dk, self._dv))
        of_bias = None if self._of_bias is None else self._of_bias.terms(self._summed)
        return GradientBounds({tag: merge_heads(term) for tag, term in dq.items()}, dk, dv, of_bias)

    def _shown(self, terms: dict[str, Array], usable: Array) -> dict[str, Array]:
        """Return terms, infinite where they are no numbers or operands are not finite."""
        xp = array_namespace(usable)
        return {
            tag: xp.where(
                usable, xp.where(xp.isnan(term), xp.inf, term * REFERENCE),
                xp.inf if tag == "R8" else 0.0,
            )
            for tag, term in terms.items()
        }  # fmt: skip


class _BiasSums:
    """Sums of the bounds of P (dP - Delta) over the axes along which the bias broadcasts."""

    def __init__(self, problem: BackwardProblem) -> None:
        self._errors = {tag: BiasSums(problem) for tag in TERMS[:-1]}  # R8 to R11
        self._size, self._count, self._bad = (BiasSums(problem) for _ in range(3))

    def add(self, block: GradientBlock, e: BlockErrors, usable: Array) -> None:
        """Add the bounds of a block; `usable` (batch, heads_kv): all operands are finite."""
        index, admitted = block.scores.index, block.scores.admitted
        for tag, sums in self._errors.items():
            sums.add(index, e.of_bias[tag])
        self._size.add(index, e.largest_of_bias)
        self._count.add(index, admitted)
        self._bad.add(index, e.bad | admitted & ~usable[..., None, None, None])

    def terms(self, summed: Summed) -> dict[str, Array]:
        """Return the terms of the gradient of the bias."""
        bad, xp = self._bad.total > 0, array_namespace(self._size.total)
        found = {
            tag: xp.where(bad, 0.0, sums.total * REFERENCE) for tag, sums in self._errors.items()
        }
        of_sum = summed("dbias", self._size.total, self._count.total, bad)
        return found | {"R12": of_sum * REFERENCE}


def finite_heads(problem: BackwardProblem) -> Array:
    """Return whether d_out, q, k, v and `out` of a key head are finite, (batch, heads_kv)."""
    k, xp = problem.k, array_namespace(problem.k)
    found = xp.isfinite(as_float64(k)).all(axis=(2, 3))
    found &= xp.isfinite(as_float64(problem.v)).all(axis=(2, 3))
    for x in (problem.d_out, problem.q, problem.out):
        if x is not None:
            found &= xp.isfinite(split_heads(as_float64(x), k.shape[1])).all(axis=(2, 3, 4))
    return found
