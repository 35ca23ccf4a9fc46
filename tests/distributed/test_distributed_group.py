"""Ranks find each other, and one that ends, is late or differs ends all of them with its name."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import distributed
from cupyattn.distributed import (
    HostGroup,
    RankError,
)
from cupyattn.distributed.frames import Channel
from cupyattn.distributed.start import rendezvous
from cupyattn.distributed.store import Board
from cupyattn.distributed.tcp import TcpServer, TcpStore
from tests.support.ranks import free_port, in_threads

ROOT = Path(__file__).parents[2]
SECRET = b"a secret of these tests"


# ---- threads -------------------------------------------------------------------------------------


def test_messages_between_two_ranks_keep_their_order() -> None:
    def on_rank(group: Any) -> Any:
        other = 1 - group.rank
        sent = [np.full((2, 3), 10 * group.rank + i, np.float32) for i in range(3)]
        found = [np.empty((2, 3), np.float32) for _ in range(3)]
        empty = np.empty((0, 3), np.float32)
        work = group.exchange(
            [(other, x) for x in (sent[0], empty, *sent[1:])],
            [(other, x) for x in (*found, empty)],
        )
        work.wait()
        group.finish()
        assert group.bytes_sent == 3 * 24
        return [int(x[0, 0]) for x in found]

    assert distributed.run(on_rank, 2) == [[10, 11, 12], [0, 1, 2]]


def test_messages_may_be_waited_for_in_another_order() -> None:
    def on_rank(group: Any) -> Any:
        other = 1 - group.rank
        found = [np.empty(i + 1, np.float32) for i in range(2)]
        works = [group.exchange([(other, np.full_like(x, x.size))], [(other, x)]) for x in found]
        for work in reversed(works):
            work.wait()
        return [x.tolist() for x in found]

    assert distributed.run(on_rank, 2) == [[[1.0], [2.0, 2.0]]] * 2


def test_a_message_of_another_shape_ends_all_ranks() -> None:
    def on_rank(group: Any) -> None:
        x = np.ones((2, 3 + group.rank), np.float32)
        y = np.ones((2, 3), np.float32)
        others = [rank for rank in range(3) if rank != group.rank]
        group.exchange([(rank, x) for rank in others], [(rank, y) for rank in others]).wait()

    with pytest.raises(RankError, match=r"rank \d sent \[\[2, \d\], .*rank \d wants \[\[2, 3\]"):
        distributed.run(on_rank, 3, timeout=5)


def test_what_cannot_travel_is_refused() -> None:
    group = distributed.run(lambda group: group, 1)[0]
    x = np.ones((4, 4))
    with pytest.raises(ValueError, match="rank 0 of 1 sends nothing to rank 1"):
        group.exchange([(1, x)], [])
    with pytest.raises(ValueError, match=r"rank 0 sends itself \[\], wants \[\(4, 4\)\]"):
        group.exchange([], [(0, x)])
    with pytest.raises(ValueError, match="rank must be between 0 and size - 1, got rank=2 size=2"):
        HostGroup(Board(2), 2, 2)
    with pytest.raises(ValueError, match="timeout must be positive"):
        HostGroup(Board(1), 0, 1, timeout=0)
    with pytest.raises(ValueError, match="at least one rank"):
        distributed.run(lambda group: None, 0)
    with pytest.raises(ValueError, match="only contiguous arrays travel"):
        distributed.run(lambda g: g.exchange([(1 - g.rank, x[:, ::2])], []), 2)


def test_a_rank_that_does_not_come_is_named_within_the_timeout() -> None:
    def on_rank(group: Any) -> None:
        if group.rank == 2:
            time.sleep(0.6)
        group.gather("lengths", group.rank)

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 did not come to 'lengths, .* within 0.2 s") as e:
        distributed.run(on_rank, 3, timeout=0.2)
    assert e.value.rank == 2 and time.monotonic() - start < 5


def test_a_rank_that_sends_nothing_is_named_within_the_timeout() -> None:
    def on_rank(group: Any) -> None:
        if group.rank == 0:
            group.exchange([], [(1, np.empty(3))]).wait()
        else:
            time.sleep(0.6)

    with pytest.raises(RankError, match="rank 1 sent nothing for '1 to 0, message 1' within 0.2 s"):
        distributed.run(on_rank, 2, timeout=0.2)


def test_an_error_of_a_rank_is_raised_and_ends_the_others() -> None:
    seen: dict[int, RankError] = {}

    def on_rank(group: Any) -> None:
        if group.rank == 1:
            raise KeyError("lost")
        try:
            group.barrier()
        except RankError as error:
            seen[group.rank] = error
            raise

    with pytest.raises(KeyError, match="lost"):
        distributed.run(on_rank, 3)
    assert set(seen) == {0, 2}
    assert {str(error) for error in seen.values()} == {"rank 1 raised KeyError: 'lost'"}


def test_ctrl_c_in_the_caller_of_run_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    met, last = threading.Event(), time.monotonic() + 10

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            met.wait(10)
            raise KeyboardInterrupt

    def on_rank(group: Any) -> None:
        try:
            while time.monotonic() < last:
                group.barrier()
                met.set()
                time.sleep(0.001)  # instead of work: two busy threads would keep the lock
        except RankError as error:
            ended.append(str(error))
            raise

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading, "Thread", Interrupted)
        distributed.run(on_rank, 2)
    while len(ended) < 2 and time.monotonic() < last:
        time.sleep(0.01)
    assert set(ended) == {"rank 0 raised KeyboardInterrupt in the thread that called run"}


def test_an_error_that_cannot_be_written_ends_the_others() -> None:
    class Unwritable(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    seen: list[str] = []

    def on_rank(group: Any) -> None:
        if group.rank == 1:
            raise Unwritable
        try:
            group.barrier()
        except RankError as error:
            seen.append(str(error))

    with pytest.raises(Unwritable):
        distributed.run(on_rank, 2, timeout=5)
    assert seen == ["rank 1 raised Unwritable: (its text raises ZeroDivisionError)"]


def test_a_closed_group_is_closed_once_and_refuses_calls() -> None:
    group = distributed.run(lambda group: group, 1)[0]
    group.close()
    with pytest.raises(ValueError, match="barrier on a group that is closed: start another one"):
        group.barrier()


def test_one_thread_that_waits_for_nobody_does_not_keep_the_others() -> None:
    stop = threading.Event()

    def on_rank(group: Any) -> None:
        if group.rank == 1:
            stop.wait(20)
        else:
            raise ValueError("at once")

    start = time.monotonic()
    with pytest.raises(ValueError, match="at once"):
        distributed.run(on_rank, 2, timeout=0.1)
    stop.set()
    assert time.monotonic() - start < 10


# ---- processes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def server(size: int) -> Iterator[TcpServer]:
    found = TcpServer(size, secret=SECRET)
    yield found
    found.close(0.0)


def test_a_store_behind_a_socket_does_what_a_board_does() -> None:
    with server(2) as board:
        stores = [TcpStore(rank, board.address, 5, secret=SECRET) for rank in range(2)]
        found: list[Any] = [None, None]

        def gather(rank: int) -> None:
            found[rank] = stores[rank].gather("words", rank, b"x" * rank * 10**6, 5, "words")

        in_threads(gather, 2)
        assert found[0] == found[1] == [b"", b"x" * 10**6]
        stores[0].put("0 to 1", b"one")
        stores[0].put("0 to 1", b"two")
        assert [stores[1].take("0 to 1", 0, 5) for _ in range(2)] == [b"one", b"two"]
        stores[1].check()
        stores[1].fail(1, "met an error")
        for store in stores:
            with pytest.raises(RankError, match="rank 1 met an error"):
                store.check()
        for store in stores:
            store.leave()


def test_a_server_stays_until_the_last_to_leave_has_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it does not, the process of rank 0 ends, and rank 1 calls that a failure."""
    answered = []
    send = Channel.send

    def slowly(self: Channel, *args: Any) -> None:
        if threading.current_thread() is not member:  # of the server
            time.sleep(0.3)
            answered.append(True)
        send(self, *args)

    with server(2) as board:
        store = TcpStore(1, board.address, 5, secret=SECRET)
        member = threading.Thread(target=store.leave)
        monkeypatch.setattr(Channel, "send", slowly)
        member.start()
        board.close(5)
        assert answered == [True]
        member.join()
        board.board.check()  # to leave is no failure


