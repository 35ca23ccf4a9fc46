"""What 8-bit P and V may do to an output: R5, R6 and R7 of the form ``"pv8"``.

Proofs are in docs/MATH_REFERENCE.md, "8-bit P and V"; `cupyattn.bounds` uses them where P is codes.
"""

from __future__ import annotations

from typing import Any

from cupyattn.numerics import FP8_ROUNDOFF, P_CODE_ONE, Numerics
from cupyattn.perturbation import gamma
from cupyattn.rounding import Array, array_namespace
from cupyattn.score_bounds import U
from cupyattn.tiles import Tiles

#: Relative error of e4m3: half a unit in the last of 4 bits, and what scaling adds.
E4M3_RELATIVE = 2.0**-4 + 2.0**-20


def code_rounding(P_plus: Array, n: Numerics, tiles: Tiles) -> Array:
    """R5: bound what rounding P to codes does to each probability.

    Parameters
    ----------
    P_plus : (..., rows, keys) array
        Bounds of the perturbed probabilities.
    n : Numerics
        With codes of P.
    tiles : Tiles
        ``block_kv`` keys are coded against the largest of them.

    Returns
    -------
    (..., rows, keys) array

    Notes
    -----
    The largest exponential of a tile is 1 exactly, so half a code weighs 1/2 code of the largest
    probability of the tile; and no number is moved by more than itself. An e4m3 number is off by
    2^-4 of itself, or by half the smallest one.
    """
    xp = array_namespace(P_plus)
    keys, block = P_plus.shape[-1], tiles.block_kv
    steps = -(-keys // block)
    pad = [(0, 0)] * (P_plus.ndim - 1) + [(0, steps * block - keys)]
    of_tiles = xp.pad(P_plus, pad).reshape(*P_plus.shape[:-1], steps, block)
    largest = of_tiles.max(axis=-1).repeat(block, axis=-1)[..., :keys]
    step = largest / P_CODE_ONE[n.p_type]
    if n.p_type == "e4m3":
        half = xp.maximum(E4M3_RELATIVE * P_plus, 2.0**-10 * step)
    else:
        half = 0.5 * step
    return xp.minimum(P_plus, half)


def accumulation(count: Array, keys: int, n: Numerics, tiles: Tiles) -> Array:
    """R6: bound the relative error of a term on its way through the sum over tiles.

    Parameters
    ----------
    count : (..., rows) array
        Keys that a row attends to.
    keys : int
        All keys.
    n : Numerics
    tiles : Tiles

    Notes
    -----
    Within a tile integers are exact; 8-bit floats meet one truncation for every other key and, with
    instructions that add 16 products at a time or more, one for every 16 of them. A tile's sum
    meets the rounding of beta times the scale of V, that of the product, and one for every tile
    that is added.
    """
    xp = array_namespace(count)
    between = gamma(xp.minimum(count, -(-keys // tiles.block_kv)) + 2, U)
    if n.values == "int32":
        return between
    within = xp.minimum(count, tiles.block_kv) + -(-tiles.block_kv // 16)
    return (1 + between) * (1 + gamma(within, FP8_ROUNDOFF)) - 1


def rounding_of_values(size: Array, scale: Array, n: Numerics) -> Array:
    """R1 of V: bound what symmetric codes do to numbers of magnitude `size`, with dynamic scales.

    Parameters
    ----------
    size, scale : array
        Of one shape.
    n : Numerics
    """
    xp = array_namespace(size)
    if n.v_type == "e4m3":
        error = xp.maximum(size * E4M3_RELATIVE, scale * 2.0**-10 * (1 + 2.0**-9))
        return xp.where(size < scale * 2.0**-10 * (1 - 2.0**-9), size, error)
    return rounding_to_codes(size, scale)


def rounding_to_codes(x: Array, scale: Array) -> Array:
    """R1: the error of codes of magnitudes `x`: of code 0, of any other, of one that clips."""
    xp = array_namespace(scale)
    rounded = xp.maximum(scale / 2 * (1 + 2.0**-15), x - 127 * scale)
    return xp.where(x < scale / 2 * (1 - 2.0**-15), x, rounded)


def rounding_with_zero_points(x: Array, scale: Array, zero: Array) -> Array:
    """R1: the error of codes with zero points: of the code of 0, of any other, of one that clips.

    Parameters
    ----------
    x : array
        Numbers, with their signs.
    scale, zero : array
        That broadcast to its shape.
    """
    xp = array_namespace(scale)
    size = xp.abs(x)
    past = xp.maximum(x - scale * (127 - zero), scale * (-128 - zero) - x)
    rounded = xp.maximum(scale / 2 * (1 + 2.0**-12), past)
    return xp.where(size < scale / 2 * (1 - 2.0**-12), size, rounded)


def with_mean(size: Array, mean: Any) -> tuple[Array, Array]:
    """R7: return what the last steps cost before the store, and the size of what is stored.

    Parameters
    ----------
    size : (..., rows, head_dim) array
        What |sum p v| without the mean may reach.
    mean : (..., 1, head_dim) array or None
        What is added to it.

    Notes
    -----
    1/l, times the code's constant (its own error and one rounding), times the sum, plus the mean.
    """
    xp = array_namespace(size)
    cost = ((1 + U) ** 4 - 1) * size + 2.0**-149
    if mean is None:
        return cost, size + cost
    total = size + cost + xp.abs(mean)
    return cost + U * total, total + U * total
