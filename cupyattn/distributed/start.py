"""How ranks find each other: threads of one process, a TCP store, or MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cupyattn.distributed.group import TIMEOUT, Group, HostGroup
from cupyattn.distributed.store import Board
from cupyattn.errors import RankError

T = TypeVar("T")


def run(
    function: Callable[[Group], T], ranks: int | Sequence[int], *, timeout: float = TIMEOUT
) -> list[T]:
    size = ranks
    board = Board(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def on_rank(rank: int) -> None:
        try:
            results[rank] = function(HostGroup(board, rank, size, timeout))
        except RankError as error:
            errors[rank] = error
        except BaseException as error:
            errors[rank] = error
            board.fail(rank, f"raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=on_rank, args=(rank,), daemon=True) for rank in range(size)]
    for t in threads: t.start()
    for t in threads: t.join()
    for e in errors:
        if e is not None and not isinstance(e, RankError): raise e
    for e in errors:
        if e is not None: raise e
    return results
