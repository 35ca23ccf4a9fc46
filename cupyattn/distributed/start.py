"""Connect ranks: as threads of one process, by a TCP store, or by MPI."""

from __future__ import annotations

import operator
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cupyattn.distributed.copies import CopyGroup, reach_each_other
from cupyattn.distributed.group import TIMEOUT, Group, HostGroup
from cupyattn.distributed.nccl import NcclGroup
from cupyattn.distributed.secret import ADVICE, Handover, given, make
from cupyattn.distributed.store import Board, check_rank, check_timeout
from cupyattn.distributed.tcp import Address, TcpServer, TcpStore
from cupyattn.errors import RankError, raised, shown
from cupyattn.measure.device import device_missing

T = TypeVar("T")
TRANSPORTS = ("auto", "nccl", "copies")
#: Seconds between two looks at which ranks of this process have ended.
_LOOK = 0.5
#: Variables that launchers set for a process: rank, number of ranks, rank on its host.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
#: Default port of rank 0. Under Slurm the number of the job is added, so two jobs on a host use
#: different ports.
PORT, PORTS = 29400, 20000
#: Set by torchrun if its agent listens at ``MASTER_PORT``. The store of a group then takes a port
#: that follows from it, below the ports of outgoing connections (32768 and up).
OF_AGENT, AGENT_PORTS = "TORCHELASTIC_USE_AGENT_STORE", 3000
#: The highest port of TCP.
MOST_PORT = 2**16 - 1


