"""Ranks with a CUDA device each, whose arrays travel by NCCL on a separate stream.

NCCL does not report that a peer has ended: a wait for it never returns. So a thread watches from
the first exchange of a call to its end. It checks NCCL for errors, the store for failed ranks, and
the clock. After a failure it aborts the communicator, which ends all waits, and the rank raises
`RankError`.

NCCL moves bytes by kernels, which need multiprocessors. After a persistent kernel of attention they
would find none until it ends. So a message is launched before the computation that overlaps it. If
both wait for a multiprocessor, the priority of the stream lets the message start first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from cupyattn.distributed import pitched
from cupyattn.distributed.group import TIMEOUT, Copies, DeviceGroup, Message, Work
from cupyattn.distributed.model import H200_NCCL
from cupyattn.distributed.store import Board, Store
from cupyattn.errors import RankError, UnsupportedError

#: ncclUint8: arrays travel as the bytes that they are.
_BYTES = 1
#: Errors that NCCL raises through CuPy: NcclError, and KeyError for a status without a name in
#: CuPy.
NCCL_ERRORS = (RuntimeError, KeyError)
#: Seconds between two looks of the watch, for up to so many ranks, because all ranks ask one store.
WATCH, WATCHED = 0.05, 16
#: Seconds between two looks at whether a device has finished.
POLL = 20e-6
#: Priority of the stream: the highest of all devices. CUDA clamps it to the range of a device.
PRIORITY = -5


class NcclGroup(DeviceGroup):
    """Ranks that are CUDA devices; arrays travel by NCCL.

    Parameters
    ----------
    store, rank, size, timeout
        As for `Group`.
    device : int
        This rank's.

    Raises
    ------
    UnsupportedError
        If there is no NCCL; the other ranks raise `RankError`.
    """

    machine = H200_NCCL

    def __init__(
        self, store: Store, rank: int, size: int, device: int, timeout: float = TIMEOUT
    ) -> None:
        super().__init__(store, rank, size, device, timeout)
        self._trouble: RankError | None = None
        self._deadline: float | None = None
        self._ended = threading.Event()
        self._comm: Any = None

        def facts() -> dict[str, Any]:
            nccl = _nccl()
            first = list(nccl.get_unique_id()) if rank == 0 else None
            return {"same": {"nccl": nccl.get_version()}, "identifier": first}

        said = self.agree("NcclGroup", facts)
        with self.on_device():
            self._stream = self._cupy.cuda.Stream(non_blocking=True, priority=PRIORITY)
            # NOTE: NCCL's memory is the driver's, where CuPy's pool may have left none.
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._comm = self._begin(bytes(said[0]["identifier"]))
        threading.Thread(target=self._watch, daemon=True).start()

    def _begin(self, identifier: bytes) -> Any:
        """Return the communicator. A separate thread makes it, because this waits for all ranks."""
        nccl, found = _nccl(), list[Any]()

        def begin() -> None:
            try:
                with self.on_device():
                    found.append(nccl.NcclCommunicator(self.size, identifier, self.rank))
            except NCCL_ERRORS as error:
                found.append(error)

        threading.Thread(target=begin, daemon=True).start()
        end = time.monotonic() + self.timeout
        while not found:
            self.store.check()
            if time.monotonic() > end:
                self.abort(f"could not begin to use NCCL within {self.timeout:g} s")
                self.store.check()
            time.sleep(WATCH / 10)
        if isinstance(found[0], Exception):
            self.abort(f"could not begin to use NCCL: {found[0]}")
            raise found[0]
        return found[0]

    def _prepare(self, sends: list[Message], receives: list[Message], own: Copies) -> Work:
        cupy, nccl = self._cupy, _nccl()
        self._raise()
        self._deadline = time.monotonic() + self.timeout  # until finish, whatever waits meanwhile
        with self.on_device():
            # NOTE: before the arrays of others. On one device a copy may be a kernel, which would
            # wait behind them for multiprocessors that the computation has.
            pitched.copy_all(cupy.cuda, own)
            ready = cupy.cuda.Event(disable_timing=True)
            ready.record()  # sent arrays have been computed, receiving arrays have been read
            self._stream.wait_event(ready)
            if sends or receives:
                self._tried(nccl.groupStart)
                for way, messages in ((self._comm.send, sends), (self._comm.recv, receives)):
                    for message in messages:
                        for x in message.pieces:
                            where = x.data.ptr, int(x.nbytes), _BYTES, message.rank
                            self._tried(way, *where, self._stream.ptr)
                self._tried(nccl.groupEnd)
            done = cupy.cuda.Event(disable_timing=True)
            done.record(self._stream)
        if isinstance(self.store, Board):
            # NOTE: in one process, an allocation of a rank may wait for all other devices. So it
            # waits for messages whose other side has not been launched yet. Hence all ranks launch
            # first.
            self.barrier()
        return _OnStream(cupy, self.device, done, [*sends, *receives])

    def finish(self) -> None:
        """Wait on the host until everything has been exchanged; raise where that failed."""
        self._deadline = time.monotonic() + self.timeout
        with self.on_device():
            done = self._cupy.cuda.Event(disable_timing=True)
            done.record(self._stream)
            while not done.done:
                self._raise()
                time.sleep(POLL)
        self._deadline = None
        self._raise()

    def abort(self, cause: str) -> None:
        """End all ranks with a `RankError` that names this one and the cause."""
        super().abort(cause)
        self.abandon(RankError(self.rank, cause))

    def close(self) -> None:
        """Leave the group in peace, once every rank has come here."""
        self.finish()
        self.barrier()
        self.agreed.clear()
        self._ended.set()
        self._comm.destroy()
        self.store.leave()

    # ---- the watch -------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(WATCH * max(1.0, self.size / WATCHED)):
            deadline = self._deadline
            if deadline is None:
                continue
            try:
                self.check_until(deadline)
                self._comm.check_async_error()
            except RankError as error:
                self.abandon(error)
            except NCCL_ERRORS as error:
                self.abort(f"met an error of NCCL: {error}")

    def abandon(self, error: RankError) -> None:
        """Abort the communicator, which ends every wait of this rank."""
        super().abandon(error)
        self._trouble = self._trouble or error
        self._ended.set()
        if self._comm is not None:
            self._comm.abort()

    def _tried(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call NCCL; where it fails end all ranks, with the failure that was first."""
        try:
            call(*arguments)
        except NCCL_ERRORS as error:
            self.abort(f"met an error of NCCL: {error}")
            raise self._trouble or error from error

    def _raise(self) -> None:
        if self._trouble is not None:
            raise RankError(self._trouble.rank, self._trouble.cause)


class _OnStream:
    """Messages that a stream has sent and received when an event is over."""

    def __init__(self, cupy: Any, device: int, done: Any, held: list[Any]) -> None:
        self._cupy, self._device, self._done = cupy, device, done
        self._held = held  # the arrays live until they may be used again

    def begin(self) -> None:
        """Do nothing: they are on their way."""

    def wait(self) -> None:
        """Let the current stream wait."""
        with self._cupy.cuda.Device(self._device):
            self._cupy.cuda.get_current_stream().wait_event(self._done)
        self._held = []


def _nccl() -> Any:
    from cupy.cuda import nccl

    if not nccl.available:
        raise UnsupportedError(
            "NCCL is not there: pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12), or start ranks "
            "without devices, whose arrays are NumPy's"
        )
    return nccl
