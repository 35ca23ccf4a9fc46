"""A group's store admits ranks that know the secret, survives every message, and reports errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import distributed
from cupyattn.distributed import HostGroup, RankError, frames
from cupyattn.distributed import secret as group_secret
from cupyattn.distributed.frames import LIVES, Limits
from cupyattn.distributed.secret import FILE_VARIABLE, VARIABLE, Handover
from cupyattn.distributed.store import Board
from cupyattn.distributed.tcp import TcpServer, TcpStore
from experiments.accuracy import fuzz_store
from tests.support.ranks import free_port, in_threads

SECRET, OTHER = "a secret of these tests", "another secret of these tests"


@contextlib.contextmanager
def server(size: int, **limits: Any) -> Iterator[TcpServer]:
    found = TcpServer(size, secret=SECRET.encode(), limits=Limits(**limits))
    try:
        yield found
    finally:
        found.close(0.0)


def store_of(found: TcpServer, rank: int) -> TcpStore:
    return TcpStore(rank, found.address, 5, secret=SECRET.encode())


# ---- hostile messages ----------------------------------------------------------------------------


def test_hostile_messages_end_no_group_and_are_answered(tmp_path: Path) -> None:
    """300 of the 5,000 of experiments/accuracy/fuzz_store.py."""
    file = tmp_path / "fuzz.json"
    assert fuzz_store.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["messages"] == 300 and record["rounds"] > 1
    assert (record["errors"], record["unanswered"]) == ([], [])
    assert all(row["messages"] and not row["neither"] for row in record["rows"])


def test_the_record_is_of_5000_messages() -> None:
    record = fuzz_store.recording.stored("fuzz_store")
    assert record["messages"] == 5000 and record["rounds"] > 100
    assert (record["errors"], record["unanswered"]) == ([], [])
    assert {row["kind"] for row in record["rows"]} == set(
        fuzz_store.Fuzzer(None, None).kinds()  # type: ignore[arg-type]
    )


def old_message(**words: Any) -> bytes:
    """A message as the store took it before there was a secret: it spoke for any rank."""
    said = json.dumps(words).encode()
    return len(said).to_bytes(4, "big") + bytes(8) + said


@pytest.mark.parametrize(
    "message",
    [
        old_message(ask="fail", rank=1, of=1, cause="was told to"),
        old_message(ask="gather", rank=1, key="0", timeout=5, about="spoken for"),
        old_message(ask="check", rank=1),  # and its connection closes
        old_message(ask="gather", rank=99, key="0", timeout=5, about="out of range"),
        b"\0\0\0\5" + bytes(8) + b"{{{{{",
        (0).to_bytes(4, "big") + (2**32).to_bytes(8, "big"),
    ],
)
def test_a_stranger_neither_ends_a_group_nor_speaks_as_a_rank(message: bytes) -> None:
    with server(2) as found:
        stores = [store_of(found, rank) for rank in range(2)]
        with socket.create_connection(found.address, timeout=5) as stranger:
            stranger.sendall(message)
            time.sleep(0.1)
        with contextlib.ExitStack() as stack:
            results: list[Any] = [None, None]

            def gather(rank: int) -> None:
                results[rank] = stores[rank].gather("0", rank, b"%d" % rank, 5, "words")

            threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(2)]
            for thread in threads:
                thread.start()
                stack.callback(thread.join, 10)
        assert results == [[b"0", b"1"]] * 2
        for store in stores:
            store.leave()


def test_a_repeated_message_is_refused_and_changes_nothing() -> None:
    """To the bit what a member has sent, on its own connection and on another one."""
    with server(1) as found:
        store = store_of(found, 0)
        sent: list[bytes] = []
        channel = store._asks
        wire = channel.connection

        class Recorder:
            def __getattr__(self, name: str) -> Any:
                return getattr(wire, name)

            def sendall(self, data: bytes) -> None:
                sent.append(bytes(data))
                wire.sendall(data)

        channel.connection = Recorder()  # type: ignore[assignment]
        store.put("k", b"once")
        (message,) = sent
        wire.sendall(message)
        frame = channel.receive(5)
        assert frame.words == {"refused": "number 1 came, 2 is the next"}
        assert store.take("k", 0, 1) == b"once"
        assert found.board._left == {}, "it was put once"
        with socket.create_connection(found.address, timeout=5) as stranger:
            fuzz_store.read_greeting(stranger)
            stranger.sendall(message)
            assert fuzz_store.wait_for_answer(stranger) == "closed"
        assert found.board._left == {}
        store.leave()


def test_a_changed_value_is_refused() -> None:
    with server(1) as found:
        store = store_of(found, 0)
        channel = store._asks
        wire = channel.connection

        class Changing:
            def __getattr__(self, name: str) -> Any:
                return getattr(wire, name)

            def sendall(self, data: bytes) -> None:
                wire.sendall(bytes(data).replace(b"right", b"wrong"))

        channel.connection = Changing()  # type: ignore[assignment]
        with pytest.raises(RankError, match="in vain: its code does not match its message"):
            store.put("k", b"right")
        assert found.board._left == {}
        store.put("k", b"other")
        assert store.take("k", 0, 1) == b"other"
        store.leave()


def test_half_a_message_ends_in_time() -> None:
    """A stranger's by closing, a member's with its name."""
    with server(2, join_seconds=0.2, message_seconds=0.2) as found:
        stores = [store_of(found, rank) for rank in range(2)]
        with socket.create_connection(found.address, timeout=5) as stranger:
            fuzz_store.read_greeting(stranger)
            stranger.sendall(frames.MAGIC[:5])
            assert stranger.recv(1) == b""
        stores[0].check()
        stores[1]._asks.connection.sendall(b"C")
        time.sleep(1.0)
        with pytest.raises(RankError, match="rank 1 sent half a message, and not the rest in time"):
            stores[0].check()


def test_a_member_that_announces_too_much_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named as soon as it gets the refusal; a slow board delays the answer."""
    with server(2, value=1000) as found:
        note = found.board.fail

        def slowly(rank: int, cause: str) -> None:
            time.sleep(0.2)
            note(rank, cause)

        monkeypatch.setattr(found.board, "fail", slowly)
        stores = [store_of(found, rank) for rank in range(2)]
        with pytest.raises(RankError):
            stores[1].put("k", bytes(1001))
        cause = "rank 1 sent data that is no message of the group: .* announces 1028 bytes"
        with pytest.raises(RankError, match=cause):
            stores[0].check()


