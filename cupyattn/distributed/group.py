"""Groups of ranks: the interface to send, to receive and to detect failures.

The algorithms use `Group`. `HostGroup` sends NumPy arrays through the ranks' store, with the same
order, checks and failures as `cupyattn.distributed.nccl.NcclGroup`, which sends CuPy arrays.
"""

from __future__ import annotations

import abc
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from cupyattn.arrays.interchange import device_of
from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.mesh import Mesh
from cupyattn.distributed.model import H200, Machine
from cupyattn.distributed.store import Mailbox, Store, check_rank, check_timeout
from cupyattn.errors import RankError, raised, shown
from cupyattn.runtime.recent import Recent

#: A kind of group.
Own = TypeVar("Own", bound="Group")
#: Seconds that a rank waits for another before it gives all of them up.
TIMEOUT = 120.0
#: Calls on which all ranks have agreed that a group keeps.
MOST = 256


class Message(NamedTuple):
    """An array to be sent to a rank, or to be filled with a rank's message.

    Parameters
    ----------
    rank : int
        The other rank. A message to the rank itself is a copy, made in order with the others.
    array : array
    outer : int
        Number of leading axes that may have any strides; the rest of the array is contiguous. Both
        sides must have the same number and the same shape.
    """

    rank: int
    array: Any
    outer: int = 0

    @property
    def pieces(self) -> Iterator[Any]:
        """The contiguous pieces, in order."""
        return (self.array[at] for at in np.ndindex(*self.array.shape[: self.outer]))


#: Messages of a rank to itself: target and source.
Copies = list[tuple[Message, Message]]


class Work(Protocol):
    """Messages on their way, or about to be."""

    def begin(self) -> None:
        """Send them off, unless they have been."""

    def wait(self) -> None:
        """Order later computations of the caller after the arrival of the received arrays."""


