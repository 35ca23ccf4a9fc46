"""Ranks that are devices of one process; copy engines of the devices move their arrays.

NCCL moves bytes by a kernel, which takes multiprocessors from the computation. Within a process a
device can read another device's memory directly: the receiver's stream waits for the sender's event
and copies. No stream waits for a peer that has not arrived, so no device can hang. The heads of an
array are at a pitch, so a message with any number of heads is one copy.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cupyattn.distributed import pitched
from cupyattn.distributed.group import TIMEOUT, Copies, DeviceGroup, Message, Work
from cupyattn.distributed.store import Board
from cupyattn.errors import UnsupportedError

#: Seconds between two looks at whether a device has finished.
POLL = 20e-6
#: cudaErrorPeerAccessAlreadyEnabled.
_ENABLED = 704


class CopyGroup(DeviceGroup):
    """Ranks that are CUDA devices of one process; arrays travel by their copy engines.

    Parameters
    ----------
    store : Board
        The board that the threads share.
    rank, size, timeout
        As for `Group`.
    device : int
        Device of this rank.

    Raises
    ------
    UnsupportedError
        If a device cannot access the memory of another.
    """

    def __init__(
        self, store: Board, rank: int, size: int, device: int, timeout: float = TIMEOUT
    ) -> None:
        super().__init__(store, rank, size, device, timeout)
        self._board = store
        self._messages: Counter[str] = Counter()
        devices = self.gather("devices", device)
        with self.on_device():
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            enable_access(self._cupy.cuda.runtime, device, devices)

    def _prepare(self, sends: list[Message], receives: list[Message], own: Copies) -> Work:
        with self.on_device():
            # NOTE: before the arrays of others. On one device a copy may be a kernel, which would
            # wait behind them for multiprocessors that the computation has.
            pitched.copy_all(self._cupy.cuda, own)
            return _Copied(self, _by_peer(sends), _by_peer(receives), self.event())

    def send_off(
        self,
        outgoing: dict[int, list[Message]],
        incoming: dict[int, list[Message]],
        ready: Any,
    ) -> tuple[Any, list[tuple[int, str]]]:
        """Copy the messages of other ranks, once all of them are ready.

        Returns
        -------
        copied : event
            Everything has come.
        read : list of (int, str)
            Ranks, and keys under which they leave the event after which what was sent may change.
        """
        runtime = self._cupy.cuda.runtime
        for peer, messages in outgoing.items():
            arrays = [message.array for message in messages]
            self._board.put(self._next(self.rank, peer, "arrays"), (arrays, ready))
        self._stream.wait_event(ready)
        for peer, messages in incoming.items():
            key = self._next(peer, self.rank, "arrays")
            sources, computed = self.take(peer, key)
            self._check(peer, sources, [message.array for message in messages])
            self._stream.wait_event(computed)
            for source, message in zip(sources, messages, strict=True):
                pitched.copy(runtime, message.array, source, message.outer, self._stream)
        copied = self.event(self._stream)
        for peer in incoming:
            self._board.put(self._next(self.rank, peer, "copied"), copied)
        return copied, [(peer, self._next(peer, self.rank, "copied")) for peer in outgoing]

    def current_stream(self) -> Any:
        """Return the stream on which the caller computes."""
        return self._cupy.cuda.get_current_stream()

    def finish(self) -> None:
        """Wait on the host until everything has been exchanged; raise where a rank has failed."""
        end = time.monotonic() + self.timeout
        with self.on_device():
            done = self.event(self._stream)
            while not done.done:
                self.check_until(end)
                time.sleep(POLL)
        self.store.check()

    def _check(self, peer: int, sources: Sequence[Any], arrays: Sequence[Any]) -> None:
        """End all ranks unless a peer's messages match the arrays of this rank."""
        sent, wanted = ([[*x.shape, x.dtype.name] for x in some] for some in (sources, arrays))
        if sent != wanted:
            self.store.fail(peer, f"sent {sent}, rank {self.rank} wants {wanted}")
            self.store.check()

    def event(self, stream: Any = None) -> Any:
        """Return an event that is complete when all previous work of a stream is."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _next(self, source: int, target: int, what: str) -> str:
        """Return the key of the next message of its kind from one rank to another."""
        pair = f"{what} from {source} to {target}"
        self._messages[pair] += 1
        return f"{pair}, message {self._messages[pair]}"

    def take(self, source: int, key: str) -> Any:
        """Return the value that a rank leaves on the board."""
        return self._board.take(key, source, self.timeout)


class _Copied:
    """Messages that are copied once their senders have computed them."""

    def __init__(
        self,
        group: CopyGroup,
        outgoing: dict[int, list[Message]],
        incoming: dict[int, list[Message]],
        ready: Any,
    ) -> None:
        self._group, self._ready = group, ready
        # The messages hold the arrays until these may be used again.
        self._outgoing, self._incoming = outgoing, incoming
        self._copied: Any = None
        self._read: list[tuple[int, str]] = []

    def begin(self) -> None:
        """Send them off, unless they have been."""
        if self._copied is not None:
            return
        with self._group.on_device():
            self._copied, self._read = self._group.send_off(
                self._outgoing, self._incoming, self._ready
            )

    def wait(self) -> None:
        """Let the current stream wait for the messages, and until others have read its messages."""
        self.begin()
        group = self._group
        with group.on_device():
            stream = group.current_stream()
            stream.wait_event(self._copied)
            for peer, key in self._read:
                stream.wait_event(group.take(peer, key))
        self._read = []
        self._outgoing, self._incoming = {}, {}


def reach_each_other(runtime: Any, devices: Sequence[int]) -> bool:
    """Whether every device can access the memory of every other.

    Parameters
    ----------
    runtime : module
        ``cupy.cuda.runtime``.
    devices : sequence of int
    """
    pairs = ((a, b) for a in devices for b in devices if a != b)
    return all(runtime.deviceCanAccessPeer(a, b) for a, b in pairs)


def enable_access(runtime: Any, device: int, others: Sequence[int]) -> None:
    """Let the current device access the memory of others.

    Raises
    ------
    UnsupportedError
        If it cannot.
    """
    for other in sorted(set(others) - {device}):
        if not runtime.deviceCanAccessPeer(device, other):
            raise UnsupportedError(
                f"device {device} cannot access the memory of device {other}, so copy engines "
                "carry nothing between them: transport='nccl' does"
            )
        try:
            runtime.deviceEnablePeerAccess(other)
        except runtime.CUDARuntimeError as error:
            if error.status != _ENABLED:
                raise


def _by_peer(messages: Sequence[Message]) -> dict[int, list[Message]]:
    """Return the messages of each peer, in their order."""
    found: dict[int, list[Message]] = {}
    for message in messages:
        found.setdefault(message.rank, []).append(message)
    return found
