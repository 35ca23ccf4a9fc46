"""Errors of a layer that its inputs and its weight foretell: by blocks, channels, and rotated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.quant.blocks import BLOCK_SIZE, block_max, row_max, strips
from cupyattn.quant.rotation import GROUPS, group_of, turned, unit_of

Array = Any
Float32 = npt.NDArray[np.float32]

#: Rows of activations that are looked at, at most.
MOST_ROWS = 256
#: Largest code, and the mean square of rounding to whole numbers.
_LARGEST, _ROUNDING = 127, 1 / 12
#: Elements of a weight that are rotated at a time.
_PART = 2**20


@dataclass(frozen=True)
class Errors:
    """Relative errors of a layer, foretold.

    Parameters
    ----------
    block, channel : float
        With scales of blocks, and of channels.
    rotated : float or None
        With scales of channels of rotated rows; None if 64 does not divide the channels.
    smoothed : float or None
        The smaller of the two last with factors of channels, if these were asked for.
    """

    block: float
    channel: float
    rotated: float | None = None
    smoothed: float | None = None

    @property
    def by_channel(self) -> float:
        """The smaller error with scales of channels."""
        return self.channel if self.rotated is None else min(self.channel, self.rotated)


def predicted_errors(weight: Array, x: Array, block_size: int = BLOCK_SIZE) -> Errors:
    """Return the relative errors of a layer's product, by strategy of scales.

    Parameters
    ----------
    weight : array, (out, in), float16, bfloat16 or float32
    x : array, (rows, in), float32
        Inputs of the layer; of more than `MOST_ROWS` rows so many are taken, evenly spread.
    block_size : int

    Notes
    -----
    A group of n numbers with the maximum m has steps of m / 127, and rounding to them adds
    n (m / 127)^2 / 12 to the square of the error. This, summed over groups and divided by the sum
    of all squares, is ε^2 of an operand; the product errs by the root of the sum of both.

    Examples
    --------
    >>> x, w = np.random.default_rng(0).standard_normal((2, 64, 1024), np.float32)
    >>> x[:, [3, 500]] *= 30
    >>> found = predicted_errors(w, x)
    >>> bool(found.rotated < found.block < found.channel)
    True
    """
    rows = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST_ROWS)).round().astype(int))
    x = x[rows]
    group = group_of(x.shape[1]) if x.shape[1] % GROUPS[-1] == 0 and x.shape[1] else 0
    noise = np.zeros((2, 3))
    signal = np.zeros(2)
    for at, operand, lines in ((0, x, 1), (1, weight, block_size)):
        power = power_to_unit(operand)
        step = max(1, _PART // (lines * max(1, x.shape[1]))) * lines  # whole blocks
        for part in strips(len(operand), step):
            values = np.ldexp(operand[part].astype(np.float32), power)
            noise[at] += _noise(values, block_size, lines, group)
            signal[at] += float(np.square(values, dtype=np.float64).sum())
    found = [
        math.sqrt(sum(n / s if s else 0.0 for n, s in zip(one, signal, strict=True)))
        for one in noise.T
    ]
    return Errors(found[0], found[1], found[2] if group else None)


def power_to_unit(x: Array) -> int:
    """Return the power of two that brings the largest magnitude of an array to 0.5 to 1.

    Relative errors do not change, and sums of products neither overflow float32 nor underflow.

    Examples
    --------
    >>> power_to_unit(np.float32([3, -5])), power_to_unit(np.zeros(0))
    (-3, 0)
    """
    top = max(float(x.max()), -float(x.min())) if x.size else 0.0
    return -math.frexp(top)[1] if math.isfinite(top) else 0


def _noise(values: Float32, block_size: int, lines: int, group: int) -> list[float]:
    """Return the sums of squared errors by blocks, by rows, and of rotated rows."""
    sizes = np.abs(values)
    blocks = block_max(sizes, block_size)
    if lines > 1:
        blocks = np.maximum.reduceat(blocks, np.arange(0, len(blocks), lines), axis=0)
        blocks = blocks.repeat(lines, axis=0)[: len(values)]
    widths = np.full(blocks.shape[1], block_size)
    widths[-1] = values.shape[1] - block_size * (len(widths) - 1)
    found = [blocks * np.sqrt(widths), row_max(sizes) * np.sqrt(values.shape[1])]
    if group:
        tops = row_max(np.abs(turned(values, group))) * unit_of(group)
        found.append(tops * np.sqrt(values.shape[1]))
    noise = [float(np.square(one, dtype=np.float64).sum()) for one in found]
    return [_ROUNDING * one / _LARGEST**2 for one in noise] + [0.0] * (3 - len(noise))
