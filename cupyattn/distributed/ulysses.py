"""Heads for rows: neighbours exchange them, so that each has some heads of all their rows, and
exchange them back.

Every message is the rows of one head that one rank holds, which lie together where they are sent
from and where they arrive: nothing is packed or unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.distributed.group import Group, Message
from cupyattn.distributed.partition import Partition, Range, places
from cupyattn.rounding import array_namespace


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
    def own_length(self) -> int:
        """Rows of this rank."""
        return sum(end - begin for begin, end in self.local[self._own])

    @property
    def _own(self) -> int:
        return self.ranks.index(self.group.rank)

    def scatter(
        self, x: Any, heads: Sequence[Range], sends: list[Message], receives: list[Message]
    ) -> Any:
        """Return an array for all rows of this rank's heads; add what has to travel for it.

        Parameters
        ----------
        x : array, (batch, heads, own_length, ...), contiguous
            All heads of this rank's rows.
        heads : sequence of (int, int)
            Of each neighbour, the heads that it gets.
        sends, receives : list of (rank, array)
            Messages are appended.

        Returns
        -------
        array, (batch, own heads, length, ...)
            This rank's rows are there; the others arrive.
        """
        own = self._own
        mine = heads[own]
        shape = (x.shape[0], mine[1] - mine[0], self.length, *x.shape[3:])
        whole = array_namespace(x).empty(shape, x.dtype)
        for there, here in zip(self.joint[own], self.local[own], strict=True):
            whole[:, :, slice(*there)] = x[:, slice(*mine), slice(*here)]
        for index, rank in enumerate(self.ranks):
            if rank != self.group.rank:
                sends += [(rank, a) for a in _slabs(x, heads[index], self.local[own])]
                every = 0, shape[1]
                receives += [(rank, a) for a in _slabs(whole, every, self.joint[index])]
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
        x : array, (batch, heads, own_length, ...), contiguous
            Receives all heads of this rank's rows, as far as `heads` has them.
        heads, sends, receives
            As for `scatter`.
        """
        own = self._own
        for there, here in zip(self.joint[own], self.local[own], strict=True):
            x[:, slice(*heads[own]), slice(*here)] = part[:, :, slice(*there)]
        for index, rank in enumerate(self.ranks):
            if rank != self.group.rank:
                every = 0, part.shape[1]
                sends += [(rank, a) for a in _slabs(part, every, self.joint[index])]
                receives += [(rank, a) for a in _slabs(x, heads[index], self.local[own])]


def merged_ranges(rows: Partition, ranks: Sequence[int]) -> tuple[Range, ...]:
    """Return the rows of several ranks, in their order."""
    others = [rank for rank in range(rows.size) if rank not in ranks]
    return rows.merged([ranks, *([rank] for rank in others)]).ranges[0]


def _slabs(x: Any, heads: Range, rows: Sequence[Range]) -> Iterator[Any]:
    """Yield the rows of every head that travel as one message each."""
    for entry in range(x.shape[0]):
        for head in range(*heads):
            for begin, end in rows:
                yield x[entry, head, begin:end]