def test_fields_of_a_message_that_are_none_are_named() -> None:
    with server(1) as found:
        store = store_of(found, 0)
        store.put("b", b"")
        with pytest.raises(RankError, match="rank 0 asked .* in vain: key must be a text of at mo"):
            store.take("k" * 4001, 0, 1)
        with pytest.raises(RankError, match="source must be a rank below 1, got 1"):
            store.take("b", 1, 1)
        with pytest.raises(RankError, match=r"timeout must be 0 to .* seconds, got inf"):
            words = {"ask": "take", "key": "b", "source": 0, "timeout": float("inf")}
            store._ask(store._asks, words)
        assert store.take("b", 0, 1) == b""
        store.leave()


def test_connections_that_say_nothing_are_few() -> None:
    with server(1, joining=5) as found, contextlib.ExitStack() as held:
        before = threading.active_count()
        silent = [
            held.enter_context(socket.create_connection(found.address, timeout=5))
            for _ in range(40)
        ]
        for connection in silent[:35]:
            assert fuzz_store.wait_for_answer(connection) in ("answered", "closed")
        assert len(found._joining) <= 5
        store_of(found, 0).leave()
        time.sleep(0.1)
        assert threading.active_count() <= before + 10


# ---- ranks ---------------------------------------------------------------------------------------


