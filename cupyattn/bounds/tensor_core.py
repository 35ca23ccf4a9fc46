"""R6 of 16-bit P and V: what tensor cores cut off the sum of products, by the largest addend.

An instruction aligns its addends, the accumulator among them, to the largest. The accumulator holds
a sum of products, in which signs cancel. Its error is charged by that, not by all magnitudes [L80].
"""

from __future__ import annotations

from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.bounds.scores import EX2_LOG_ERROR
from cupyattn.kernels.numerics import LEAST_NORMAL, TENSOR_CORE_ROUNDOFF, Numerics
from cupyattn.kernels.tiles import Tiles

#: Products that one instruction adds to its accumulator.
PRODUCTS = 16
#: Keys of a step, at least: no kernel takes more unless `tiles` says so.
LARGEST_STEP = 256
#: What one instruction loses of its largest addend: each of them, and the sum.
_EACH = (PRODUCTS + 2) * TENSOR_CORE_ROUNDOFF
#: Keys of the blocks between whose edges sums are known.
_BLOCK = 32


def cut_off(
    P: Array,
    v: Array,
    moved: Array,
    magnitudes: Array,
    rises: Array,
    tiles: Tiles,
) -> Array:
    """Bound what tensor cores cut off P V, operands below `LEAST_NORMAL` aside [L80].

    Parameters
    ----------
    P : (..., rows, keys) array
        Exact probabilities.
    v : (..., keys, head_dim) array
        Finite values.
    moved : (..., rows, head_dim) array
        What perturbed scores and the rounding of P may do to a sum of products, signs aside.
    magnitudes : (..., rows, head_dim) array
        Bound of the sum of the magnitudes of all products.
    rises : (..., rows) array
        Steps at which the sum may be rescaled.
    tiles : Tiles
        A wider step than the call's is certain, too.

    Returns
    -------
    (..., rows, head_dim) array
    """
    xp = array_namespace(P)
    count = -(-P.shape[-1] // PRODUCTS)  # instructions
    step = max(tiles.block_kv, LARGEST_STEP)
    reached = partial_sums(P, v) + moved
    addends = count * reached + -(-step // PRODUCTS) * magnitudes
    growth = xp.exp((_EACH + TENSOR_CORE_ROUNDOFF) * count + EX2_LOG_ERROR * rises)[..., None]
    return _EACH * growth * addends


def cut_off_beside_small(count: Array, v: Array, inverse_l: Array, n: Numerics) -> Array:
    """Bound what is cut off beside it, where operands are below `LEAST_NORMAL` [L80].

    Parameters
    ----------
    count : (..., rows) array
        Keys that a row attends to.
    v : (..., keys, head_dim) array
    inverse_l : (..., rows, 1) array
        Bound of 1/l, where the largest weight is about 1.
    n : Numerics

    Returns
    -------
    (..., rows, head_dim) array
    """
    xp, small = array_namespace(v), LEAST_NORMAL[n.p_type]
    largest = xp.abs(v).max(axis=-2, keepdims=True)
    aligned = small * (largest + 2.0 ** (n.headroom + 1)) * inverse_l
    return 1.01 * _EACH * xp.minimum(count, -(-v.shape[-2] // PRODUCTS))[..., None] * aligned


def partial_sums(P: Array, v: Array) -> Array:
    """Bound the sum of products of any keys that follow one another: (..., rows, head_dim).

    Examples
    --------
    >>> import numpy as np
    >>> partial_sums(np.ones((1, 100)), np.float64([[1.0], [-1.0]] * 50)).tolist()
    [[64.0]]
    """
    xp = array_namespace(P)
    sums = xp.zeros((*P.shape[:-1], v.shape[-1]))
    highest, lowest, within = (xp.zeros_like(sums) for _ in range(3))
    for first in range(0, P.shape[-1], _BLOCK):  # all at once would take much memory
        weights, values = P[..., first : first + _BLOCK], v[..., first : first + _BLOCK, :]
        sums = sums + weights @ values
        highest, lowest = xp.maximum(highest, sums), xp.minimum(lowest, sums)
        within = xp.maximum(within, weights @ xp.abs(values))
    return highest - lowest + 2.0 * within
