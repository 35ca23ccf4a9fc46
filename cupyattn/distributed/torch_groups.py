"""Groups on torch: a process group or a device mesh sends arrays, its store short messages.

There is no separate store or communicator: the members of torch's group are the members of this
group. NumPy arrays travel by gloo, CuPy arrays by NCCL on the communicator of the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from cupyattn.distributed import pitched
from cupyattn.distributed.group import TIMEOUT, Copies, DeviceGroup, Group, Message, Work
from cupyattn.distributed.mesh import Mesh
from cupyattn.distributed.model import H200_NCCL
from cupyattn.distributed.store import check_timeout
from cupyattn.distributed.torch_store import SOONEST, TorchStore
from cupyattn.errors import RankError, UnsupportedError, shown

#: Seconds between two looks for ranks that have failed, while arrays are waited for.
WATCH = 0.02
#: Seconds that a process which ends after a failure gives to a wait of gloo's that nothing ends.
ABANDONED_WAIT_SECONDS = 2.0
#: Tags of messages on hosts: so many of each group in turn, and of so many groups. Those below are
#: the caller's, and gloo's tags have 31 bits.
_TAGS, _GROUPS = 2**20, 2**11 - 1
#: Names of the axes of a mesh, outermost first.
AXES = ("ring", "ulysses")


def from_torch(
    group_or_mesh: Any = None,
    method: str | None = None,
    *,
    timeout: float | None = None,
    device: int | str | None = None,
) -> Group:
    """Return a group on an existing process group or device mesh of torch.

    Every rank of it calls this, equally often. Torch's group stays open when this one is closed.

    Parameters
    ----------
    group_or_mesh : torch.distributed.ProcessGroup or DeviceMesh, optional
        The default process group when omitted. Of a mesh with two axes the first is the ring and
        the second exchanges heads, as ``("ring", "ulysses")`` of diffusers.
    method : {"ring", "ulysses"}, optional
        What ``method="auto"`` takes on this group. When omitted, the name of a mesh's only axis
        says it; with any other name, and for a process group, the model of costs does.
    timeout : float, optional
        Seconds that a rank waits for another before it gives all of them up. When omitted, 120 or
        the timeout of torch's group, whichever is less.
    device : int or "cpu", optional
        Number of this rank's CUDA device, or ``"cpu"`` for NumPy arrays. When omitted, torch's
        current device if torch's group has a backend for CUDA devices, otherwise ``"cpu"``.

    Returns
    -------
    Group
        Its ranks have their numbers in torch's group. In a mesh with two axes the number is
        ``ring * ulysses_size + ulysses``.

    Raises
    ------
    UnsupportedError
        If torch is missing, has no process group yet, or one that carries no such arrays.
    TypeError, ValueError
        For another object, as of a rank outside the group, and for meshes with other axes.
    RankError
        If a rank does not come within the timeout.

    Notes
    -----
    Trust equals that in torch's group, whose store and connections have no
    authentication. Where a device waits for arrays of a rank that has failed, the process group is
    aborted.
    """
    if timeout is not None:
        check_timeout(timeout)
    if device not in (None, "cpu") and (not isinstance(device, int) or isinstance(device, bool)):
        raise TypeError(
            f"device must be the number of a CUDA device or 'cpu', got {shown(device)}: give "
            "device=0 for cuda:0"
        )
    dist = _distributed()
    if method not in (None, *AXES):
        raise ValueError(f"method must be 'ring', 'ulysses' or None, got {shown(method)}")
    process_group, mesh = _resolved(dist, group_or_mesh, method)
    return on_process_group(process_group, mesh, timeout, device)


def on_process_group(
    process_group: Any,
    mesh: Mesh | None,
    timeout: float | None = None,
    device: int | str | None = None,
) -> Group:
    """Return a group on a process group, whose ``method="auto"`` takes a mesh.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup
    mesh : Mesh or None
        None: the model of costs chooses.
    timeout, device
        As for `from_torch`.
    """
    rank = process_group.rank()
    place = _place(process_group) if device is None else device
    if timeout is None:
        kind = _torch().device("cpu" if place == "cpu" else "cuda")
        own = process_group._get_backend(kind).options._timeout.total_seconds()
        timeout = min(TIMEOUT, float(own))
    store = TorchStore(process_group, rank, process_group.size())
    made: Group
    if place == "cpu":
        made = TorchHostGroup(store, rank, process_group, timeout)
    else:
        made = TorchDeviceGroup(store, rank, process_group, int(place), timeout)
    made.mesh = mesh
    return made


class TorchHostGroup(Group):
    """Ranks whose arrays are NumPy's; they travel by the process group's gloo.

    Parameters
    ----------
    store : TorchStore
    rank : int
    process_group : torch.distributed.ProcessGroup
    timeout
        As for `Group`.
    """

    namespace = "numpy"

    def __init__(
        self, store: TorchStore, rank: int, process_group: Any, timeout: float = TIMEOUT
    ) -> None:
        super().__init__(store, rank, store.size, timeout)
        self._process_group = weakref.ref(process_group)
        self._first_tag = (1 + store.number % _GROUPS) * _TAGS
        self._messages: Counter[tuple[int, int]] = Counter()

    @property
    def process_group(self) -> Any:
        """The process group, as long as torch has it."""
        return _alive(self._process_group)

    def _prepare(self, sends: list[Message], receives: list[Message], own: Copies) -> Work:
        return _OnHost(self, sends, receives, own)

    def tag(self, source: int, target: int) -> int:
        """Return the tag of the next message from one rank to another."""
        self._messages[source, target] += 1
        return self._first_tag + self._messages[source, target] % _TAGS

    def finish(self) -> None:
        """Raise if a rank has failed. All messages that were waited for have been exchanged."""
        self.store.check()


class _OnHost:
    """Arrays that gloo sends, and arrays that it fills."""

    def __init__(
        self, group: TorchHostGroup, sends: list[Message], receives: list[Message], own: Copies
    ) -> None:
        self._group, self._sends, self._receives, self._own = group, sends, receives, own
        self._begun = False
        self._works: list[tuple[int, Any]] = []
        self._buffers: list[Any] = []

    def begin(self) -> None:
        """Send them off, unless they have been."""
        if self._begun:
            return
        import torch

        self._begun, group = True, self._group
        for target, source in self._own:
            target.array[...] = source.array
        for peer, array, _ in self._receives:
            buffer = torch.empty(array.nbytes, dtype=torch.uint8)
            tag = group.tag(peer, group.rank)
            work = self._tried(peer, group.process_group.recv, [buffer], peer, tag)
            self._works.append((peer, work))
            self._buffers.append(buffer)
        for peer, array, _ in self._sends:
            raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
            tag = group.tag(group.rank, peer)
            work = self._tried(peer, group.process_group.send, [raw], peer, tag)
            self._works.append((peer, work))

    def wait(self) -> None:
        """Fill the arrays."""
        self.begin()
        works, self._works = self._works, []
        if works:
            self._wait_for(works)
        for (_, array, _), buffer in zip(self._receives, self._buffers, strict=True):
            array[...] = np.frombuffer(buffer.numpy(), array.dtype).reshape(array.shape)
        self._receives, self._buffers, self._sends, self._own = [], [], [], []

    def _wait_for(self, works: list[tuple[int, Any]]) -> None:
        """Wait in another thread, because a wait of gloo cannot be ended if a rank has failed."""
        group, done = self._group, threading.Event()
        trouble: list[tuple[int, str]] = []
        limit = timedelta(seconds=group.timeout)

        def wait() -> None:
            for peer, work in works:
                try:
                    work.wait(limit)
                except RuntimeError as error:
                    trouble.append((peer, str(error)))
                    break
            done.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while not done.wait(WATCH):
            try:
                group.store.check()
            except RankError:
                # NOTE: a thread that leaves C++ while the interpreter ends aborts the process.
                atexit.register(thread.join, ABANDONED_WAIT_SECONDS)
                raise
        thread.join()
        for peer, said in trouble:
            self._end(peer, said)

    def _tried(self, peer: int, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            self._end(peer, str(error))

    def _end(self, peer: int, said: str) -> None:
        """End all ranks, with the failure that is already known, if any."""
        group, cause = self._group, "ended: its connection closed"
        if "imed out" in said:
            cause = f"sent nothing within {group.timeout:g} s"
        group.store.fail(peer, cause)
        group.store.check()


class TorchDeviceGroup(DeviceGroup):
    """Ranks that are CUDA devices; arrays travel by the process group's NCCL.

    Parameters
    ----------
    store : TorchStore
    rank : int
    process_group : torch.distributed.ProcessGroup
    device : int
        This rank's.
    timeout
        As for `Group`.
    """

    machine = H200_NCCL

    def __init__(
        self,
        store: TorchStore,
        rank: int,
        process_group: Any,
        device: int,
        timeout: float = TIMEOUT,
    ) -> None:
        self._process_group, self._words = weakref.ref(process_group), store
        self._torch = _torch()
        super().__init__(store, rank, store.size, device, timeout)
        # NOTE: all ranks make the communicator of the process group here, if it has none yet.
        # Messages between two of them would wait for the others.
        with self._torch.cuda.device(device):
            first = self._torch.zeros(1, device="cuda")
            self._torch.distributed.all_reduce(first, group=process_group)

    @property
    def process_group(self) -> Any:
        """The process group, as long as torch has it."""
        return _alive(self._process_group)

    def _prepare(self, sends: list[Message], receives: list[Message], own: Copies) -> Work:
        dist = self._torch.distributed
        with self.on_device(), self.on_stream():
            # NOTE: before the arrays of others. On one device a copy may be a kernel, which would
            # wait behind them for multiprocessors that the computation has.
            pitched.copy_all(self._cupy.cuda, own)
            outgoing, incoming = ([self._whole(m) for m in some] for some in (sends, receives))
            apart = [pair for pair in zip(outgoing, sends, strict=True) if pair[0] is not pair[1]]
            pitched.copy_all(self._cupy.cuda, apart)
            operations = [
                dist.P2POp(
                    way, self._as_bytes(m.array), group=self.process_group, group_peer=m.rank
                )
                for way, messages in ((dist.isend, outgoing), (dist.irecv, incoming))
                for m in messages
            ]
            try:
                works = dist.batch_isend_irecv(operations) if operations else []
            except RuntimeError as error:
                self.abort(f"met an error of NCCL: {error}")
                raise
        pairs = zip(receives, incoming, strict=True)
        arriving = [(m, whole) for m, whole in pairs if whole is not m]
        return _OnDevice(self, works, [*outgoing, *incoming, *sends, *receives], arriving)

    @property
    def cuda(self) -> Any:
        """CuPy's module of this name."""
        return self._cupy.cuda

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch's current stream is CuPy's."""
        cuda, handle = self._torch.cuda, self._cupy.cuda.get_current_stream().ptr
        # NOTE: torch's ExternalStream turns the null stream into a new stream, which waits for
        # nothing.
        stream = (
            cuda.ExternalStream(handle, self.device) if handle else cuda.default_stream(self.device)
        )
        context: contextlib.AbstractContextManager[Any] = cuda.stream(stream)
        return context

    def _whole(self, message: Message) -> Message:
        """Return a message with a contiguous array: the message itself if its array is contiguous.

        Heads are at a pitch. Each message of torch costs host time, and a copy is one call.
        """
        x = message.array
        if x.flags.c_contiguous:
            return message
        return message._replace(array=self._cupy.empty(x.shape, x.dtype))

    def _as_bytes(self, x: Any) -> Any:
        """Return an array's memory as a tensor."""
        return self._torch.from_dlpack(x.reshape(-1).view(np.uint8))

    def finish(self) -> None:
        """Wait on the host until everything has been exchanged; raise where that failed."""
        end = time.monotonic() + self.timeout
        look = time.monotonic() + WATCH
        with self.on_device():
            done = self._cupy.cuda.Event(disable_timing=True)
            done.record()
            try:
                while not done.done:
                    if time.monotonic() > look:
                        self.check_until(end)
                        look = time.monotonic() + WATCH
                    time.sleep(SOONEST)
                self.store.check()
            except RankError as error:
                self.abandon(error)
                raise

    def _gather(self, what: str, own: bytes) -> list[Any]:
        try:
            return super()._gather(what, own)
        except RankError as error:
            if self._words.has_failed:  # and its arrays may be waited for on this device
                self.abandon(error)
            raise

    def abort(self, cause: str) -> None:
        """End all ranks with a `RankError` that names this one and the cause."""
        super().abort(cause)
        self.abandon(RankError(self.rank, cause))

    def abandon(self, error: RankError) -> None:
        """Abort the process group, which ends every wait of this rank's device."""
        super().abandon(error)
        with contextlib.suppress(RuntimeError):
            self.process_group.abort()


