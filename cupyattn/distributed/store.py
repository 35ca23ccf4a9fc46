"""A board for short messages between ranks: presence, facts about calls, and failures.

A store carries little (shapes, addresses, the identifier of an NCCL communicator) and on machines
without a device the arrays too. `Board` is the store of ranks that are threads of one process;
`cupyattn.distributed.tcp` puts one behind a socket.
"""

from __future__ import annotations

import numbers
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from cupyattn.errors import RankError, shown
from cupyattn.kernels.limits import as_float


def check_rank(rank: Any, size: Any) -> tuple[int, int]:
    """Return a rank and the size of its group as Python's numbers, which a store carries.

    ValueError for a rank that a group of this size does not have, TypeError for fractions.
    """
    try:
        own, ranks = operator.index(rank), operator.index(size)
    except TypeError:
        raise TypeError(
            f"rank and size must be whole numbers, got rank={shown(rank)} size={shown(size)}"
        ) from None
    if not 0 <= own < ranks:
        raise ValueError(f"rank must be between 0 and size - 1, got rank={own} size={ranks}")
    return own, ranks


def check_timeout(timeout: Any) -> float:
    """Return the seconds that a rank waits for another; ValueError or TypeError for none."""
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, got {shown(timeout)}")
    seconds = as_float(timeout)
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout must be positive, and at most {threading.TIMEOUT_MAX:g} seconds, "
            f"got {seconds}"
        )
    return seconds


def absent(ranks: Iterable[int], about: str, timeout: float) -> tuple[int, str]:
    """Return the first of some missing ranks, and the cause of its failure."""
    return min(ranks), f"did not come to {about!r} within {timeout:g} s"


class Store(Protocol):
    """A board of short messages. Every method raises `RankError` once a rank has failed."""

    def gather(self, key: str, rank: int, value: bytes, timeout: float, about: str) -> list[bytes]:
        """Leave a value under a key that all ranks name; return all values, by rank.

        `about` describes the question, for the error message if a rank does not come.
        """

    def fail(self, rank: int, cause: str) -> None:
        """Record that a rank has failed. The first failure is reported to all ranks."""

    def check(self) -> None:
        """Raise `RankError` if a rank has failed."""

    def leave(self) -> None:
        """Say that this rank needs the store no longer."""
        return  # threads that have ended hold nothing, and torch keeps its store


class Mailbox(Store, Protocol):
    """A store where ranks leave arrays, too."""

    def put(self, key: str, value: Any) -> None:
        """Leave a value for the rank that takes it."""

    def take(self, key: str, source: int, timeout: float) -> Any:
        """Return the value that rank `source` leaves under a key, first come, first served."""


class Board(Mailbox):
    """The store of ranks that are threads of one process; they may leave each other any object.

    Parameters
    ----------
    size : int
        Ranks.

    Examples
    --------
    >>> board = Board(1)
    >>> board.gather("0", 0, b"7", timeout=1.0, about="lengths")
    [b'7']
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._gathered: dict[str, dict[int, bytes]] = {}
        self._left: dict[str, deque[Any]] = {}
        self._failure: RankError | None = None

    def gather(self, key: str, rank: int, value: bytes, timeout: float, about: str) -> list[bytes]:
        """Leave a value under a key that all ranks name; return all values, by rank.

        Raises
        ------
        ValueError
            If the group has no such rank, or the rank has left a value there already.
        """
        check_rank(rank, self.size)
        with self._changed:
            self.check()
            values = self._gathered.setdefault(key, {})
            if rank in values:
                raise ValueError(f"rank {rank} has already left a value for {about!r}, key {key!r}")
            values[rank] = value
            if len(values) == self.size:  # the others hold the values, too
                del self._gathered[key]
            self._changed.notify_all()
            if not self._come(lambda: len(values) == self.size, timeout):
                self.fail(*absent(set(range(self.size)) - set(values), about, timeout))
                self.check()
            return [values[rank] for rank in range(self.size)]

    def put(self, key: str, value: Any) -> None:
        with self._changed:
            self.check()
            self._left.setdefault(key, deque()).append(value)
            self._changed.notify_all()

    def take(self, key: str, source: int, timeout: float) -> Any:
        with self._changed:
            self.check()
            if not self._come(lambda: key in self._left, timeout):
                self.fail(source, f"sent nothing for {key!r} within {timeout:g} s")
                self.check()
            values = self._left[key]
            value = values.popleft()
            if not values:
                del self._left[key]
            return value

    def fail(self, rank: int, cause: str) -> None:
        with self._changed:
            self._failure = self._failure or RankError(rank, cause)
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        """Whether a rank has failed."""
        return self._failure is not None

    def check(self) -> None:
        with self._changed:
            if self._failure is not None:
                raise RankError(self._failure.rank, self._failure.cause)

    def _come(self, there: Callable[[], bool], timeout: float) -> bool:
        """Wait until `there` holds or the timeout ends, and return it; raise if a rank has
        failed."""
        self._changed.wait_for(lambda: self._failure or there(), timeout)
        if not there():
            self.check()
        return there()
