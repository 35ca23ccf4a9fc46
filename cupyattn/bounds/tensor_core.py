"""R6 of 16-bit P and V: truncation by tensor cores in the sum of products, by the largest addend.

An instruction aligns its addends, the accumulator among them, to the largest. The accumulator holds
a sum of products, in which signs cancel. The accumulator is known, because every kernel takes its
keys in order, 16 at a time. So each instruction is bounded by its addends, not by all magnitudes
[L80].
"""

from __future__ import annotations

from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.bounds.scores import EX2_LOG_ERROR
from cupyattn.kernels.numerics import LEAST_NORMAL, TENSOR_CORE_ROUNDOFF, Numerics

#: Products that one instruction adds to its accumulator.
PRODUCTS = 16
#: Loss of one instruction relative to its largest addend: by each addend, and by the sum.
_EACH = (PRODUCTS + 2) * TENSOR_CORE_ROUNDOFF
#: Instructions whose sums are held at a time: all of them would take much memory.
_AT_ONCE = 16


def truncation(
    P: Array, v: Array, moved: Array, magnitudes: Array, rises: Array, *, from_first: bool
) -> Array:
    """Bound the truncation of P V by tensor cores, operands below `LEAST_NORMAL` aside [L80].

    Parameters
    ----------
    P : (..., rows, keys) array
        Exact probabilities, 0 where a key is masked and only there.
    v : (..., keys, head_dim) array
        Finite values.
    moved : (..., rows, head_dim) array
        Change of a sum of products by perturbed scores and by the rounding of P, without regard to
        signs.
    magnitudes : (..., rows, head_dim) array
        Bound of the sum of the magnitudes of all products.
    rises : (..., rows) array
        Steps at which the sum may be rescaled.
    from_first : bool
        Whether one accumulator takes all keys. If not, one may begin at any instruction.

    Returns
    -------
    (..., rows, head_dim) array
    """
    xp = array_namespace(P)
    reached, instructions = accumulators(P, v, from_first=from_first)
    addends = reached + instructions[..., None] * moved + magnitudes
    growth = (_EACH + TENSOR_CORE_ROUNDOFF) * instructions + EX2_LOG_ERROR * rises
    return _EACH * xp.exp(growth)[..., None] * addends


def truncation_by_small_operands(count: Array, v: Array, inverse_l: Array, n: Numerics) -> Array:
    """Bound the additional truncation if operands are below `LEAST_NORMAL` [L80].

    Parameters
    ----------
    count : (..., rows) array
        Keys that a row attends to.
    v : (..., keys, head_dim) array
    inverse_l : (..., rows, 1) array
        Bound of 1/l, with the largest weight near 1.
    n : Numerics

    Returns
    -------
    (..., rows, head_dim) array
    """
    xp, small = array_namespace(v), LEAST_NORMAL[n.p_type]
    largest = xp.abs(v).max(axis=-2, keepdims=True)
    # NOTE: no code of V except 0 is that small.
    by_values = 0.0 if n.value_codes else 2.0 ** (n.headroom + 1)
    aligned = small * (largest + by_values) * inverse_l
    return 1.01 * _EACH * xp.minimum(count, -(-v.shape[-2] // PRODUCTS))[..., None] * aligned


def accumulators(P: Array, v: Array, *, from_first: bool) -> tuple[Array, Array]:
    """Sum the magnitudes of all accumulators that instructions with a key begin with.

    Parameters
    ----------
    P, v, from_first
        As for `truncation`.

    Returns
    -------
    sums : (..., rows, head_dim) array
        If an accumulator may begin anywhere, the sum of the largest possible magnitudes.
    instructions : (..., rows) array
        Number of instructions.

    Examples
    --------
    >>> import numpy as np
    >>> P, v = np.ones((1, 48)), np.float64([[1.0], [-1.0], [0.5]]).repeat(16, axis=0)
    >>> [float(accumulators(P, v, from_first=x)[0][0, 0]) for x in (True, False)]
    [16.0, 32.0]
    """
    xp = array_namespace(P)
    sums = xp.zeros((*P.shape[:-1], v.shape[-1]))
    instructions = xp.zeros(P.shape[:-1])
    now, highest, lowest = (xp.zeros_like(sums) for _ in range(3))
    for first in range(0, P.shape[-1], _AT_ONCE * PRODUCTS):
        keys = slice(first, first + _AT_ONCE * PRODUCTS)
        weights, values = _cut(P[..., keys], -1), _cut(v[..., keys, :], -2)
        products = xp.swapaxes(weights, -2, -3) @ values  # (..., instructions, rows, head_dim)
        for i in range(products.shape[-3]):
            has_keys = (weights[..., i, :] > 0).any(axis=-1)
            reached = xp.abs(now) if from_first else xp.maximum(highest - now, now - lowest)
            sums = sums + xp.where(has_keys[..., None], reached, 0.0)
            instructions = instructions + has_keys
            now = now + products[..., i, :, :]
            highest, lowest = xp.maximum(highest, now), xp.minimum(lowest, now)
    return sums, instructions


def _cut(x: Array, axis: int) -> Array:
    """Cut an axis into the keys of instructions, the last one filled up with zeros."""
    xp = array_namespace(x)
    axis += x.ndim
    keys = x.shape[axis]
    pad = [(0, -keys % PRODUCTS if i == axis else 0) for i in range(x.ndim)]
    return xp.pad(x, pad).reshape(*x.shape[:axis], -1, PRODUCTS, *x.shape[axis + 1 :])
