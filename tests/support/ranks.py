"""Setup of tests of several ranks or threads: threads, and a port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable


def in_threads(call: Callable[[int], object], count: int, seconds: float = 60) -> None:
    """Call with 0, 1, ... at once, each in a thread, and wait; a call must end in time."""
    threads = [threading.Thread(target=call, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])
