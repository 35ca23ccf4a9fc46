"""Cut attention of one rank's rows to another rank's keys into calls of `cupyattn.attention`.

A causal mask and a window refer to positions in the whole sequence, a call to positions in its
arrays. If rows and keys of a block begin at different positions, the block is cut until a window
aligned top-left describes the same keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cupyattn.distributed.partition import Range

#: Row i of a sequence attends key j only if i + first <= j <= i + last; None: no limit.
Limits = tuple[int | None, int | None]


@dataclass(frozen=True)
class Block:
    """Rows and keys of local arrays for one call.

    Parameters
    ----------
    q, kv : (int, int)
        Rows and keys, from one up to another.
    window : (int, int)
        As `cupyattn.attention` takes it with ``causal_align="top-left"``.
    """

    q: Range
    kv: Range
    window: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class Span:
    """One sequence among the rows of all.

    Parameters
    ----------
    q, kv : (int, int)
        Its rows and its keys, from one up to another.
    limits : (int or None, int or None)
        As `cupyattn.problem.checks.check_limits` has them.
    """

    q: Range
    kv: Range
    limits: Limits = (None, None)


@dataclass(frozen=True)
class _Piece:
    """Contiguous rows of a sequence: `at` in a rank's array, `place` in the sequence."""

    at: int
    place: int
    length: int


def blocks(q: Sequence[Range], kv: Sequence[Range], spans: Iterable[Span]) -> list[Block]:
    """Return the calls that bring the rows of one rank together with the keys of another.

    Parameters
    ----------
    q, kv : sequence of (int, int)
        The rows and the keys, as a `Partition` has them.
    spans : iterable of Span
        The sequences, rising.

    Returns
    -------
    list of Block
        Each pair of a row and a key that it attends to is in exactly one block. Rows and keys rise
        from block to block within a window.

    Examples
    --------
    >>> causal = [Span((0, 16), (0, 16), (None, 0))]
    >>> blocks([(0, 4), (12, 16)], [(0, 4), (12, 16)], causal)  # a zigzag rank and its own keys
    [Block(q=(0, 8), kv=(0, 8), window=(-1, 0))]
    >>> blocks([(0, 4), (12, 16)], [(4, 12)], causal)  # and those of another
    [Block(q=(4, 8), kv=(0, 8), window=(-1, -1))]
    """
    found: list[Block] = []
    for span in spans:
        rows, keys = _pieces(q, span.q), _pieces(kv, span.kv)
        found += _of_sequence(rows, keys, span.limits) if rows and keys else []
    return found


def _pieces(ranges: Sequence[Range], span: Range) -> list[_Piece]:
    """Return the parts of a sequence in an array with the rows of these ranges."""
    found, base = [], 0
    for begin, end in ranges:
        first, last = max(begin, span[0]), min(end, span[1])
        if first < last:
            found.append(_Piece(base + first - begin, first - span[0], last - first))
        base += end - begin
    return found


def _of_sequence(rows: list[_Piece], keys: list[_Piece], limits: Limits) -> list[Block]:
    """Return the blocks of one sequence: a single block if one call is enough."""
    same = [(p.place, p.length) for p in rows] == [(p.place, p.length) for p in keys]
    if limits == (None, 0) and same:
        return [Block(_around(rows), _around(keys), (-1, 0))]
    pairs = {(i, j): _cut(r, k, limits) for i, r in enumerate(rows) for j, k in enumerate(keys)}
    found = {pair: block for pair, block in pairs.items() if block is not None}
    if not found:
        return []
    of_rows, of_keys = ({pair[axis] for pair in found} for axis in (0, 1))
    some_rows, some_keys = _some(rows, of_rows), _some(keys, of_keys)
    all_pairs = len(found) == len(of_rows) * len(of_keys)
    whole = all(
        block.window == (-1, -1)
        and block.q == _around([rows[i]])
        and block.kv == _around([keys[j]])
        for (i, j), block in found.items()
    )
    if all_pairs and whole and _together(some_rows) and _together(some_keys):
        return [Block(_around(some_rows), _around(some_keys))]
    return list(found.values())


def _some(pieces: list[_Piece], which: set[int]) -> list[_Piece]:
    return [piece for i, piece in enumerate(pieces) if i in which]


def _around(pieces: list[_Piece]) -> Range:
    return pieces[0].at, pieces[-1].at + pieces[-1].length


def _together(pieces: list[_Piece]) -> bool:
    """Whether pieces are adjacent in their array."""
    begin, end = _around(pieces)
    return sum(piece.length for piece in pieces) == end - begin


def _cut(rows: _Piece, keys: _Piece, limits: Limits) -> Block | None:
    """Return the block of contiguous rows and contiguous keys; None if no row attends a key."""
    shift = rows.place - keys.place
    first, last = (None if x is None else x + shift for x in limits)
    q0, q1, k0, k1 = 0, rows.length, 0, keys.length
    if last is not None and last < 0:  # the first rows attend to nothing
        q0 = -last
        first, last = None if first is None else first + q0, 0
    if first is not None and first > 0:  # no row attends to the first keys
        k0 = first
        first, last = 0, None if last is None else last - k0
    if last is not None:  # nor to the last
        k1 = min(k1, k0 + q1 - q0 + last)
    if first is not None:  # and the last rows attend to nothing
        q1 = min(q1, q0 + k1 - k0 - first)
    if q0 >= q1 or k0 >= k1:
        return None
    left = -1 if first is None or -first >= q1 - q0 - 1 else -first
    right = -1 if last is None or last >= k1 - k0 - 1 else last
    return Block((rows.at + q0, rows.at + q1), (keys.at + k0, keys.at + k1), (left, right))
