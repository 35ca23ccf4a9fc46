"""Parts of bounds: `Bound`, and exact attention of a block of scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.kinds import Array, array_namespace, as_float64
from cupyattn.bounds.scores import LEAST_P, REFERENCE
from cupyattn.kernels.limits import check_shapes
from cupyattn.reference.exact import ScoreBlock, softmax_exact


@dataclass(frozen=True, repr=False)
class Bound:
    """Bound of the error of an output, element by element.

    Parameters
    ----------
    terms : dict of str to (batch, heads, rows, head_dim) array
        One array for each rounding point; they sum to `total`.
    lse : (batch, heads, rows) array
        The same for the log-sum-exp.

    Notes
    -----
    +inf means that there is no bound: a score or value is not finite, or a number leaves the range
    of its type. A row without keys has bound 0, for O = 0 and lse = -inf are exact.
    """

    terms: dict[str, Array]
    lse: Array

    @property
    def total(self) -> Array:
        """The bound: (batch, heads, rows, head_dim), float64."""
        return sum(self.terms.values())

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.lse.shape))
        return f"Bound({shape} rows{_summary('O', self.total)}{_summary('lse', self.lse)})"

    def dominant(self, index: tuple[int, ...]) -> str:
        """Return the tag with the largest share of one element of `total`."""
        return max(self.terms, key=lambda tag: float(self.terms[tag][index]))


def _summary(name: str, bound: Array) -> str:
    """Return median, maximum and number of infinite elements of a bound, in words."""
    xp = array_namespace(bound)
    finite = bound[xp.isfinite(bound)]
    words = "" if not finite.size else (
        f": median {float(xp.median(finite)):.3g}, at most {float(finite.max()):.3g}"
    )  # fmt: skip
    unbounded = int(bound.size - finite.size)
    return f", {name}{words}{f', {unbounded:,} unbounded' * (unbounded > 0)}"


def widest(bounds: Sequence[Bound]) -> Bound:
    """Return the largest of several bounds of the same terms, element by element."""
    first, *others = bounds
    for other in others:
        xp = array_namespace(first.lse)
        larger = other.total > first.total
        terms = {tag: xp.where(larger, other.terms[tag], term) for tag, term in first.terms.items()}
        first = Bound(terms, xp.maximum(first.lse, other.lse))
    return first


def empty(
    q: Array, k: Array, v: Array, rows: Array | None, tags: tuple[str, ...]
) -> tuple[dict[str, Array], Array]:
    """Allocate terms and lse, query heads split by key head."""
    xp = array_namespace(q, k, v)
    batch, heads, heads_kv, len_q, _, head_dim = check_shapes(q.shape, k.shape, v.shape)
    num_rows = len_q if rows is None else len(rows)
    split = split_heads(xp.zeros((batch, heads, num_rows, head_dim)), heads_kv)
    return {tag: xp.zeros(split.shape) for tag in tags}, xp.zeros(split.shape[:-1])


def assemble(terms: dict[str, Array], lse: Array) -> Bound:
    """Merge the split heads, and cover the float64 roundings of the bound itself."""
    return Bound({tag: merge_heads(t) * REFERENCE for tag, t in terms.items()}, merge_heads(lse))


def shares(P: Array, errors: Sequence[Array], delta_o: Array) -> list[Array]:
    """Split the effect of a perturbation of scores among its parts, by Σ p_j d_j."""
    xp = array_namespace(P)
    parts = [(P * r).sum(axis=-1, keepdims=True) for r in errors]
    whole = sum(parts)
    safe = xp.where(whole > 0, whole, 1.0)
    return [xp.where(whole > 0, part / safe, 1 / len(parts)) * delta_o for part in parts]


def promised(
    terms: dict[str, Array], attends: Array, usable: Array, fits: Array, spoilt: Array
) -> dict[str, Array]:
    """Return terms, infinite where nothing is promised: in R4, R6 or R7, by the reason.

    `attends` and `usable` are of rows, `fits` of elements of O, and `spoilt` of columns of V.
    """
    xp = array_namespace(usable)
    terms = {tag: xp.where((attends & usable)[..., None], x, 0.0) for tag, x in terms.items()}
    terms["R4"] = xp.where((attends & ~usable)[..., None], xp.inf, terms["R4"])
    terms["R6"] = xp.where(spoilt, xp.inf, terms["R6"])
    terms["R7"] = xp.where(attends[..., None] & ~fits, xp.inf, terms["R7"])
    return terms


def exact(block: ScoreBlock) -> tuple[Array, Array, Array, Array, Array]:
    """Return P, lse, finite values, the output and which channels hold a non-finite value."""
    xp = array_namespace(block.S)
    finite = xp.isfinite(block.v)
    v = xp.where(finite, block.v, 0.0)
    P, lse = softmax_exact(block.S)
    # NOTE: a probability that underflows is still positive: a perturbation may make it the largest.
    P = xp.where(xp.isfinite(P), xp.where(block.admitted, xp.maximum(P, LEAST_P), 0.0), 0.0)
    return P, lse, v, P @ v, ~finite.all(axis=-2, keepdims=True)


def of_block(mean: Any, block: ScoreBlock) -> Array | None:
    """Return the mean of the keys or values of a block, (..., 1, head_dim)."""
    if mean is None:
        return None
    batch, head, _, _ = block.index
    return as_float64(mean)[batch, head][:, :, None, None, :]
