"""The layout of an array in memory: all that plans and forms of kernels need of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.memory import data_address


@dataclass(frozen=True)
class Operand:
    """Layout of an array, without its memory: strides in elements, address modulo 16."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    misalignment: int

    @classmethod
    def of(cls, array: Any) -> Operand:
        """Describe a NumPy or CuPy array."""
        itemsize = int(array.dtype.itemsize)
        strides = tuple(int(s) // itemsize for s in array.strides)
        return cls(tuple(array.shape), strides, itemsize, data_address(array) % 16)

    @classmethod
    def contiguous(cls, shape: Sequence[int], itemsize: int) -> Operand:
        """Describe an array in C order that will be allocated later."""
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return cls(tuple(shape), tuple(strides), itemsize, 0)

    @functools.cached_property
    def row_strides(self) -> tuple[int, ...]:
        """Strides of every axis but the last; 0 for an axis of length 1, which no kernel steps."""
        return tuple(
            0 if n == 1 else s for s, n in zip(self.strides[:-1], self.shape[:-1], strict=True)
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides of every axis; 0 for an axis of length 1."""
        return tuple(0 if n == 1 else s for s, n in zip(self.strides, self.shape, strict=True))

    def allows(self, width: int) -> bool:
        """Whether every row can be read `width` elements at a time."""
        size = width * self.itemsize
        return (
            size <= 16
            and self.shape[-1] % width == 0
            and self.misalignment % size == 0
            and all(s % width == 0 for s in self.row_strides)
        )


def laid_out(shape: tuple[int, ...], itemsize: int, layout: str) -> Operand:
    """Describe an array of a shape (batch, heads, len, head_dim), contiguous in a layout."""
    if layout == "BHSD":
        return Operand.contiguous(shape, itemsize)
    batch, heads, length, head_dim = shape
    rows = Operand.contiguous((batch, length, heads, head_dim), itemsize)
    by_batch, by_row, by_head, by_column = rows.strides
    return Operand(shape, (by_batch, by_head, by_row, by_column), itemsize, 0)


def widest(*operands: Operand) -> int:
    """Return the largest number of elements of an access that all operands allow."""
    return next(w for w in (8, 4, 2, 1) if all(x.allows(w) for x in operands))