def test_a_refusal_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with server(1) as found:
        for secret in (OTHER, OTHER, SECRET + "!"):
            with pytest.raises(RankError, match="rank 0 has another secret"):
                TcpStore(0, found.address, 5, secret=secret.encode())
    told = f"refused connections from 127.0.0.1 to the store at localhost:{found.address[1]}: wrong"
    assert [record.getMessage() for record in caplog.records] == [f"{told} secret"]


def test_ranks_out_of_range_and_ranks_that_are_there_are_refused() -> None:
    with server(2) as found:
        where = f"localhost:{found.address[1]}"
        store = store_of(found, 1)
        with pytest.raises(RankError) as e:
            store_of(found, 2)
        assert str(e.value) == f"rank 2 is not of the group at {where}, which has fewer ranks"
        with pytest.raises(RankError) as e:
            store_of(found, 1)
        there = "rank 1 is there twice: another process is this rank of the group at "
        assert str(e.value) == there + where
        store.check()
        store.leave()
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"between 0 and size - 1, got rank={rank} size=2"):
            distributed.connect(rank, 2, "localhost:1", timeout=0.1)


def test_a_board_has_one_value_of_each_rank() -> None:
    board = Board(2)
    with pytest.raises(ValueError, match="rank must be between 0 and size - 1, got rank=2 size=2"):
        board.gather("0", 2, b"", 0.1, "words")
    threads = [
        threading.Thread(target=board.gather, args=("0", 0, b"right", 5, "words")),
        threading.Thread(target=board.gather, args=("0", 1, b"", 5, "words")),
    ]
    threads[0].start()
    time.sleep(0.1)
    with pytest.raises(ValueError, match="rank 0 has already left a value for 'words', key '0'"):
        board.gather("0", 0, b"wrong", 0.1, "words")
    threads[1].start()
    for thread in threads:
        thread.join(5)


def test_rubbish_of_a_member_is_told_with_its_rank() -> None:
    def on_rank(group: Any) -> None:
        group.barrier()
        if group.rank == 1:
            group._calls += 1
            group.store.gather("2", 1, b"\xff", 5, "words")
        else:
            group.gather("words", 0)

    with pytest.raises(RankError, match=r"rank 1 left b'\\xff' for 'words, call 2'"):
        distributed.run(on_rank, 2, timeout=2)

    def sends(group: HostGroup) -> None:
        if group.rank == 1:
            group.store.put(group.key_of_next(1, 0), b"rubbish")
        else:
            group.exchange([], [(1, np.empty(3))]).wait()

    with pytest.raises(RankError, match="rank 1 sent rubbish in 0 bytes, rank 0 wants"):
        distributed.run(sends, 2, timeout=2)  # type: ignore[arg-type]


# ---- where the secret comes from -----------------------------------------------------------------


def joined(given: list[dict[str, Any]], timeout: float = 20) -> list[Any]:
    """Return the results of ranks, each in a thread, connected with these options."""
    address, found = f"localhost:{free_port()}", [None] * len(given)

    def on_rank(rank: int) -> None:
        how = {"timeout": timeout, **given[rank]}
        try:
            with distributed.connect(rank, len(given), address, **how) as group:
                found[rank] = group.gather("ranks", rank)
        except Exception as error:  # noqa: BLE001 - compared
            found[rank] = error  # type: ignore[call-overload]

    in_threads(on_rank, len(given))
    return found


def test_a_wrong_secret_is_one_clear_sentence() -> None:
    how: dict[str, Any] = {"timeout": 1.5}
    found = joined([{"secret": SECRET, **how}, {"secret": OTHER, **how}])
    assert isinstance(found[1], RankError)
    sentence = re.sub(r":\d+:", ":29400:", str(found[1]))
    assert sentence == (
        "rank 1 has another secret than the store at localhost:29400: set CUPYATTN_GROUP_SECRET or "
        "CUPYATTN_GROUP_SECRET_FILE to the same on every rank"
    )
    assert str(found[0]) == "rank 1 did not come to 'hosts, call 0' within 1.5 s"


