"""Ranks that are devices of one process, whose arrays travel by the devices' copy engines.

NCCL moves bytes by a kernel, which takes multiprocessors from the computation beside it. Within a
process a device can read another's memory by itself: the receiver's stream waits for the sender's
event and copies. No stream waits for a peer that has not come, so nothing on a device can hang.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cupyattn.distributed.group import TIMEOUT, Group, Message, Work
from cupyattn.distributed.store import Board

#: Seconds between two looks at whether a device has finished.
POLL = 20e-6


class CopyGroup(Group):
    """Ranks that are CUDA devices of one process, as the thread of one of them sees them.

    Parameters
    ----------
    store : Board
        What the threads share.
    rank, size, timeout
        As for `Group`.
    device : int
        This rank's.
    """

    namespace = "cupy"

    def __init__(
        self, store: Board, rank: int, size: int, device: int, timeout: float = TIMEOUT
    ) -> None:
        super().__init__(store, rank, size, timeout)
        cupy = _cupy()
        self._cupy, self.device, self._board = cupy, device, store
        self._messages: Counter[str] = Counter()
        with self.on_device():
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this rank's device is the current one."""
        device: contextlib.AbstractContextManager[Any] = self._cupy.cuda.Device(self.device)
        return device

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        outgoing, incoming = _by_peer(sends), _by_peer(receives)
        with self.on_device():
            ready = self._event()  # what is sent has been computed, what receives has been read
            for peer, arrays in outgoing.items():
                self._board.put(self._next(self.rank, peer, "arrays"), (arrays, ready))
            self._stream.wait_event(ready)
            for peer, arrays in incoming.items():
                sources, computed = self._take(peer, self.rank, "arrays")
                self._check(peer, sources, arrays)
                self._stream.wait_event(computed)
                for source, array in zip(sources, arrays, strict=True):
                    array.data.copy_from_device_async(source.data, array.nbytes, self._stream)
            copied = self._event(self._stream)
            for peer in incoming:
                self._board.put(self._next(self.rank, peer, "copied"), copied)
            # What was sent may be changed once those who receive it have copied it.
            read = [self._take(peer, self.rank, "copied") for peer in outgoing]
        return _Copied(self, [copied, *read])

    def finish(self) -> None:
        """Wait on the host until everything has been exchanged; raise where a rank has failed."""
        end = time.monotonic() + self.timeout
        with self.on_device():
            done = self._event(self._stream)
            while not done.done:
                self.store.check()
                if time.monotonic() > end:
                    cause = f"waited longer than {self.timeout:g} s for arrays of others"
                    self.store.fail(self.rank, cause)
                time.sleep(POLL)
        self.store.check()

    def _check(self, peer: int, sources: Sequence[Any], arrays: Sequence[Any]) -> None:
        """End all ranks unless a peer sends what this rank wants."""
        sent, wanted = ([int(x.nbytes) for x in some] for some in (sources, arrays))
        if sent != wanted:
            self.store.fail(peer, f"sent {sent} bytes, rank {self.rank} wants {wanted}")
            self.store.check()

    def _event(self, stream: Any = None) -> Any:
        """Return an event that is over when all that a stream was given until now is."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _next(self, source: int, target: int, what: str) -> str:
        """Return the key of the next message of its kind from one rank to another."""
        pair = f"{what} from {source} to {target}"
        self._messages[pair] += 1
        return f"{pair}, message {self._messages[pair]}"

    def _take(self, source: int, target: int, what: str) -> Any:
        return self._board.take(self._next(source, target, what), source, self.timeout)


class _Copied:
    """Messages that were copied when some events are over."""

    def __init__(self, group: CopyGroup, events: list[Any]) -> None:
        self._group, self._events = group, events

    def wait(self) -> None:
        """Let the current stream wait."""
        group = self._group
        with group.on_device():
            for event in self._events:
                group._cupy.cuda.get_current_stream().wait_event(event)


def _by_peer(messages: Sequence[Message]) -> dict[int, list[Any]]:
    """Return the arrays of each peer, in their order."""
    found: dict[int, list[Any]] = {}
    for peer, array in messages:
        found.setdefault(peer, []).append(array)
    return found


def _cupy() -> Any:
    import cupy

    return cupy
