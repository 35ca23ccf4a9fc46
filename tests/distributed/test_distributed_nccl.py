"""Groups of devices on the host, with stand-ins for CuPy's streams and NCCL."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import re
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn import distributed
from cupyattn.distributed import (
    CopyGroup,
    Mesh,
    Partition,
    RankError,
    copies,
    nccl,
    start,
)
from cupyattn.distributed import group as groups
from cupyattn.distributed.group import Message
from cupyattn.distributed.nccl import NcclGroup
from cupyattn.distributed.store import Board
from cupyattn.errors import UnsupportedError
from tests.distributed.distributed_cases import asked_for
from tests.support.ranks import in_threads
from tests.support.runs import normal

# ---- NCCL, which is not here: what CuPy has of it, on the host -----------------------------------


@dataclass
class Device:
    """Streams that run in order, one message after the other, as threads do them."""

    number: int = 0

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *of_error: Any) -> None: ...


class Stream:
    def __init__(self, non_blocking: bool = False, priority: int | None = None) -> None:
        self.ptr, self.tasks = id(self), queue.Queue[Any]()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self.tasks.get()()

    def wait_event(self, event: Event) -> None:
        self.tasks.put(event.reached.wait)


@dataclass
class Event:
    disable_timing: bool = True
    reached: threading.Event = field(default_factory=threading.Event)

    def record(self, stream: Stream | None = None) -> None:
        """On the current stream, whose work the host has done already, or another."""
        stream.tasks.put(self.reached.set) if stream else self.reached.set()

    @property
    def done(self) -> bool:
        return self.reached.is_set()


class Now:
    """The current stream: the host itself."""

    ptr = 0

    def wait_event(self, event: Event) -> None:
        event.reached.wait()


@dataclass
class FakeNccl:
    """Messages by way of queues. Ranks in `mute` send nothing, those in `broken` have an error."""

    mute: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    queues: dict[tuple[int, int], queue.Queue[Any]] = field(default_factory=dict)
    arrays: dict[int, Any] = field(default_factory=dict)
    streams: dict[int, Stream] = field(default_factory=dict)
    #: Ranks in the order in which their pools were freed, and their communicators made.
    begun: list[str] = field(default_factory=list)
    available: bool = True

    def get_version(self) -> int:
        return 22700

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    def groupStart(self) -> None: ...

    def groupEnd(self) -> None: ...

    def NcclCommunicator(self, size: int, identifier: bytes, rank: int) -> Any:
        self.begun.append("communicator")
        assert identifier == bytes(range(128))
        return Communicator(self, rank)


@dataclass
class Communicator:
    nccl: FakeNccl
    rank: int
    aborted: threading.Event = field(default_factory=threading.Event)

    def _queue(self, source: int, target: int) -> queue.Queue[Any]:
        return self.nccl.queues.setdefault((source, target), queue.Queue())

    def send(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
        array = self.nccl.arrays[pointer]
        assert count == array.nbytes and kind == 1
        if self.rank not in self.nccl.mute:
            to = self._queue(self.rank, peer)
            self.nccl.streams[stream].tasks.put(lambda: to.put(array.copy()))

    def recv(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
        array, of = self.nccl.arrays[pointer], self._queue(peer, self.rank)

        def take() -> None:
            while not self.aborted.is_set():
                with contextlib.suppress(queue.Empty):
                    array[...] = of.get(timeout=0.02)
                    return

        self.nccl.streams[stream].tasks.put(take)

    def check_async_error(self) -> None:
        if self.rank in self.nccl.broken:
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")

    def abort(self) -> None:
        self.aborted.set()

    def destroy(self) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """NCCL and CuPy as `NcclGroup` sees them, with NumPy arrays in place of CuPy's."""
    found = FakeNccl()

    class OfNccl(Stream):
        def __init__(self, non_blocking: bool = False, priority: int | None = None) -> None:
            super().__init__()
            found.streams[self.ptr] = self

    cuda = type("cuda", (), {"Device": Device, "Stream": OfNccl, "Event": Event,
                             "get_current_stream": staticmethod(Now),
                             "runtime": Runtime(found)})  # fmt: skip
    pool = SimpleNamespace(free_all_blocks=lambda: found.begun.append("freed"))
    cupy = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(groups, "_cupy", lambda: cupy)
    monkeypatch.setattr(nccl, "_nccl", lambda: found)
    return found