def test_the_environment_and_files_hand_a_secret_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    assert joined([{}, {"secret": SECRET}]) == [[0, 1]] * 2
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    with pytest.raises(ValueError, match="SECRET and CUPYATTN_GROUP_SECRET_FILE are both set"):
        distributed.connect(0, 1, "localhost:1")
    monkeypatch.delenv(VARIABLE)
    file.chmod(0o644)
    with pytest.raises(OSError, match=r"is not private: .*mode 0644, chmod go= ends that"):
        distributed.connect(0, 1, "localhost:1")
    file.chmod(0o600)
    assert joined([{}, {"secret": SECRET}]) == [[0, 1]] * 2
    file.write_text("short")
    with pytest.raises(ValueError, match="must have at least 16 characters, .*secret has 5: make"):
        distributed.connect(0, 1, "localhost:1")


def test_rank_0_leaves_a_secret_in_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    assert joined([{}, {}, {}]) == [[0, 1, 2]] * 3
    folder = tmp_path / "cache" / "groups"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and os.listdir(folder) == []
    handover = Handover(("localhost", 29400))
    assert socket.gethostname() in handover.path.name, "every host has a localhost of its own"
    before = os.umask(0)
    try:
        handover.leave(b"x" * 64)
    finally:
        os.umask(before)
    assert stat.S_IMODE(handover.path.stat().st_mode) == 0o600
    assert Handover(("localhost", 29400)).find() == b"x" * 64
    folder.chmod(0o755)
    with pytest.raises(OSError, match="groups' is not private: other users may use it"):
        Handover(("localhost", 1)).leave(b"x" * 64)


def test_what_a_group_before_has_left_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 reads an old file first, and the new one when rank 0 has written it."""
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    port, secret = free_port(), group_secret.make()
    Handover(("localhost", port)).leave(b"old" * 20)
    found = TcpServer(2, ("localhost", port), secret=secret)
    handover = Handover(("localhost", port))
    timer = threading.Timer(0.5, handover.leave, (secret,))
    timer.start()
    TcpStore(1, ("localhost", port), 10, secret=Handover(("localhost", port))).leave()
    found.close(0.0)
    timer.join()


def test_without_a_secret_there_is_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was given one, rank 1 was not: it does not join, and says what to do."""
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    found = joined([{"secret": SECRET}, {}], timeout=0.5)
    assert isinstance(found[1], RankError)
    assert re.fullmatch(
        r"rank 1 found no secret of the group at localhost:\d+ in .*groups.*\.secret within 0.5 s: "
        r"set CUPYATTN_GROUP_SECRET or CUPYATTN_GROUP_SECRET_FILE to the same on every rank",
        str(found[1]),
    )


def test_the_server_stops_listening_when_it_is_closed() -> None:
    found = TcpServer(1, secret=SECRET.encode())
    found.close(0.0)
    time.sleep(0.1)
    with pytest.raises(OSError):
        socket.create_connection(found.address, timeout=1)


def test_the_store_uses_no_pickle() -> None:
    script = (
        "import sys, cupyattn.distributed as d; before = 'pickle' in sys.modules; "
        "import cupyattn.distributed.tcp, inspect; "
        "print(any('pickle' in inspect.getsource(sys.modules[n]) for n in sys.modules "
        "if n.startswith('cupyattn.distributed')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_uses_of_a_connection_are_two() -> None:
    with server(1) as found, socket.create_connection(found.address, timeout=5) as connection:
        channel = frames.join(connection, 0, LIVES + 1, SECRET.encode(), 5)
        assert "is not of the group" in channel.answer(5).words["refused"]


def test_a_stranger_gets_nothing_that_secrets_could_be_tried_on() -> None:
    """A wrong secret is answered, but not by a code: that would tell which guess is right."""
    with server(1) as found, socket.create_connection(found.address, timeout=5) as stranger:
        frames.join(stranger, 0, LIVES, OTHER.encode(), 5)
        answer = stranger.recv(1000)
        assert answer and not any(answer)
