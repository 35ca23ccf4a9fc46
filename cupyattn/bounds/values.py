"""What 8-bit P and V may do to an output, R5 to R7 of ``"pv8"`` and its siblings, and the store.

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

#: Relative error of e4m3: half a unit in the last of 4 bits, and what scaling adds.
E4M3_RELATIVE = 2.0**-4 + 2.0**-20
#: How far the largest weight of a tile may be from the largest code, beside M's rounding.
CODES_RELATIVE = 2.0**-19


def code_rounding(P_plus: Array, n: Numerics, tiles: Tiles, slack: Array) -> Array:
    """R5: bound what rounding P to codes does to each probability [L55].

    Parameters
    ----------
    P_plus : (..., rows, keys) array
        Bounds of the perturbed probabilities.
    n : Numerics
        With codes of P.
    tiles : Tiles
        ``block_kv`` keys are coded against the largest of them.
    slack : (..., rows) array
        What the rounding of M may do, in log2 units.

    Returns
    -------
    (..., rows, keys) array

    Notes
    -----
    The largest weight of a tile is the largest code but for the rounding of M, of its exponent and
    of the exponential, so half a code weighs 1/2 code of the largest probability of the tile; and
    no number is moved by more than itself. An e4m3 number is off by 2^-4 of itself, or by half the
    smallest one.
    """
    xp = array_namespace(P_plus)
    step = code_step(P_plus, n, tiles, slack)
    if n.p_type == "e4m3":
        half = xp.maximum(E4M3_RELATIVE * P_plus, 2.0**-10 * step)
    else:
        half = 0.5 * step
    return xp.minimum(P_plus, half)


def code_step(P_plus: Array, n: Numerics, tiles: Tiles, slack: Array) -> Array:
    """Bound what code 1 of each key weighs: (..., rows, keys), arguments as `code_rounding`."""
    xp = array_namespace(P_plus)
    largest = largest_of_tiles(P_plus, tiles).repeat(tiles.block_kv, axis=-1)
    step = largest[..., : P_plus.shape[-1]] / P_CODE_ONE[n.p_type]
    return step * (xp.exp2(xp.minimum(slack, 99.0)) * (1 + CODES_RELATIVE))[..., None]


def aligned_products(weights: Array, step: Array, magnitude: Array, scale: Array) -> Array:
    """R6: bound sums of products of 8-bit floats as tensor cores align them [L3].

    Parameters
    ----------
    weights, step : (..., rows, keys) array
        Bounds of the weights that are multiplied, and of what code 1 weighs.
    magnitude : (..., keys, head_dim) array
        Of the values.
    scale : (..., 1, head_dim) array
        Of the channels of V.

    Returns
    -------
    (..., rows, head_dim) array
    """
    return (weights + FP8_LEAST_NORMAL * step) @ (magnitude + FP8_LEAST_NORMAL * scale)


def units(P_plus: Array, by: Shifts, tiles: Tiles) -> Array:
    """R5, R6: bound what 2^M of each step weighs in the final sum [L60].

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
    A largest weight w of a tile gives 2^M <= 2^(1 - code_bits) w. M is that of the tile, or
    lower_bits below the highest; or l, in units of 2^M, has reached an eighth of its range. A tile
    without weights, which a kernel may take or leave, has nothing to round and raises no M.
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
    """Return the largest of the keys of each tile: (..., rows, steps)."""
    xp = array_namespace(P_plus)
    keys, block = P_plus.shape[-1], tiles.block_kv
    steps = -(-keys // block)
    pad = [(0, 0)] * (P_plus.ndim - 1) + [(0, steps * block - keys)]
    return xp.pad(P_plus, pad).reshape(*P_plus.shape[:-1], steps, block).max(axis=-1)


def shifted_rounding(P_plus: Array, unit: Array, tiles: Tiles) -> Array:
    """R5: the same where codes are multiples of `units` [L60]: half of one, or the last code.

    Notes
    -----
    A weight of more than 255.5 gets the code 255: it loses less than a 255th of itself.
    """
    xp = array_namespace(P_plus)
    unit = unit.repeat(tiles.block_kv, axis=-1)[..., : P_plus.shape[-1]]
    return xp.minimum(P_plus, xp.maximum(0.5 * unit, P_plus / 255.0))


def dropped_by_shifts(unit: Array, scale: Array) -> Array:
    """R6: bound what shifts to the right drop of O [L61]: less than one of each step but the first.

    Parameters
    ----------
    unit : (..., rows, steps) array
        As `units` returns them.
    scale : (..., 1, head_dim) array
        Of the channels of V.

    Returns
    -------
    (..., rows, head_dim) array
    """
    return unit[..., 1:].sum(axis=-1)[..., None] * scale


def dropped_of_l(unit: Array, by: Shifts) -> Array:
    """R6: bound what shifts drop of l where it is whole, too [L61]: less than a unit of each lane.

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
    Within a tile integers are exact; 8-bit floats meet one truncation for every key and two for
    each instruction of 32, of its accumulator and of its sum. A tile's sum meets the rounding of
    beta times the scale of V, that of the product, and one for every tile that is added.
    """
    xp = array_namespace(count)
    between = gamma(xp.minimum(count, -(-keys // tiles.block_kv)) + 2, U)
    if n.values == "int32":
        return between
    within = xp.minimum(count, tiles.block_kv) + -(-tiles.block_kv // 16)
    return (1 + between) * (1 + gamma(within, FP8_ROUNDOFF)) - 1


def rounding_of_values(size: Array, scale: Array, n: Numerics) -> Array:
    """R1 of V: bound what symmetric codes of dynamic scales do to magnitudes `size` [L55].

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


def rounding_to_codes(x: Array, scale: Array, largest: int = 127) -> Array:
    """R1: the error of codes of magnitudes `x` [L14]: of code 0, any other, one that clips."""
    xp = array_namespace(scale)
    rounded = xp.maximum(scale / 2 * (1 + 2.0**-15), x - largest * scale)
    return xp.where(x < scale / 2 * (1 - 2.0**-15), x, rounded)


def rounding_with_zero_points(x: Array, scale: Array, zero: Array) -> Array:
    """R1: the error of codes with zero points [L15]: of that of 0, any other, one that clips.

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


def with_mean(size: Array, mean: Any, pieces: int) -> tuple[Array, Array]:
    """R7: return the cost of the last steps before the store, and the size of the result [L58].

    Parameters
    ----------
    size : (..., rows, head_dim) array
        What |sum p v| without the mean may reach.
    mean : (..., 1, head_dim) array or None
        What is added to it.
    pieces : int
        `Numerics.pieces`.

    Notes
    -----
    The sum times 1/l, plus the mean; in the Hopper form the sum to float32 and times a scale, too.
    To the sum of a piece l means are added, and pieces are before they meet 1/l.
    """
    xp = array_namespace(size)
    cost = ((1 + U) ** 4 - 1) * size + 2.0**-149
    if mean is None:
        return cost, size + cost
    total = size + cost + xp.abs(mean)
    of_sum = gamma(pieces + 4 if pieces > 1 else 1, U) * total
    return cost + of_sum, total + of_sum


def store(o: Array, stored: Array, n: Numerics) -> tuple[Array, Array]:
    """R7: return what the store costs, and where it yields a finite number for certain [L37].

    Parameters
    ----------
    o : (..., rows, head_dim) array
        Exact attention of the operands, with the mean of V: with codes of V it may exceed the
        largest number of the type.
    stored : (..., rows, head_dim) array
        What the magnitude of the number before the store may reach.
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
