"""Partitions of a sequence's rows among ranks: contiguous, or zigzag."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from cupyattn.arrays.interchange import operand
from cupyattn.arrays.kinds import array_namespace, check_values
from cupyattn.errors import shown

#: Rows from one number up to another.
Range = tuple[int, int]


@dataclass(frozen=True)
class Partition:
    """Rows of an axis, shared among ranks.

    Parameters
    ----------
    ranges : tuple of tuple of (int, int)
        For each rank the rows that it holds, in their order, as ranges from one row up to another.
        Lists and whole numbers of NumPy become tuples and Python's numbers: ranks compare them.

    Raises
    ------
    ValueError
        If ranges are not pairs of whole numbers, if a row has no rank or several, or if the ranges
        of a rank do not rise.

    Examples
    --------
    >>> Partition.contiguous(10, 4).lengths
    (3, 3, 2, 2)
    >>> Partition.zigzag(16, 2).ranges
    (((0, 4), (12, 16)), ((4, 12),))
    """

    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        try:
            ranges = tuple(
                tuple((operator.index(begin), operator.index(end)) for begin, end in of_rank)
                for of_rank in self.ranges
            )
        except (TypeError, ValueError):
            raise ValueError(
                "ranges must hold pairs (begin, end) of whole numbers for each rank, got "
                f"{shown(self.ranges)}"
            ) from None
        object.__setattr__(self, "ranges", ranges)
        found = sorted(r for of_rank in self.ranges for r in of_rank)
        ends = [0, *(end for _, end in found)]
        whole = all(begin == end for (begin, _), end in zip(found, ends, strict=False))
        rising = all(begin < end for begin, end in found) and all(
            left[1] <= right[0] for of_rank in self.ranges for left, right in pairwise(of_rank)
        )
        if not whole or not rising:
            raise ValueError(
                f"every row must lie on one rank, in ranges that rise, got {str(self.ranges):.200}"
            )

    @classmethod
    def contiguous(cls, length: int | Sequence[int], size: int | None = None) -> Partition:
        """Share rows one behind the other.

        Parameters
        ----------
        length : int or sequence of int
            Total rows, of which the first ranks get one more if they do not divide; or the rows of
            each rank.
        size : int, optional
            Number of ranks; required if `length` is one number.
        """
        check_values("length", length)
        if not isinstance(length, Iterable) or getattr(length, "ndim", 1) == 0:
            if size is None:
                raise TypeError("Partition.contiguous needs the number of ranks beside a length")
            lengths = _shares(_whole("length", length), _whole("size", size, least=1))
        else:
            lengths = [_whole("length", one) for one in length]
        ends = accumulate(lengths, initial=0)
        return cls(tuple(_rising([r]) for r in pairwise(ends)))

    @classmethod
    def zigzag(cls, length: int, size: int) -> Partition:
        """Share rows so that all ranks have the same work under a causal mask.

        The rows are cut into twice as many chunks as ranks; rank i gets chunk i and the i-th chunk
        from the end.

        Parameters
        ----------
        length : int
            Rows of all ranks.
        size : int
            Ranks.
        """
        return cls.zigzag_varlen((0, _whole("length", length)), size)

    @classmethod
    def zigzag_varlen(cls, cu_seqlens: Iterable[int], size: int) -> Partition:
        """Share the rows of packed sequences, each of them zigzag.

        Parameters
        ----------
        cu_seqlens : iterable of int, batch + 1
            Sequence i is rows ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``.
        size : int
            Ranks.
        """
        check_values("cu_seqlens", cu_seqlens)
        size = _whole("size", size, least=1)
        offsets = [_whole("cu_seqlens", x) for x in cu_seqlens]
        if offsets[:1] != [0] or offsets != sorted(offsets):
            raise ValueError(f"cu_seqlens must rise from 0, got {shown(offsets)}")
        ranges_of_ranks: list[list[Range]] = [[] for _ in range(size)]
        for begin, end in pairwise(offsets):
            ends = accumulate(_shares(end - begin, 2 * size), initial=begin)
            for chunk, found in enumerate(pairwise(ends)):
                ranges_of_ranks[min(chunk, 2 * size - 1 - chunk)].append(found)
        return cls(tuple(_rising(of_rank) for of_rank in ranges_of_ranks))

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranges)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(sum(end - begin for begin, end in of_rank) for of_rank in self.ranges)

    @property
    def length(self) -> int:
        """Rows of all ranks."""
        return sum(self.lengths)

    def take(self, array: Any, rank: int, axis: int = -2) -> Any:
        """Return the rows of one rank, contiguous.

        Parameters
        ----------
        array : array
            With all rows.
        rank : int
        axis : int
            Axis of the rows.

        Raises
        ------
        ValueError
            For another number of rows, or a rank that does not exist.
        """
        array = operand("array", array)
        xp = array_namespace(array)
        if array.shape[axis] != self.length:
            raise ValueError(
                f"an array for this partition must have {self.length} rows along axis {axis}, got "
                f"shape {tuple(array.shape)}"
            )
        if not 0 <= rank < len(self.ranges):
            raise ValueError(f"rank must be 0 to {len(self.ranges) - 1}, got {rank}")
        ranges = self.ranges[rank] or ((0, 0),)
        slices = [_slice(array, one, axis) for one in ranges]
        return xp.ascontiguousarray(xp.concatenate(slices, axis=axis))

    def join(self, parts: Sequence[Any], axis: int = -2) -> Any:
        """Return an array with all rows, from the rows of each rank: undo `take`.

        Parameters
        ----------
        parts : sequence of array
            By rank.
        axis : int
            Axis of the rows.

        Raises
        ------
        ValueError
            For another number of parts than there are ranks.
        """
        if len(parts) != len(self.ranges):
            raise ValueError(f"{len(self.ranges)} ranks have a part each, got {len(parts)} parts")
        parts = [operand("parts", part) for part in parts]
        shape = list(parts[0].shape)
        shape[axis] = self.length
        whole = array_namespace(*parts).empty(shape, parts[0].dtype)
        for of_rank, part in zip(self.ranges, parts, strict=True):
            for found, place in zip(of_rank, places(of_rank, of_rank), strict=True):
                _slice(whole, found, axis)[...] = _slice(part, place, axis)
        return whole

    def merged(self, groups: Iterable[Iterable[int]]) -> Partition:
        """Return a partition whose ranks have the rows of several ranks of this one, in order."""
        return Partition(
            tuple(_rising(r for rank in group for r in self.ranges[rank]) for group in groups)
        )


def places(inner: Iterable[Range], outer: Iterable[Range]) -> list[Range]:
    """Return the positions of ranges in an array with the rows of other ranges.

    Parameters
    ----------
    inner : iterable of (int, int)
        Each within one of `outer`.
    outer : iterable of (int, int)
        Rows that the array holds, rising.

    Examples
    --------
    >>> places([(12, 14)], [(0, 4), (10, 16)])
    [(6, 8)]
    """
    found, starts = [], []
    base = 0
    for begin, end in outer:
        starts.append((begin, end, base - begin))
        base += end - begin
    for first, last in inner:
        shift = next(shift for begin, end, shift in starts if begin <= first and last <= end)
        found.append((first + shift, last + shift))
    return found


def _whole(name: str, number: Any, least: int = 0) -> int:
    """Return a whole number of the caller's, of an array of one element too, as Python's."""
    try:
        value = operator.index(number.item() if hasattr(number, "item") else number)
    except TypeError:
        value = least - 1
    if value < least:
        raise ValueError(
            f"{name}: a whole number of at least {least} is needed, got {shown(number)}"
        )
    return value


def _shares(length: int, size: int) -> list[int]:
    """Divide a number of rows among ranks; the first ranks get one more if needed."""
    return [length // size + (i < length % size) for i in range(size)]


def _rising(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in order, with adjacent ranges joined and empty ranges removed."""
    joined: list[Range] = []
    for begin, end in sorted(r for r in ranges if r[0] < r[1]):
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return tuple(joined)


def _slice(array: Any, rows: Range, axis: int) -> Any:
    index: list[Any] = [slice(None)] * array.ndim
    index[axis] = slice(*rows)
    return array[tuple(index)]