def test_no_server_and_no_address() -> None:
    with pytest.raises(RankError, match=r"rank 0 holds no store at 127.0.0.1:\d+ after 0.1 s"):
        distributed.connect(1, 2, ("127.0.0.1", free_port()), timeout=0.1)
    wrong: list[Any] = ["29400", ":29400", "a:99999", 29400, ("a", "29400"), ("a", -1), ("", 1)]
    for address in wrong:
        with pytest.raises(ValueError, match=r"address must be 'host:29400' or .*, got "):
            distributed.connect(1, 2, address)


def meet(address: Any, on_rank: Any = lambda group: group.gather("a", group.rank)) -> list[Any]:
    """Return the results or exceptions of two ranks that meet at an address, each in a thread."""
    found: list[Any] = [None, None]

    def join(rank: int) -> None:
        try:
            with distributed.connect(rank, 2, address, timeout=10, secret=SECRET.decode()) as group:
                found[rank] = on_rank(group)
        except (RankError, KeyError) as error:
            found[rank] = error

    in_threads(join, 2, 30)
    return found


def test_ranks_meet_by_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    assert meet(("::1", free_port())) == meet(f"[::1]:{free_port()}") == [[0, 1]] * 2


def test_a_group_that_has_failed_leaves_its_address_to_the_next() -> None:
    address = "localhost", free_port()

    def on_rank(group: Any) -> None:
        if group.rank == 0:
            raise KeyError("lost")
        group.barrier()

    for _ in range(2):
        own, told = meet(address, on_rank)
        assert type(own) is KeyError and str(told) == "rank 0 raised KeyError: 'lost'"
    assert meet(address) == [[0, 1]] * 2


