"""Ranks in a grid, and the heads that each of them computes."""

from __future__ import annotations

from dataclasses import dataclass

from cupyattn.distributed.partition import Range

#: Number of steps of the exchange of heads; all but the first and the last overlap computation.
CHUNKS = 4


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid of `ring` groups of `ulysses` neighbours.

    Neighbours exchange heads for rows: each then has some heads of all their rows. Groups pass keys
    and values around a ring, each rank to the rank with the same heads.

    Parameters
    ----------
    size : int
        Ranks.
    ulysses : int
        Ranks of a group; divides `size`.

    Examples
    --------
    >>> mesh = Mesh(6, 2)
    >>> mesh.ring, mesh.neighbours(3), mesh.circle(3)
    (3, (2, 3), (1, 3, 5))
    """

    size: int
    ulysses: int

    def __post_init__(self) -> None:
        if self.ulysses < 1 or self.size % self.ulysses:
            raise ValueError(f"ulysses must divide the {self.size} ranks, got {self.ulysses}")

    @property
    def ring(self) -> int:
        """Groups in the ring."""
        return self.size // self.ulysses

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank."""
        first = rank // self.ulysses * self.ulysses
        return tuple(range(first, first + self.ulysses))

    def circle(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same heads, in the order in which keys are passed on."""
        return tuple(range(rank % self.ulysses, self.size, self.ulysses))


@dataclass(frozen=True)
class Heads:
    """Query heads, and the key heads that they use; all key heads have equally many query heads.

    Parameters
    ----------
    q, kv : (int, int)
        From one head up to another.
    """

    q: Range
    kv: Range


NO_HEADS = Heads((0, 0), (0, 0))


def shares_of_heads(
    heads: int, heads_kv: int, size: int, chunks: int = CHUNKS
) -> tuple[tuple[Heads, ...], ...]:
    """Return the query heads of each rank in each step, divided as evenly as possible.

    Parameters
    ----------
    heads, heads_kv : int
    size : int
        Ranks.
    chunks : int
        Steps that the whole groups of a rank are cut into, as far as there are groups.

    Returns
    -------
    tuple of tuple of Heads
        By rank; all ranks have the same number of steps, and the last may have no heads.

    Examples
    --------
    >>> shares_of_heads(8, 2, 2)
    ((Heads(q=(0, 4), kv=(0, 1)),), (Heads(q=(4, 8), kv=(1, 2)),))
    >>> shares_of_heads(6, 2, 4)[1]  # heads 1 and 2 use the first key head
    (Heads(q=(1, 3), kv=(0, 1)),)
    """
    group = heads // heads_kv if heads_kv else 1
    found = []
    for rank in range(size):
        begin, end = heads * rank // size, heads * (rank + 1) // size
        whole = min(-(-begin // group) * group, end), max(end // group * group, begin)
        steps = [(begin, whole[0])]
        groups = max(0, whole[1] - whole[0]) // group
        count = max(1, min(chunks, groups))
        cuts = [whole[0] + groups * i // count * group for i in range(count + 1)]
        steps += list(zip(cuts, cuts[1:], strict=False)) if groups else []
        steps += [(max(whole[1], whole[0]), end)]
        found.append([Heads(q, (q[0] // group, -(-q[1] // group))) for q in steps if q[0] < q[1]])
    most = max(map(len, found))
    return tuple(tuple(of_rank + [NO_HEADS] * (most - len(of_rank))) for of_rank in found)
