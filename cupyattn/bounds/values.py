"""Bounds of the error of 8-bit P and V, R5 to R7 of ``"pv8"`` and similar forms, and the store.

Proofs are in docs/MATH_REFERENCE.md, "8-bit P and V", under the tags [L54] to [L61];
`cupyattn.bounds` uses them where P is codes.
"""

from __future__ import annotations

from typing import Any

from cupyattn.arrays.kinds import FINITE_MAX, Array, array_namespace
from cupyattn.bounds.perturbation import gamma, half_ulp
from cupyattn.bounds.scores import MAX_FLOAT, U
from cupyattn.kernels.numerics import (
    FP8_LEAST_NORMAL,
    FP8_ROUNDOFF,
    LANES,
    P_CODE_ONE,
    Numerics,
    Shifts,
)
from cupyattn.kernels.tiles import Tiles

#: Relative error of e4m3: half a unit in the last of 4 bits, and the error of scaling.
E4M3_RELATIVE = 2.0**-4 + 2.0**-20
#: Largest relative distance of a tile's largest weight from the largest code, beside M's rounding.
CODES_RELATIVE = 2.0**-19


def code_rounding(P_plus: Array, n: Numerics, tiles: Tiles, slack: Array) -> Array:
    """R5: bound the error of each probability after rounding P to codes [L55].

    Parameters
    ----------
    P_plus : (..., rows, keys) array
        Bounds of the perturbed probabilities.
    n : Numerics
        Must have codes of P.
    tiles : Tiles
        ``block_kv`` keys have codes relative to their largest weight.
    slack : (..., rows) array
        Error of rounding M, in log2 units.

    Returns
    -------
    (..., rows, keys) array

    Notes
    -----
    The largest weight of a tile is the largest code, apart from the rounding of M, of its exponent
    and of the exponential. So half a code weighs 1/2 code of the largest probability of the tile.
    No number moves by more than itself. An e4m3 number errs by 2^-4 of itself, or by half the
    smallest number.
    """
    xp = array_namespace(P_plus)
    step = code_step(P_plus, n, tiles, slack)
    if n.p_type == "e4m3":
        half = xp.maximum(E4M3_RELATIVE * P_plus, 2.0**-10 * step)
    else:
        half = 0.5 * step
    return xp.minimum(P_plus, half)


def code_step(P_plus: Array, n: Numerics, tiles: Tiles, slack: Array) -> Array:
    """Bound the weight of code 1 of each key: (..., rows, keys), arguments as `code_rounding`."""
    xp = array_namespace(P_plus)
    largest = largest_of_tiles(P_plus, tiles).repeat(tiles.block_kv, axis=-1)
    step = largest[..., : P_plus.shape[-1]] / P_CODE_ONE[n.p_type]
    return step * (xp.exp2(xp.minimum(slack, 99.0)) * (1 + CODES_RELATIVE))[..., None]


def aligned_products(weights: Array, step: Array, magnitude: Array, scale: Array) -> Array:
    """R6: bound sums of products of 8-bit floats as tensor cores align them [L3].

    Parameters
    ----------
    weights, step : (..., rows, keys) array
        Bounds of the multiplied weights, and of the weight of code 1.
    magnitude : (..., keys, head_dim) array
        Magnitudes of the values.
    scale : (..., 1, head_dim) array
        Scales of the channels of V.

    Returns
    -------
    (..., rows, head_dim) array
    """
    return (weights + FP8_LEAST_NORMAL * step) @ (magnitude + FP8_LEAST_NORMAL * scale)


def units(P_plus: Array, by: Shifts, tiles: Tiles) -> Array:
    """R5, R6: bound the weight of 2^M of each step in the final sum [L60].

    Parameters
    ----------
    P_plus : (..., rows, keys) array
    by : Shifts
    tiles : Tiles

    Returns
    -------
    (..., rows, steps) array

    Notes
    -----
    A largest weight w of a tile gives 2^M <= 2^(1 - code_bits) w. M is the tile's M, or lower_bits
    below the highest, or l, in units of 2^M, has reached an eighth of its range. A tile without
    weights, which a kernel may take or skip, has no rounding and does not raise M.
    """
    xp = array_namespace(P_plus)
    largest = largest_of_tiles(P_plus, tiles)
    least = 2.0 ** (3 - by.sum_bits) if by.guards(P_plus.shape[-1]) else 0.0
    unit, running = xp.zeros_like(largest), xp.zeros_like(largest[..., 0])
    for step in range(largest.shape[-1]):
        now = largest[..., step]
        running = xp.maximum(running, now)
        highest = xp.maximum(now, running * 2.0**-by.lower_bits)
        unit[..., step] = xp.where(now > 0, highest, 0.0) * 2.0 ** (1 - by.code_bits)
    return xp.maximum(unit * (1 + 2.0**-20), least * (1 + 2.0**-12))