@dataclass
class Runtime:
    """Copies on streams, of bytes at addresses of the host; devices that access each other."""

    nccl: FakeNccl
    memcpyDefault: int = 4
    enabled: set[int] = field(default_factory=set)
    apart: set[tuple[int, int]] = field(default_factory=set)

    class CUDARuntimeError(RuntimeError):
        status = 704

    def memcpyAsync(self, to: int, of: int, width: int, kind: int, stream: int) -> None:
        self.memcpy2DAsync(to, width, of, width, width, 1, kind, stream)

    def memcpy2DAsync(
        self, to: int, to_pitch: int, of: int, pitch: int, width: int, height: int, kind: int,
        stream: int,
    ) -> None:  # fmt: skip
        assert kind == 4 and width <= min(to_pitch, pitch) and max(to_pitch, pitch) < 2**31

        def copy() -> None:
            time.sleep(0.002)
            for row in range(height):
                ctypes.memmove(to + row * to_pitch, of + row * pitch, width)

        if stream == Now.ptr:
            copy()
        else:
            self.nccl.streams[stream].tasks.put(copy)

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        assert device != peer
        return int((device, peer) not in self.apart)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        if peer in self.enabled:
            raise self.CUDARuntimeError("cudaErrorPeerAccessAlreadyEnabled")
        self.enabled.add(peer)


@dataclass
class Pointer:
    """Where an array lies."""

    ptr: int


class Array(np.ndarray):
    """A NumPy array that says where it lies as CuPy's do."""

    nccl: FakeNccl

    @property
    def data(self) -> Any:  # type: ignore[override]
        pointer = self.ctypes.data
        self.nccl.arrays[pointer] = self.view(np.ndarray)
        return Pointer(pointer)


def on_fake(
    fake: FakeNccl, size: int, function: Any, timeout: float, kind: Any = NcclGroup
) -> list[Any]:
    """Return the result or exception of each rank."""
    Array.nccl, board = fake, Board(size)
    found: list[Any] = [None] * size

    def on_rank(rank: int) -> None:
        try:
            found[rank] = function(kind(board, rank, size, rank, timeout))
        except (RuntimeError, ValueError) as error:
            found[rank] = error

    in_threads(on_rank, size, 20)
    return found


def pass_on(group: NcclGroup) -> list[float]:
    """Send an array round the ring, twice; what this rank has then."""
    x = np.full(4, float(group.rank)).view(Array)
    for _ in range(2):
        y = np.empty(4).view(Array)
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        group.exchange([(after, x)], [(before, y)]).wait()
        x = y
    group.finish()
    return x.tolist()


def test_arrays_travel_by_nccl_in_order(fake: FakeNccl) -> None:
    found = on_fake(fake, 3, lambda group: (pass_on(group), group.close())[0], timeout=10)
    assert found == [[1.0] * 4, [2.0] * 4, [0.0] * 4]


def test_unused_blocks_of_the_pool_are_freed_before_nccl_takes_memory(fake: FakeNccl) -> None:
    on_fake(fake, 1, lambda group: group.close(), timeout=10)
    assert fake.begun == ["freed", "communicator"]


def test_arrays_travel_by_copies_in_order(fake: FakeNccl) -> None:
    """The sent array is overwritten as soon as the wait for the work ends."""

    def call(group: CopyGroup) -> Any:
        found = pass_on(group)
        x, y = np.full(4, float(group.rank)).view(Array), np.empty(4).view(Array)
        other = (group.rank + 1) % 3, (group.rank - 1) % 3
        group.exchange([(other[0], x)], [(other[1], y)]).wait()
        x[...] = -1
        group.finish()
        group.close()
        return found, y.tolist()

    found = on_fake(fake, 3, call, timeout=10, kind=CopyGroup)
    assert [passed for passed, _ in found] == [[1.0] * 4, [2.0] * 4, [0.0] * 4]
    assert [one for _, one in found] == [[2.0] * 4, [0.0] * 4, [1.0] * 4]


def test_copies_of_another_size_or_of_nobody_end_all_ranks(fake: FakeNccl) -> None:
    def another_size(group: CopyGroup) -> None:
        x, y = np.ones(4 + group.rank).view(Array), np.ones(4).view(Array)
        group.exchange([(1 - group.rank, x)], [(1 - group.rank, y)])
        group.barrier()

    for error in on_fake(fake, 2, another_size, timeout=5, kind=CopyGroup):
        assert str(error) == "rank 1 sent [[5, 'float64']], rank 0 wants [[4, 'float64']]"

    def nobody(group: CopyGroup) -> None:
        if group.rank == 0:
            group.exchange([], [(1, np.ones(4).view(Array))])

    found = on_fake(fake, 2, nobody, timeout=0.2, kind=CopyGroup)
    assert "rank 1 sent nothing for 'arrays from 1 to 0, message 1'" in str(found[0])


