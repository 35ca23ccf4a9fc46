"""Heads for rows: neighbours exchange them, so that each has some heads of all their rows, and
exchange them back.

A message has one rank's rows of some heads. The rows of a head are contiguous in both arrays, and
heads are at a pitch, so no packing is needed. Rows that stay on a rank are a message to itself,
which is copied during the computation like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.group import Group, Message
from cupyattn.distributed.partition import Partition, Range, places

#: Number of outer axes, batch and heads, which may have any strides.
_OUTER = 2


@dataclass(frozen=True)
class Neighbours:
    """One axis of rows among neighbours, as one of them sees it.

    Parameters
    ----------
    group : Group
    ranks : tuple of int
        The neighbours.
    local : tuple of tuple of (int, int)
        For each neighbour, the positions of its ranges in its array.
    joint : tuple of tuple of (int, int)
        The positions of the same ranges in an array with the rows of all.
    """

    group: Group
    ranks: tuple[int, ...]
    local: tuple[tuple[Range, ...], ...]
    joint: tuple[tuple[Range, ...], ...]

    @classmethod
    def of(cls, group: Group, ranks: tuple[int, ...], rows: Partition) -> Neighbours:
        """Describe the rows of some ranks in a partition."""
        outer = merged_ranges(rows, ranks)
        ranges = [rows.ranges[rank] for rank in ranks]
        return cls(
            group, ranks, tuple(tuple(places(own, own)) for own in ranges),
            tuple(tuple(places(own, outer)) for own in ranges),
        )  # fmt: skip

    @property
    def length(self) -> int:
        """Rows of all neighbours."""
        return sum(end - begin for of_rank in self.joint for begin, end in of_rank)

    @property
    def _own(self) -> int:
        return self.ranks.index(self.group.rank)

    def scatter(
        self, x: Any, heads: Sequence[Range], sends: list[Message], receives: list[Message]
    ) -> Any:
        """Return an array for all rows of this rank's heads; add the messages that fill it.

        Parameters
        ----------
        x : array, (batch, heads, own rows, ...), contiguous
            All heads of this rank's rows.
        heads : sequence of (int, int)
            Heads for each neighbour.
        sends, receives : list of Message
            Messages are appended.

        Returns
        -------
        array, (batch, own heads, length, ...)
            Its rows are still in flight.
        """
        own = self._own
        mine = heads[own]
        shape = (x.shape[0], mine[1] - mine[0], self.length, *x.shape[3:])
        whole = array_namespace(x).empty(shape, x.dtype)
        for index, rank in enumerate(self.ranks):
            sends += _slabs(rank, x, heads[index], self.local[own])
            receives += _slabs(rank, whole, (0, shape[1]), self.joint[index])
        return whole

    def gather(
        self,
        part: Any,
        x: Any,
        heads: Sequence[Range],
        sends: list[Message],
        receives: list[Message],
    ) -> None:
        """Undo `scatter`: send every neighbour its rows.

        Parameters
        ----------
        part : array, (batch, own heads, length, ...), contiguous
            All rows of this rank's heads.
        x : array, (batch, heads, own rows, ...), contiguous
            Receives all heads of this rank's rows, as far as `heads` has them.
        heads, sends, receives
            As for `scatter`.
        """
        own = self._own
        for index, rank in enumerate(self.ranks):
            sends += _slabs(rank, part, (0, part.shape[1]), self.joint[index])
            receives += _slabs(rank, x, heads[index], self.local[own])


def merged_ranges(rows: Partition, ranks: Sequence[int]) -> tuple[Range, ...]:
    """Return the rows of several ranks, in their order."""
    others = [rank for rank in range(rows.size) if rank not in ranks]
    return rows.merged([ranks, *([rank] for rank in others)]).ranges[0]


def _slabs(rank: int, x: Any, heads: Range, rows: Sequence[Range]) -> list[Message]:
    """Return the messages of some heads: one for each range of contiguous rows."""
    return [Message(rank, x[:, slice(*heads), slice(*some)], _OUTER) for some in rows]