def largest_of_tiles(P_plus: Array, tiles: Tiles) -> Array:
    """Return the largest probability of each tile: (..., rows, steps)."""
    xp = array_namespace(P_plus)
    keys, block = P_plus.shape[-1], tiles.block_kv
    steps = -(-keys // block)
    pad = [(0, 0)] * (P_plus.ndim - 1) + [(0, steps * block - keys)]
    return xp.pad(P_plus, pad).reshape(*P_plus.shape[:-1], steps, block).max(axis=-1)


def shifted_rounding(P_plus: Array, unit: Array, tiles: Tiles) -> Array:
    """R5: the same if codes are multiples of `units` [L60]: half a unit, or the last code.

    Notes
    -----
    A weight of more than 255.5 has the code 255: it loses less than a 255th of itself.
    """
    xp = array_namespace(P_plus)
    unit = unit.repeat(tiles.block_kv, axis=-1)[..., : P_plus.shape[-1]]
    return xp.minimum(P_plus, xp.maximum(0.5 * unit, P_plus / 255.0))


def dropped_by_shifts(unit: Array, scale: Array) -> Array:
    """R6: bound the loss of O by right shifts [L61]: less than a unit of each step but the first.

    Parameters
    ----------
    unit : (..., rows, steps) array
        As `units` returns them.
    scale : (..., 1, head_dim) array
        Scales of the channels of V.

    Returns
    -------
    (..., rows, head_dim) array
    """
    return unit[..., 1:].sum(axis=-1)[..., None] * scale


def dropped_of_l(unit: Array, by: Shifts) -> Array:
    """R6: bound the loss of an integer l by shifts [L61]: less than a unit of each lane.

    Parameters
    ----------
    unit : (..., rows, steps) array
        As `units` returns them.
    by : Shifts
    """
    if by.l_bits is None:
        return 0.0 * unit[..., 0]
    return LANES * 2.0**-by.l_bits * unit[..., 1:].sum(axis=-1)


def accumulation(count: Array, keys: int, n: Numerics, tiles: Tiles) -> Array:
    """R6: bound the relative error of a term on its way through the sum over tiles [L57].

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
    Within a tile integers are exact. 8-bit floats have one truncation for every key. Each
    instruction of 32 keys adds two, for its accumulator and for its sum. A tile's sum has one
    rounding of beta times the scale of V, one of the product, and one for every added tile.
    """
    xp = array_namespace(count)
    between = gamma(xp.minimum(count, -(-keys // tiles.block_kv)) + 2, U)
    if n.values == "int32":
        return between
    within = xp.minimum(count, tiles.block_kv) + -(-tiles.block_kv // 16)
    return (1 + between) * (1 + gamma(within, FP8_ROUNDOFF)) - 1


def rounding_of_values(size: Array, scale: Array, n: Numerics) -> Array:
    """R1 of V: bound the error of magnitudes `size` in symmetric codes of dynamic scales [L55].

    Parameters
    ----------
    size, scale : array
        Arrays of equal shape.
    n : Numerics
    """
    xp = array_namespace(size)
    if n.v_type == "e4m3":
        error = xp.maximum(size * E4M3_RELATIVE, scale * 2.0**-10 * (1 + 2.0**-9))
        return xp.where(size < scale * 2.0**-10 * (1 - 2.0**-9), size, error)
    return rounding_to_codes(size, scale)


def rounding_to_codes(x: Array, scale: Array, largest: int = 127) -> Array:
    """R1: the error of codes of magnitudes `x` [L14]: code 0, any other code, a clipped code."""
    xp = array_namespace(scale)
    rounded = xp.maximum(scale / 2 * (1 + 2.0**-15), x - largest * scale)
    return xp.where(x < scale / 2 * (1 - 2.0**-15), x, rounded)


def rounding_with_zero_points(x: Array, scale: Array, zero: Array) -> Array:
    """R1: the error of codes with zero points [L15]: the zero point, any other code, a clipped
    code.

    Parameters
    ----------
    x : array
        Numbers, with their signs.
    scale, zero : array
        Arrays that broadcast to its shape.
    """
    xp = array_namespace(scale)
    size = xp.abs(x)
    past = xp.maximum(x - scale * (127 - zero), scale * (-128 - zero) - x)
    rounded = xp.maximum(scale / 2 * (1 + 2.0**-12), past)
    return xp.where(size < scale / 2 * (1 - 2.0**-12), size, rounded)


def with_mean(size: Array, mean: Any, pieces: int) -> tuple[Array, Array]:
    """R7: return the cost of the last steps before the store, and the size of the result [L58].

    Parameters
    ----------
    size : (..., rows, head_dim) array
        Bound of |sum p v| without the mean.
    mean : (..., 1, head_dim) array or None
        Mean of V, which is added to the sum.
    pieces : int
        `Numerics.pieces`.

    Notes
    -----
    The sum is multiplied by 1/l, and the mean is added. The Hopper form also converts the sum to
    float32 and multiplies it by a scale. With pieces, l times the mean is added to the sum of a
    piece, and pieces are added before the product with 1/l.
    """
    xp = array_namespace(size)
    cost = ((1 + U) ** 4 - 1) * size + 2.0**-149
    if mean is None:
        return cost, size + cost
    total = size + cost + xp.abs(mean)
    of_sum = gamma(pieces + 4 if pieces > 1 else 1, U) * total
    return cost + of_sum, total + of_sum


def store(o: Array, stored: Array, n: Numerics) -> tuple[Array, Array]:
    """R7: return the error of the store, and where its result is certainly finite [L37].

    Parameters
    ----------
    o : (..., rows, head_dim) array
        Exact attention of the operands, with the mean of V. With codes of V it may exceed the
        largest number of the type.
    stored : (..., rows, head_dim) array
        Bound of the magnitude of the number before the store.
    n : Numerics

    Notes
    -----
    A finite sum past the largest float16 is stored as that number. Clamping is a projection, so it
    moves the result no farther from `o` than `o` itself lies past that number.
    """
    xp = array_namespace(o)
    largest, fits = FINITE_MAX[n.out_type], stored <= MAX_FLOAT
    cost = half_ulp(stored, n.out_type)
    if n.online and n.out_type == "float16":
        return cost + xp.maximum(xp.abs(o) - largest, 0.0), fits
    return cost, fits & (stored < largest + half_ulp(xp.full_like(o, largest), n.out_type))