def test_a_rank_that_is_quicker_waits_for_the_next_group() -> None:
    before = TcpServer(2, secret=SECRET)
    member = TcpStore(1, before.address, 5, secret=SECRET)
    before.board.fail(0, "ended")
    found = []

    def join() -> None:
        with contextlib.suppress(RankError):
            found.append(TcpStore(1, before.address, 20, secret=SECRET))

    again = threading.Thread(target=join, daemon=True)
    again.start()
    again.join(0.3)  # the server of before has refused it by then
    after = TcpServer(2, before.address, secret=SECRET)
    again.join(20)
    assert len(found) == 1 and not after.board.failed
    found[0].leave()
    with pytest.raises(RankError, match="rank 0 ended"):
        member.check()


#: Program of every rank of the tests below: two calls, before the second of which some end.
SCRIPT = """
import os, sys, time
import numpy as np
from cupyattn import distributed

rank, port, fault, size = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[5])
x = np.full((1, 2, 8, 16), rank + 1, np.float16)
try:
    with distributed.connect(rank, size, f"localhost:{port}", timeout=float(sys.argv[4])) as group:
        for call in range(2):
            if call and fault == f"{rank} dies":
                os._exit(9)
            if call and fault == f"{rank} raises":
                raise KeyError("lost")
            if call and fault == f"{rank} is late":
                time.sleep(2.5)
            o = distributed.parallel_attention(x, x, x, group, "ring")
    print(f"mean {o.astype(np.float32).mean():.2f}")
except distributed.RankError as error:
    print(error)
"""