def run(
    function: Callable[[Group], T],
    ranks: int | Sequence[int],
    *,
    transport: str = "auto",
    timeout: float = TIMEOUT,
) -> list[T]:
    """Call a function on every rank of a group in this process, each in a separate thread.

    Parameters
    ----------
    function : callable
        Takes a `Group`, which has ``rank`` and ``size``.
    ranks : int or sequence of int
        Number of ranks with NumPy arrays, or the numbers of CUDA devices, one for each rank. A
        rank's device is the current device of its thread.
    transport : {"auto", "nccl", "copies"}
        How arrays travel from device to device: by NCCL's kernels, or by the devices' copy engines,
        which do not slow down the computation. ``"auto"``: by copy engines if every device can
        access the memory of every other, else by NCCL.
    timeout : float
        Seconds that a rank waits for another before all of them raise.

    Returns
    -------
    list
        Results of the function, by rank.

    Raises
    ------
    Exception
        The first exception of the function. Ranks that wait for the failed rank end, too.
    RankError
        If a rank does not come to where the others wait for it.

    Examples
    --------
    >>> run(lambda group: group.gather("squares", group.rank**2), 3)[0]
    [0, 1, 4]
    """
    given_ranks: Any = ranks
    try:
        many = isinstance(ranks, Iterable)
        devices = list(map(operator.index, given_ranks)) if many else None
        size = operator.index(given_ranks) if devices is None else len(devices)
    except TypeError:
        raise TypeError(
            f"ranks must be how many there are, or the numbers of devices, got {shown(ranks)}"
        ) from None
    if size < 1:
        raise ValueError(f"a group has at least one rank, got {ranks!r}")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {transport!r}")
    timeout = check_timeout(timeout)
    board = Board(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def on_rank(rank: int) -> None:
        try:
            made: Group
            if devices is None:
                made = HostGroup(board, rank, size, timeout)
            else:
                of_devices = CopyGroup if by_copies(transport, devices) else NcclGroup
                made = of_devices(board, rank, size, devices[rank], timeout)
            with made as group, group.on_device():
                results[rank] = function(group)
        except BaseException as error:  # noqa: BLE001 - raised by the caller, below
            errors.append(error)
            if not isinstance(error, RankError):
                board.fail(rank, raised(error))

    threads = [threading.Thread(target=on_rank, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(timeout=_LOOK)
            if errors:  # other ranks see the failure when they wait for a rank
                for thread in threads:
                    thread.join(timeout=timeout)
                break
    except BaseException as interrupt:  # Ctrl-C: ranks would go on without their caller
        board.fail(0, raised(interrupt, " in the thread that called run"))
        raise
    # The original error says more than the news that another rank has failed.
    for error in sorted(errors, key=lambda error: isinstance(error, RankError)):
        raise error
    return [results[rank] for rank in range(size)]


def by_copies(transport: str, devices: Sequence[int]) -> bool:
    """Whether copy engines of these devices carry arrays, by the `transport` of `run`."""
    if transport != "auto":
        return transport == "copies"
    import cupy

    return reach_each_other(cupy.cuda.runtime, devices)


def connect(
    rank: int,
    size: int,
    address: str | Address,
    *,
    device: int | None = None,
    timeout: float = TIMEOUT,
    secret: str | None = None,
) -> Group:
    """Join a group of processes, on one host or several, by the store that rank 0 holds.

    Parameters
    ----------
    rank, size : int
        Number of this rank, and number of ranks.
    address : str or (str, int)
        ``"host:port"`` of rank 0, as all ranks reach it; for IPv6 ``"[::1]:29400"``. Rank 0 listens
        at this address alone.
    device : int, optional
        This rank's CUDA device, which becomes the current device. Its arrays travel by NCCL.
        Without a device, arrays are NumPy arrays.
    timeout : float
        Seconds that a rank waits for another before all of them raise.
    secret : str, optional
        The secret of the group, at least 16 characters, the same on all ranks. By default
        ``CUPYATTN_GROUP_SECRET`` or the content of ``CUPYATTN_GROUP_SECRET_FILE``. Without any of
        them rank 0 makes one, and leaves it in a private file under the cache folder for the other
        ranks.

    Returns
    -------
    Group
        Use it in a ``with`` block, or call its ``close`` at the end: a process that ends before
        has failed.

    Raises
    ------
    RankError
        If a rank does not come within the timeout, or has another secret.
    ValueError, OSError
        If the secret is too short, or its file is not private.
    """
    rank, size = check_rank(rank, size)
    timeout = check_timeout(timeout)
    where = _address(address)
    return _connect(rank, size, where, device, timeout, given(secret, os.environ))


def from_environment(
    *, device: int | str | None = "auto", timeout: float = TIMEOUT, environ: Any = os.environ
) -> Group:
    """Join the group of processes that a launcher started: Slurm's srun, torchrun, mpirun.

    Parameters
    ----------
    device : int, None or "auto"
        As for `connect`; ``"auto"``: the one of this process's number on its host, where there are
        devices.
    timeout : float
        As for `connect`.
    environ : mapping
        Variables of a launcher: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, or the variables of Slurm
        or Open MPI; ``MASTER_ADDR`` and ``MASTER_PORT``, without which rank 0 is on the first host
        of Slurm's job, or of this one where all ranks are here; and the secret of the group, as for
        `connect`.

    Returns
    -------
    Group

    Raises
    ------
    ValueError
        If no launcher has said anything.
    RankError
        As `connect`.
    """
    rank, size, local = _from_launcher(environ)
    device = _device(device, lambda: local)
    rank, size = check_rank(rank, size)
    timeout = check_timeout(timeout)
    return _connect(rank, size, rendezvous(environ), device, timeout, given(None, environ))


def from_mpi(
    comm: Any = None, *, device: int | str | None = "auto", timeout: float = TIMEOUT
) -> Group:
    """Join the group of the processes of an MPI communicator; needs mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        ``COMM_WORLD`` when omitted. It tells the ranks where rank 0's store is, and the secret that
        rank 0 has made. Nothing else travels by MPI, where a rank that has ended hangs the others.
    device, timeout
        As for `from_environment`.

    Returns
    -------
    Group

    Raises
    ------
    RankError
        As `connect`.
    """
    if comm is None:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    rank, size = int(comm.Get_rank()), int(comm.Get_size())
    timeout = check_timeout(timeout)
    host = socket.gethostname()
    server, told = None, None
    if rank == 0:
        secret = make()
        server = TcpServer(size, (host, 0), secret=secret)
        told = [*server.address, secret.decode()]
    *address, secret_text = comm.bcast(told, root=0)
    device = _device(device, lambda: comm.allgather(host)[:rank].count(host))
    host, port = address
    store = TcpStore(rank, (host, port), timeout, server, secret=secret_text.encode())
    return _of_processes(store, rank, size, device, timeout)


def rendezvous(environ: Mapping[str, str]) -> Address:
    """Return the address at which rank 0 listens, from a launcher's variables.

    Examples
    --------
    >>> rendezvous({"SLURM_JOB_NODELIST": "gpu[03-05,9],login", "SLURM_JOB_ID": "70123"})
    ('gpu03', 39523)
    """
    host = environ.get("MASTER_ADDR")
    if host is None and "SLURM_JOB_NODELIST" in environ:
        host = _first_host(environ["SLURM_JOB_NODELIST"])
    port = PORT + _number(environ, "SLURM_JOB_ID", 0) % PORTS
    port = _number(environ, "MASTER_PORT", port)
    if environ.get(OF_AGENT) == "True":
        port = PORT + port % AGENT_PORTS
    return _address((host or "localhost", port))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the number that a launcher's variable is, the default if it is not set."""
    said = environ.get(name, default)
    try:
        return int(said)
    except ValueError:
        raise ValueError(
            f"the environment variable {name} must be a number, got {shown(said)}"
        ) from None


def _address(address: Any) -> Address:
    """Return host and port, of a text or a pair; ValueError for anything else."""
    host: Any = None
    port: Any = None
    if isinstance(address, str):
        host, _, digits = address.rpartition(":")
        host = re.sub(r"^\[(.*)\]$", r"\1", host)  # [::1]:29400
        port = int(digits) if digits.isdecimal() else None
    elif isinstance(address, Sequence) and len(address) == 2:
        host, port = address
    if not (host and isinstance(host, str) and isinstance(port, int) and 0 <= port <= MOST_PORT):
        raise ValueError(
            f"address must be 'host:29400' or ('host', 29400), with a port of at most {MOST_PORT}, "
            f"got {shown(address)}"
        )
    return host, port


def _connect(
    rank: int, size: int, address: Address, device: int | None, timeout: float, known: bytes | None
) -> Group:
    """Return the group of this process by a secret that is known, or that rank 0 makes."""
    if rank:
        store = TcpStore(rank, address, timeout, secret=known or Handover(address))
        return _of_processes(store, rank, size, device, timeout)
    handover = Handover(address) if known is None and size > 1 else None
    secret = known or make()
    server = TcpServer(size, address, secret=secret)
    if handover is not None:
        try:
            handover.leave(secret)
        except OSError as error:
            server.close(0.0)
            raise OSError(f"cannot leave the other ranks a secret ({error}): {ADVICE}") from error
    try:
        store = TcpStore(rank, address, timeout, server, secret=secret)
        return _of_processes(store, rank, size, device, timeout)
    finally:
        if handover is not None:  # all ranks have joined, or never will
            handover.remove()


def _of_processes(
    store: TcpStore, rank: int, size: int, device: int | None, timeout: float
) -> Group:
    """Return the group of this process."""
    try:
        group: Group
        if device is None:
            group = HostGroup(store, rank, size, timeout)
        else:
            group = NcclGroup(store, rank, size, device, timeout)
        group.on_device().__enter__()  # for as long as the process lives
        return group
    except RankError:
        raise
    except BaseException as error:
        store.fail(rank, raised(error))
        raise


def _from_launcher(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, number of ranks, and rank on the host."""
    for rank, size, local in LAUNCHERS:
        if rank in environ and size in environ:
            own = _number(environ, rank, 0)
            return own, _number(environ, size, 0), _number(environ, local, own)
    known = " or ".join(f"{rank} and {size}" for rank, size, _ in LAUNCHERS)
    raise ValueError(
        f"no launcher says which rank this is: {known} must be set, or use connect(rank, size, ...)"
    )


def _device(device: int | str | None, local: Callable[[], int]) -> int | None:
    """Return a rank's device, as asked for or by the rank's number on its host."""
    if device == "auto":
        number = local()  # on all ranks, as it may ask them
        if device_missing():
            return None
        import cupy

        return number % int(cupy.cuda.runtime.getDeviceCount())
    if isinstance(device, str):
        raise ValueError(f"device must be a number, None or 'auto', got {device!r}")
    return device


def _first_host(nodes: str) -> str:
    """Return the first of Slurm's compressed list of hosts."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    if found is None:
        raise ValueError(f"SLURM_JOB_NODELIST names no host: {nodes!r}")
    return "".join(part or "" for part in found.groups())
