"""Rows in the thread blocks of the quantising kernels, and the number of blocks."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from cupyattn.arrays.operand import Operand, widest
from cupyattn.quant.quantizers import VALUES_PAD

#: Warps of a block, and registers of a thread for rows, in the order in which they are tried. The
#: first pair with room for whole groups reads the operands once. Prepared rows become floats, which
#: do not fit beside 64 registers.
_BLOCKS = ((8, 32), (8, 64), (16, 32))
_PREPARED_REGISTERS = _VALUE_REGISTERS = 32
_PASS_REGISTERS = 4  # of a row, or more

#: Heads whose rows of the same tokens share a block, in the order in which they are tried.
_HEADS = (4, 2)
#: Rows of a thread in such a block, some of which lie in shared memory.
_HEAD_ROWS = 6
#: Fewest lanes of a row in such a block, each of which adds up one of four sums of squares.
_HEAD_LANES = 4
#: Largest group whose rows leave the registers before the next rows arrive. A block of four heads
#: then takes twice the rows, which halves its reads of weights and the number of blocks.
_SMALL_GROUP = 2


@dataclass(frozen=True)
class Blocks:
    """Rows in thread blocks, the same in all launches of a plan.

    `vec` elements are read at a time, `registers` of a thread hold rows. `pairs`: some rows are
    prepared, so a lane takes either half of the pairs of columns.
    """

    head_dim: int
    itemsize: int
    vec: int
    pairs: bool
    num_warps: int
    registers: int

    @classmethod
    def of(cls, operands: Collection[Operand], groups: Collection[int], pairs: bool) -> Blocks:
        """Return the first of `_BLOCKS` that holds whole groups of rows, or the first of all."""
        (head_dim, itemsize), *_ = {(x.shape[3], x.itemsize) for x in operands}
        columns = head_dim // 2 if pairs else 0
        vec = math.gcd(widest(*operands), columns)
        first, *further = (cls(head_dim, itemsize, vec, pairs, *block) for block in _BLOCKS)
        return next((one for one in (first, *further) if one.holds(groups)), first)

    def holds(self, groups: Collection[int]) -> bool:
        """Whether the rows of a block fit in its registers and form whole groups."""
        fits = not self.pairs or self.registers <= _PREPARED_REGISTERS
        return fits and all(self.rows(group) % group == 0 for group in groups)

    def rows(self, group: int) -> int:
        """Return how many rows a block takes."""
        shape = self.head_dim, self.itemsize, self.vec
        return block_rows(group, *shape, self.num_warps, self.registers, pairs=self.pairs)

    def heads_and_rows(
        self, group: int, heads: int, *, held: bool, single: bool
    ) -> tuple[int, int]:
        """Return how many heads share a block of prepared rows, and its rows in all.

        Parameters
        ----------
        group : int
            Rows per scale.
        heads : int
            Heads of the operand.
        held : bool
            Shared memory has room for some of the rows.
        single : bool
            No mean is subtracted, so a warp finds the scales of small groups by itself.

        Returns
        -------
        heads, rows : int
            One head and `rows` if no number of heads fits. A block of several has as many rows as
            if it had one, twice as many if it has four and small groups, or whole groups of each
            head in a few more.
        """
        rows = self.rows(group)
        lanes, _ = _lanes(self.head_dim // 2, self.itemsize, self.vec)
        of_pass = self.num_warps * 32 // lanes
        whole = lanes >= _HEAD_LANES and lanes * 2 * self.vec == self.head_dim
        if (self.vec, self.itemsize) != (8, 2) or not whole:
            return 1, rows
        for together in _HEADS:
            if heads % together:
                continue
            of_head = rows // together
            if of_head % of_pass == 0 and of_head % group == 0:
                twice = single and together == 4 and group <= _SMALL_GROUP
                return together, rows * (2 if twice else 1)
            passes = together * -(-rows // of_pass)
            if held and self.num_warps == 8 and rows % group == 0 and passes <= _HEAD_ROWS:
                return together, rows * together
        return 1, rows

    @property
    def columns(self) -> int:
        """Columns of V that a block transposes."""
        return value_columns(self.head_dim, self.itemsize, self.vec, self.num_warps)


def block_rows(
    group: int,
    head_dim: int,
    itemsize: int,
    vec: int,
    num_warps: int,
    registers: int,
    *,
    pairs: bool = False,
) -> int:
    """Return how many rows a thread block takes: whole groups, or else a part of one.

    Parameters
    ----------
    group : int
        Rows per scale.
    head_dim, itemsize : int
        Elements of a row, bytes of an element.
    vec : int
        Elements per global access.
    num_warps : int
        Warps of a block, which holds its rows in registers.
    registers : int
        Registers of a thread that hold rows.
    pairs : bool
        A lane takes an access to either half of the pairs of columns, as rows that are prepared
        want it.

    Examples
    --------
    >>> [block_rows(group, 128, 2, 8, 8, 32) for group in (16, 128, 256, 2**30)]
    [128, 128, 128, 128]
    """
    sides = 2 if pairs else 1
    lanes, of_access = _lanes(head_dim // sides, itemsize, vec)
    of_row = sides * -(-head_dim // (sides * vec * lanes)) * of_access
    passes = min(registers // _PASS_REGISTERS, 1 << (registers // of_row).bit_length() - 1)
    rows = passes * num_warps * 32 // lanes
    return rows - rows % group or math.gcd(rows, group)


def value_columns(head_dim: int, itemsize: int, vec: int, num_warps: int) -> int:
    """Return how many columns of VALUES_PAD keys a thread block transposes.

    At most 128: codes, ranges and zero points of 256 columns would not fit in 48 KB.

    Parameters
    ----------
    head_dim, itemsize, vec, num_warps
        As for `block_rows`, with 32 registers.

    Examples
    --------
    >>> [value_columns(head_dim, 2, 8, 8) for head_dim in (40, 64, 128, 256)]
    [64, 64, 128, 128]
    >>> value_columns(256, 2, 8, 16)
    128
    """
    lanes, of_access = _lanes(head_dim, itemsize, vec)
    held = _VALUE_REGISTERS // of_access * num_warps * 32 // VALUES_PAD
    return min(128, vec * min(lanes, held))


def _lanes(head_dim: int, itemsize: int, vec: int) -> tuple[int, int]:
    """Return how many lanes share a row, and the registers of an access."""
    return min(32, 1 << (head_dim // vec - 1).bit_length()), max(1, vec * itemsize // 4)