def processes(fault: str, timeout: float = 60, size: int = 3) -> list[tuple[int, str]]:
    """Exit status and output of each process."""
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), port, fault, str(timeout), str(size)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        return [
            (p.returncode, out.strip()) for p in running for out in [p.communicate(timeout=90)[0]]
        ]
    finally:
        for process in running:
            process.kill()


@pytest.mark.slow
def test_processes_compute_together() -> None:
    """Rows of 1, 2 and 3 attend to keys of 1, 2 and 3: the largest weighs most, not all."""
    assert processes("none") == [(0, "mean 2.98"), (0, "mean 3.00"), (0, "mean 3.00")]


@pytest.mark.parametrize(
    ("dead", "size"), [(1, 2), *(pytest.param(x, 3, marks=pytest.mark.slow) for x in (0, 1))]
)
def test_a_process_that_dies_is_named_by_the_others(dead: int, size: int) -> None:
    found = processes(f"{dead} dies", size=size)
    assert found[dead] == (9, "")
    for rank in set(range(size)) - {dead}:
        assert found[rank][0] == 0 and found[rank][1].startswith(f"rank {dead} ended: ")


@pytest.mark.slow
def test_a_process_that_raises_or_is_late_is_named_by_the_others() -> None:
    found = processes("2 raises")
    assert found[2] == (1, "")
    assert {found[rank][1] for rank in (0, 1)} == {"rank 2 raised KeyError: 'lost'"}
    found = processes("2 is late", timeout=1.5)
    # Numbers count what ranks agree on: their meeting, and two things of the first attention.
    late = "rank 2 did not come to 'parallel_attention, call 4' within 1.5 s"
    assert {out for _, out in found} == {late}


def test_launchers_say_who_a_process_is() -> None:
    with pytest.raises(ValueError, match="no launcher says which rank this is: RANK and WORLD_S"):
        distributed.from_environment(environ={})
    assert rendezvous({}) == ("localhost", 29400)
    assert rendezvous({"MASTER_ADDR": "a", "MASTER_PORT": "5"}) == ("a", 5)
    of_torchrun = {"MASTER_ADDR": "a", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert rendezvous({**of_torchrun, "MASTER_PORT": "35209"}) == ("a", 29400 + 2209)
    assert rendezvous({"SLURM_JOB_NODELIST": "n7"})[0] == "n7"
    assert rendezvous({"SLURM_JOB_NODELIST": "rack-1-n[12,14-16]-ib,x"})[0] == "rack-1-n12-ib"
    port = str(free_port())
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "MASTER_PORT": port}
    with distributed.from_environment(environ=environ, device=None, timeout=5) as group:
        assert (group.rank, group.size) == (0, 1)
    with pytest.raises(ValueError, match="variable SLURM_NTASKS must be a number, got 'two'"):
        distributed.from_environment(environ={**environ, "SLURM_NTASKS": "two"})
    with pytest.raises(ValueError, match="device must be a number, None or 'auto', got 'gpu'"):
        distributed.from_environment(environ=environ, device="gpu")


class Comm:
    """The part of mpi4py that `from_mpi` uses, among threads."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.board.size

    def allgather(self, value: Any) -> list[Any]:
        said = self.board.gather("all", self.rank, json.dumps(value).encode(), 5, "")
        return [json.loads(x) for x in said]

    def bcast(self, value: Any, root: int) -> Any:
        said = self.board.gather("one", self.rank, json.dumps(value).encode(), 5, "")
        return json.loads(said[root])


def test_mpi_tells_the_ranks_where_the_store_is() -> None:
    board, found = Board(2), {}

    def on_rank(rank: int) -> None:
        with distributed.from_mpi(Comm(board, rank), timeout=10, device=None) as group:
            found[rank] = group.gather("ranks", rank)

    in_threads(on_rank, 2, 20)
    assert found == {0: [0, 1], 1: [0, 1]}


def test_rank_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(RankError(3, "ended")))
    assert (error.rank, error.cause, str(error)) == (3, "ended", "rank 3 ended")
    assert textwrap.shorten(str(error), 20) == "rank 3 ended"