class Group(abc.ABC):
    """Ranks that compute together, as one of them sees it.

    Parameters
    ----------
    store : Store
        The board that the ranks share.
    rank, size : int
        Number of this rank, and number of ranks.
    timeout : float
        Seconds that a rank waits for another before it gives all of them up.

    Attributes
    ----------
    bytes_sent : int
        Bytes that this rank has sent to others so far.
    hosts : tuple of str
        Name of the host of every rank.
    namespace : {"numpy", "cupy"}
        Library of the exchanged arrays.

    Raises
    ------
    RankError
        If a rank does not come within the timeout.
    """

    namespace: ClassVar[str]
    #: Rates of the devices and of the transport, for the model of costs.
    machine: ClassVar[Machine] = H200
    #: Mesh for ``method="auto"``. None: the fastest mesh by the model of costs.
    mesh: Mesh | None = None

    def __init__(self, store: Store, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        self.rank, self.size = check_rank(rank, size)
        self.store, self.timeout = store, check_timeout(timeout)
        self.bytes_sent = 0
        #: Calls on which all ranks have agreed: see `cupyattn.distributed.agreement.agree`.
        self.agreed = Recent(MOST)
        self._calls, self._closed = 0, False
        self.hosts: tuple[str, ...] = tuple(self.gather("hosts", socket.gethostname()))

    # ---- words -----------------------------------------------------------------------------------

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return the value of every rank, by rank.

        Parameters
        ----------
        what : str
            Name of the question, for the error message if a rank does not answer.
        value : object
            A value that JSON can hold. It is returned as JSON decodes it.

        Raises
        ------
        RankError
            If a rank has failed, or does not answer within the timeout.
        """
        return self._gather(what, _written(what, value))

    def _gather(self, what: str, own: bytes) -> list[Any]:
        """Return the values of all ranks; `own` is the encoded value of this rank."""
        if self._closed:
            raise ValueError(f"{what} on a group that is closed: start another one")
        key, self._calls = str(self._calls), self._calls + 1
        about = f"{what}, call {key}"
        found = self.store.gather(key, self.rank, own, self.timeout, about)
        said = [_said(rank, x, about) for rank, x in enumerate(found)]
        for rank, (asked, _) in enumerate(said):
            if asked != said[0][0]:
                raise RankError(rank, f"called {asked}, rank 0 called {said[0][0]}")
        return [x for _, x in said]

    def agree(self, what: str, facts: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Compare facts between all ranks, and raise on all ranks if they do not match.

        Parameters
        ----------
        what : str
            The call, for messages.
        facts : callable
            Returns values that JSON can hold. Values under ``"same"`` must be equal on all ranks.
            An exception of it is raised here. All other ranks raise a `RankError` that names it,
            and may then go on to their next call together.

        Returns
        -------
        list of dict
            Facts of the ranks, by rank.

        Raises
        ------
        RankError
            If ranks differ in a value under ``"same"``. The message names rank, name and values.
        """
        try:
            own = _written(what, facts())
        except Exception as error:
            self.gather(what, {"error": raised(error)})
            raise
        said: list[dict[str, Any]] = self._gather(what, own)
        for rank, of_rank in enumerate(said):
            if "error" in of_rank:
                raise RankError(rank, f"{of_rank['error']} (in {what})")
        for rank, of_rank in enumerate(said):
            for name, value in said[0]["same"].items():
                other = of_rank["same"].get(name)
                if other != value:
                    raise RankError(
                        rank,
                        f"called {what} with {name}={_short(other)}, rank 0 with "
                        f"{name}={_short(value)}: give all ranks the same {name}",
                    )
        return said

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.gather("barrier", None)

    @contextlib.contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """Let an error within end every rank, and report this rank's exception to the others."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self.abort(raised(error, f" in {what}"))
            raise

    def abort(self, cause: str) -> None:
        """End all ranks with a `RankError` that names this one and the cause.

        Parameters
        ----------
        cause : str
            Words that follow ``"rank 3"``.
        """
        self.store.fail(self.rank, cause)

    def check_until(self, end: float) -> None:
        """Raise if a rank has failed. Past the time `end`, this rank fails: it has waited too
        long."""
        if time.monotonic() > end:
            late = f"waited longer than {self.timeout:g} s for arrays of others"
            self.store.fail(self.rank, late)
        self.store.check()

    # ---- arrays ----------------------------------------------------------------------------------

    def check_array(self, name: str, array: Any) -> None:
        """Raise for an array that this rank cannot exchange.

        Parameters
        ----------
        name : str
            Name of the array in the caller's arguments.
        array : numpy.ndarray or cupy.ndarray

        Raises
        ------
        TypeError
            If it is of another library than those of the group.
        ValueError
            If it lies on another device than this rank's.
        """
        kind = array_namespace(array).__name__
        if kind != self.namespace:
            raise TypeError(f"this group exchanges {self.namespace} arrays, got {kind} arrays")

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> Work:
        """Begin to send and to receive arrays, all at once.

        Parameters
        ----------
        sends, receives : sequence of Message or (rank, array)
            Arrays that are contiguous except for the outer axes of their message. They must not
            change until the work was waited for. Between two ranks messages keep their order. Both
            sides must name every message, also messages without elements, which do not travel.

        Returns
        -------
        Work
            Holds the arrays until it was waited for.
        """
        work = self.prepare(sends, receives)
        work.begin()
        return work

    def prepare(self, sends: Sequence[Any], receives: Sequence[Any]) -> Work:
        """Get ready to exchange arrays beside a computation that is launched first.

        Parameters
        ----------
        sends, receives
            As for `exchange`.

        Returns
        -------
        Work
            Waits for all work launched so far, and for no later work before it begins.

        Notes
        -----
        Receiving arrays must have been allocated before. Memory pools reuse memory in the order of
        a stream. An array that is allocated after the computation may be its scratch memory, for
        which the exchange does not wait.
        """
        sends, receives = ([Message(*m) for m in some] for some in (sends, receives))
        for peer, array, outer in (*sends, *receives):
            if not 0 <= peer < self.size:
                raise ValueError(f"rank {self.rank} of {self.size} sends nothing to rank {peer}")
            if not _is_contiguous_inside(array, outer):
                raise ValueError(
                    f"only contiguous arrays travel, got strides {array.strides} with {outer} outer"
                )
        sends, receives = ([m for m in some if m.array.size] for some in (sends, receives))
        own = [[m for m in some if m.rank == self.rank] for some in (receives, sends)]
        shapes = [[m.array.shape for m in some] for some in own]
        if shapes[0] != shapes[1]:
            raise ValueError(f"rank {self.rank} sends itself {shapes[1]}, wants {shapes[0]}")
        sends, receives = ([m for m in some if m.rank != self.rank] for some in (sends, receives))
        self.bytes_sent += sum(int(m.array.nbytes) for m in sends)
        return self._prepare(sends, receives, list(zip(*own, strict=True)))

    @abc.abstractmethod
    def _prepare(self, sends: list[Message], receives: list[Message], own: Copies) -> Work:
        """Get ready to exchange messages that were checked, and for copies from `sends` to
        `receives` of this rank itself."""

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which new arrays are on this rank's device."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait on the host until everything has been exchanged; raise if that failed."""

    def close(self) -> None:
        """Leave the group without an error once every rank has called this. Later calls do
        nothing."""
        if self._closed:
            return
        self.barrier()
        self._closed = True
        self.agreed.clear()
        self.store.leave()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the group. If an error leaves the block, end all ranks with it."""
        if error is None:
            self.close()
            return
        if not isinstance(error, RankError):
            error = RankError(self.rank, raised(error))
            self.store.fail(error.rank, error.cause)
        self.abandon(error)

    def abandon(self, error: RankError) -> None:
        """Drop all exchanges and all state of this rank, because the group has failed."""
        self.agreed.clear()


def check_group(group: Any) -> None:
    """Raise TypeError for an object that is not a `Group`."""
    if not isinstance(group, Group):
        raise TypeError(
            f"group must be a group of cupyattn.distributed, got {shown(group)}: from_torch makes "
            "one of a process group or a mesh, run and connect make others"
        )


class DeviceGroup(Group):
    """Ranks that are CUDA devices, as the thread of one of them sees them.

    Parameters
    ----------
    store, rank, size, timeout
        As for `Group`.
    device : int
        This rank's.
    """

    namespace = "cupy"

    def __init__(
        self, store: Store, rank: int, size: int, device: int, timeout: float = TIMEOUT
    ) -> None:
        super().__init__(store, rank, size, timeout)
        self._cupy, self.device = _cupy(), device

    def check_array(self, name: str, array: Any) -> None:
        """Raise for an array that this rank cannot exchange, as `Group.check_array` does."""
        super().check_array(name, array)
        if (place := device_of(array)) not in (self.device, -1):
            raise ValueError(
                f"{name} must lie on device {self.device}, the device of rank {self.rank}, got "
                "device "
                f"{place}: make it in 'with group.on_device():'"
            )

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this rank's device is the current one."""
        device: contextlib.AbstractContextManager[Any] = self._cupy.cuda.Device(self.device)
        return device


class HostGroup(Group):
    """Ranks whose arrays are NumPy's; they travel through the store.

    For machines without a device: every algorithm of `cupyattn.distributed` runs on it.

    Parameters
    ----------
    store, rank, size, timeout
        As for `Group`.
    """

    namespace = "numpy"
    store: Mailbox

    def __init__(self, store: Mailbox, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        super().__init__(store, rank, size, timeout)
        self._messages: Counter[str] = Counter()

    def _prepare(self, sends: list[Message], receives: list[Message], own: Copies) -> Work:
        return _OfHost(self, sends, receives, own)

    def key_of_next(self, source: int, target: int) -> str:
        """Return the key of the next message from one rank to another."""
        pair = f"{source} to {target}"
        self._messages[pair] += 1
        return f"{pair}, message {self._messages[pair]}"

    def finish(self) -> None:
        """Raise if a rank has failed. All messages that were waited for have been exchanged."""
        self.store.check()


class _OfHost:
    """Arrays that are put into the store, and arrays that are filled from it."""

    def __init__(
        self, group: HostGroup, sends: list[Message], receives: list[Message], own: Copies
    ) -> None:
        self._group, self._sends, self._receives, self._own = group, sends, receives, own
        self._begun = False
        self._keys: list[str] = []

    def begin(self) -> None:
        """Put the sent arrays into the store, unless this has been done."""
        if self._begun:
            return
        self._begun, group = True, self._group
        for peer, array, _ in self._sends:
            header = json.dumps([list(array.shape), array.dtype.name]).encode()
            group.store.put(group.key_of_next(group.rank, peer), header + b"\n" + array.tobytes())
        for target, source in self._own:
            target.array[...] = source.array
        # NOTE: messages are numbered in the order of requests; waits may come in another order.
        self._keys = [group.key_of_next(message.rank, group.rank) for message in self._receives]

    def wait(self) -> None:
        """Fill the arrays."""
        self.begin()
        group, receives, keys = self._group, self._receives, self._keys
        self._receives, self._keys = [], []
        for (peer, array, _), key in zip(receives, keys, strict=True):
            header, _, raw = group.store.take(key, peer, group.timeout).partition(b"\n")
            wanted = json.dumps([list(array.shape), array.dtype.name])
            if header != wanted.encode() or len(raw) != array.nbytes:
                sent = f"{header[:200].decode(errors='replace')} in {len(raw)} bytes"
                group.store.fail(peer, f"sent {sent}, rank {group.rank} wants {wanted}")
                group.store.check()
            array[...] = np.frombuffer(raw, array.dtype).reshape(array.shape)


def _is_contiguous_inside(array: Any, outer: int) -> bool:
    """Whether the elements at each index of the outer axes are contiguous."""
    if not array.size:
        return True
    length = array.itemsize
    for extent, stride in zip(array.shape[outer:][::-1], array.strides[outer:][::-1], strict=True):
        if extent > 1 and stride != length:
            return False
        length *= extent
    return True


def _cupy() -> Any:
    import cupy

    return cupy


def _written(what: str, value: Any) -> bytes:
    """Return the name of a call and a value as the bytes that a rank leaves."""
    return json.dumps([what, value]).encode()


def _said(rank: int, said: bytes, about: str) -> tuple[str, Any]:
    """Return the name of a call and a value from the bytes that a rank left."""
    try:
        asked, value = json.loads(said)
    except (ValueError, TypeError, RecursionError) as error:
        raise RankError(rank, f"left {said[:40]!r} for {about!r}: not written here") from error
    return asked, value


def _short(value: Any) -> str:
    return json.dumps(value)[:160]
