"""Threads: several for parts of a large NumPy array, since NumPy frees the interpreter; a lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")

#: More threads than these would wait for memory, and each needs separate scratch memory.
MOST_THREADS = 8
#: Fewer elements than these take less time than the start of a second thread.
THREADED_ELEMENTS = 2**20


def thread_count(elements: int) -> int:
    """Return the number of threads for an array: one for each processor this process may use.

    Examples
    --------
    >>> thread_count(1000)
    1
    """
    if elements < THREADED_ELEMENTS:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return min(MOST_THREADS, len(os.sched_getaffinity(0)))
    return min(MOST_THREADS, os.cpu_count() or 1)


def in_threads(
    work: Callable[[Sequence[Part]], Result], parts: Sequence[Part], threads: int
) -> list[Result]:
    """Give each thread a run of adjacent parts; return the results of `work` in their order.

    Parameters
    ----------
    work : callable
        Receives some parts. It must not change the state of its thread, such as NumPy's
        ``errstate``, which threads do not share.
    parts : sequence
    threads : int

    Returns
    -------
    list
        One result for each thread that had parts.

    Examples
    --------
    >>> in_threads(sum, [1, 2, 3, 4, 5], 2)
    [6, 9]
    """
    each = -(-len(parts) // max(1, threads))
    runs = [parts[i : i + each] for i in range(0, len(parts), max(1, each))]
    if len(runs) < 2:
        return [work(run) for run in runs]
    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(work, runs))


class Lock:
    """A lock of threads. A copy of its owner, or one that is pickled, has another.

    Examples
    --------
    >>> import copy
    >>> with (lock := Lock()), copy.deepcopy(lock):
    ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()