class _OnDevice:
    """Messages on torch's stream of NCCL, and arrays to be filled with what arrives."""

    def __init__(
        self, group: TorchDeviceGroup, works: Sequence[Any], held: list[Message], arriving: Copies
    ) -> None:
        self._group, self._works, self._held, self._arriving = group, works, held, arriving

    def begin(self) -> None:
        """Do nothing: the messages are already in flight."""

    def wait(self) -> None:
        """Let the current stream wait."""
        group = self._group
        with group.on_device(), group.on_stream():
            for work in self._works:
                work.wait()
            pitched.copy_all(group.cuda, self._arriving)
        self._works, self._held, self._arriving = [], [], []


def _alive(reference: Any) -> Any:
    """Return a process group, which ends with its last reference outside of our groups.

    A process group that outlives ``destroy_process_group`` would run threads while the interpreter
    ends.
    """
    process_group = reference()
    if process_group is None:
        raise UnsupportedError(
            "torch's process group was destroyed: call from_torch on the new one"
        )
    return process_group


def _resolved(dist: Any, given: Any, method: str | None) -> tuple[Any, Mesh | None]:
    """Return the process group, and the mesh that axes or the method ask for."""
    if isinstance(given, dist.ProcessGroup):
        return given, _mesh_of(given.size(), method)
    if not dist.is_initialized():
        raise UnsupportedError(
            "torch has no process group yet: call torch.distributed.init_process_group() first"
        )
    if given is None:
        return dist.group.WORLD, _mesh_of(dist.get_world_size(), method)
    if not isinstance(given, dist.device_mesh.DeviceMesh):
        raise TypeError(
            "from_torch takes a torch.distributed.ProcessGroup, a DeviceMesh, or None for the "
            f"default process group, got {shown(given)}"
        )
    names = tuple(given.mesh_dim_names or (AXES if given.ndim == 2 else (None,)))
    if given.ndim == 1:
        name = names[0]
        if method is not None and name in AXES and name != method:
            raise ValueError(f"the axis of the mesh is {name!r}, method asks for {method!r}")
        chosen = method or (name if name in AXES else None)
        return given.get_group(), _mesh_of(given.size(), chosen)
    if given.ndim != 2 or names != AXES or method is not None:
        raise ValueError(
            "a mesh must have one axis, or the two axes ('ring', 'ulysses') in this order and no "
            f"method, got axes {given.mesh_dim_names} and method={method!r}: give a part of it, as "
            "mesh['ring', 'ulysses']"
        )
    mesh = Mesh(given.size(), given.size(1))
    everyone = list(range(dist.get_world_size()))
    if given.mesh.flatten().tolist() == everyone:
        return dist.group.WORLD, mesh
    return given._flatten().get_group(), mesh


def _mesh_of(size: int, method: str | None) -> Mesh | None:
    return None if method is None else Mesh(size, 1 if method == "ring" else size)


def _place(process_group: Any) -> int | str:
    """Return the CUDA device of this rank, or "cpu" if torch's group carries host memory alone."""
    torch = _torch()
    kinds = {device.type for device in process_group._device_types}
    # NOTE: gloo claims to carry device arrays, but copies them by way of the host.
    by_nccl = "cuda" in kinds and "nccl" in process_group._get_backend(torch.device("cuda")).name()
    if by_nccl and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    if "cpu" not in kinds:
        raise UnsupportedError(
            f"the process group carries arrays of {sorted(kinds)}: NumPy arrays need one for 'cpu' "
            "(gloo), CuPy arrays one for 'cuda' (nccl)"
        )
    return "cpu"


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            "from_torch needs torch (pip install torch): distributed.from_environment starts a "
            "group without it"
        ) from error
    return torch


def _distributed() -> Any:
    dist = _torch().distributed
    if not dist.is_available():
        raise UnsupportedError("this torch was built without torch.distributed: install another")
    return dist