def test_devices_that_do_not_reach_each_other_use_nccl(fake: FakeNccl) -> None:
    runtime = groups._cupy().cuda.runtime
    assert copies.reach_each_other(runtime, [0, 1, 2])
    runtime.apart.add((2, 0))
    assert copies.reach_each_other(runtime, [0, 1]) and not copies.reach_each_other(runtime, [2, 0])
    said = "device 2 cannot access the memory of device 0, .*: transport='nccl' does"
    found = on_fake(fake, 3, lambda group: group.gather("there", 1), 1, kind=CopyGroup)
    assert isinstance(found[2], UnsupportedError) and re.match(said, str(found[2]))
    assert start.by_copies("copies", [2, 0]) and not start.by_copies("nccl", [0, 1])


@pytest.mark.parametrize("kind", [NcclGroup, CopyGroup])
@pytest.mark.parametrize("mesh", [Mesh(4, 4), Mesh(4, 2), Mesh(3, 1)], ids=str)
def test_nothing_is_read_before_it_came_or_changed_before_it_went(
    fake: FakeNccl, kind: Any, mesh: Mesh
) -> None:
    """Whole passes on streams that lag behind the host: the same bits as with messages at once."""

    class Lagging(kind):  # type: ignore[misc]
        namespace = "numpy"

        def prepare(self, sends: Any, receives: Any) -> Any:
            sends, receives = ([Message(*m) for m in some] for some in (sends, receives))
            for _, x, _ in receives:
                x[...] = np.nan  # until it comes
            self._stream.tasks.put(lambda: time.sleep(0.005))
            of_fake = [
                [m._replace(array=m.array.view(Array)) for m in some] for some in (sends, receives)
            ]
            return super().prepare(*of_fake)

    q, k = normal((1, 8, 24, 8), (1, 8, 24, 8))[:2]
    rows = Partition.zigzag(24, mesh.size)
    how = {"partition": "zigzag", "causal": True, "variant": "fa_tc", **asked_for(mesh)}

    def both(group: Any) -> Any:
        own = [rows.take(x, group.rank) for x in (q, k, k)]
        o, lse = distributed.parallel_attention(*own, group, return_lse=True, **how)
        backward = {n: x for n, x in how.items() if n != "variant"}
        found = distributed.parallel_attention_backward(o, *own, o, lse, group, **backward)
        return o, lse, *found

    at_once = distributed.run(both, mesh.size)
    for lagging, expected in zip(
        on_fake(fake, mesh.size, both, 20, kind=Lagging), at_once, strict=True
    ):
        assert not isinstance(lagging, BaseException), lagging
        for a, b in zip(lagging, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_error_of_nccl_is_watched(fake: FakeNccl) -> None:
    """Rank 1 sends nothing, and NCCL tells rank 1 alone of an error: all end with it."""
    fake.mute, fake.broken = {1}, {1}

    start = time.monotonic()
    found = on_fake(fake, 2, pass_on, timeout=15)
    assert time.monotonic() - start < 10
    for error in found:
        assert isinstance(error, RankError) and error.rank == 1
        assert "met an error of NCCL: NCCL_ERROR_SYSTEM_ERROR" in str(error)


def test_a_rank_that_sends_nothing_by_nccl_ends_all_within_the_timeout(fake: FakeNccl) -> None:
    fake.mute = {1}

    def one_way(group: NcclGroup) -> None:
        x, y = (np.ones(4).view(Array) for _ in range(2))
        other = 1 - group.rank
        group.exchange([(other, x)], [(other, y)])
        group.finish()

    start = time.monotonic()
    found = on_fake(fake, 2, one_way, timeout=0.4)
    assert time.monotonic() - start < 10
    assert isinstance(found[0], RankError) and "rank 0 waited longer than 0.4 s" in str(found[0])


def test_a_rank_that_fails_elsewhere_ends_those_that_wait_by_nccl(fake: FakeNccl) -> None:
    def call(group: NcclGroup) -> None:
        with group.failing_together("a call"):
            if group.rank == 1:
                raise ValueError("no")
            y = np.ones(4).view(Array)
            group.store = Silent(group.store)  # type: ignore[assignment]
            group.exchange([], [(1, y)])
            group.finish()

    found = on_fake(fake, 2, call, timeout=15)
    assert isinstance(found[1], ValueError)
    assert str(found[0]) == "rank 1 raised ValueError in a call: no"


class Silent:
    """A store that is no board: its ranks are processes, which do not wait for a launch."""

    def __init__(self, store: Any) -> None:
        self.fail, self.check = store.fail, store.check


@pytest.mark.filterwarnings("ignore::UserWarning")  # of CuPy, which says the same
def test_without_nccl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from cupy.cuda import nccl as of_cupy

    monkeypatch.setattr(of_cupy, "available", False)
    with pytest.raises(UnsupportedError, match="pip install nvidia-nccl-cu13"):
        nccl._nccl()
