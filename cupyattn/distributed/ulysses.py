"""Heads for rows: neighbours exchange them, so that each has some heads of all their rows, and
exchange them back.

A message is the rows of some heads that one rank holds. Those of a head lie together where they are
sent from and where they arrive, heads lie apart: nothing is packed or unpacked. What a rank keeps
is a message to itself, which is copied beside the computation as the others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.group import Group, Message
from cupyattn.distributed.partition import Partition, Range, places

#: Batch entries and heads lie apart.
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
        Of each neighbour, where its ranges lie in its own array.
    joint : tuple of tuple of (int, int)
        Where the same ranges lie in an array with the rows of all.
    """

    group: Group
    ranks: tuple[int, ...]
    local: tuple[tuple[Range, ...], ...]
    joint: tuple[tuple[Range, ...], ...]

    @classmethod
    def of(cls, group: Group, ranks: tuple[int, ...], rows: Partition) -> Neighbours:
        """Describe the rows of some ranks; with others they share those of a partition."""
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
        """Return an array for all rows of this rank's heads; add what has to travel to fill it.

        Parameters
        ----------
        x : array, (batch, heads, own rows, ...), contiguous
            All heads of this rank's rows.
        heads : sequence of (int, int)
            Of each neighbour, the heads that it gets.
        sends, receives : list of Message
            Messages are appended.

        Returns
        -------
        array, (batch, own heads, length, ...)
            Its rows arrive.
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
        """Undo `scatter`: bring every neighbour the rows that are its own.

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
    """Return the messages of some heads: one for all rows that lie together."""
    return [Message(rank, x[:, slice(*heads), slice(*some)], _OUTER) for some in rows]
