"""A board that ranks in several processes, on several hosts, share by way of a socket.

Rank 0 holds it. Every rank has two connections: one for what it asks, which may wait, and one that
says that it lives: where that closes without a word, the rank has ended. Both are authenticated by
the secret of the group (`cupyattn.distributed.frames`). The store takes the rank of a message from
its connection, never from the message.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from cupyattn.distributed import frames
from cupyattn.distributed.frames import (
    ASKS,
    LIVES,
    BrokenFrameError,
    Channel,
    Frame,
    JoinError,
    Limits,
    RefusedFrameError,
    Verdict,
)
from cupyattn.distributed.secret import ADVICE, Handover
from cupyattn.distributed.store import Board
from cupyattn.errors import RankError

#: Extra seconds to wait for an answer beyond the requested timeout.
GRACE = 10.0
#: Seconds between two attempts to reach rank 0, and the longest that they become.
RETRY, LONGEST_RETRY = 0.05, 1.0
#: Largest number of characters of a text in a message, such as a call or the cause of a failure.
TEXT = 4000
#: An answer may hold what every rank has left.
_ANY_VALUE = 2**62

Address = tuple[str, int]
_log = logging.getLogger("cupyattn")


class TcpServer:
    """Holds the board, in threads of the process of rank 0.

    Parameters
    ----------
    size : int
        Ranks.
    address : (str, int)
        Name or number of the host that ranks reach it at, and port; 0: any that is free. It
        listens there alone.
    secret : bytes
        Of the group. A connection that does not prove that it knows it is closed.
    limits : Limits
        What it accepts.

    Attributes
    ----------
    address : (str, int)
        With the port that was found.
    """

    def __init__(
        self,
        size: int,
        address: Address = ("localhost", 0),
        *,
        secret: bytes,
        limits: Limits | None = None,
    ) -> None:
        self.board = Board(size)
        self._secret, self._limits = secret, limits or Limits()
        self._leaving: set[int] = set()  # ranks that have said so
        self._gone: set[int] = set()  # those that have been answered, or whose connection closed
        self._joined: set[tuple[int, int]] = set()  # ranks and uses of connections, never twice
        self._joining: dict[socket.socket, None] = {}  # in the order in which they came
        self._warned: set[Verdict] = set()
        self._closed = False
        self._changed = threading.Condition()
        self._listener = socket.create_server(address, reuse_port=False)
        self.address: Address = address[0], self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        # Where rank 0 ends by an error, the others are told what it was first.
        atexit.register(self.close)

    def close(self, timeout: float = GRACE) -> None:
        """Wait until every other rank has gone, not longer than that; then stop listening."""
        atexit.unregister(self.close)
        with self._changed:
            others = set(range(1, self.board.size))
            self._changed.wait_for(lambda: others <= self._gone, timeout)
            self._closed = True
            joining = list(self._joining)
        _shut(self._listener)  # ends the accept of the other thread
        self._listener.close()
        for connection in joining:
            _shut(connection)

    def _leaves(self, rank: int) -> bool:
        """Note that a rank has gone; return whether that is news."""
        with self._changed:
            news = rank not in self._gone
            self._gone.add(rank)
            self._changed.notify_all()
        return news

    # ---- joining ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or the process has too many open files for now
                if not self._closed:
                    time.sleep(RETRY)
                continue
            with self._changed:
                self._joining[connection] = None
                if len(self._joining) > self._limits.joining:
                    # NOTE: the oldest, not the newest: a rank joins within milliseconds, so
                    # strangers that say nothing cannot keep it out.
                    oldest = next(iter(self._joining))
                    del self._joining[oldest]
                    _shut(oldest)
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # no more threads for now
                self._joins_no_longer(connection)
                connection.close()

    def _joins_no_longer(self, connection: socket.socket) -> None:
        with self._changed:
            self._joining.pop(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        """Let a connection join, and answer it until it closes."""
        with connection:
            try:
                rank, channel = self._join(connection)
            except JoinError as error:
                self._warn(connection, error.verdict)
                return
            except OSError:
                return
            finally:
                self._joins_no_longer(connection)
            cause = "ended: its connection closed"
            try:
                cause = self._answer_all(rank, channel) or cause
            except OSError:
                pass
            except Exception as error:  # noqa: BLE001 - whatever it was, the ranks are told
                _log.exception("the store failed at a message of rank %d", rank)
                cause = f"sent a message at which the store failed: {type(error).__name__}: {error}"
            self._fails(rank, cause)

    def _fails(self, rank: int, cause: str) -> None:
        """Tell the board that a rank has failed, unless it is leaving or has failed before."""
        if self._leaves(rank) and rank not in self._leaving:
            self.board.fail(rank, cause)

    def _join(self, connection: socket.socket) -> tuple[int, Channel]:
        """Return the rank and the channel of a connection; OSError or JoinError if it has none."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + self._limits.join_seconds
        greeting = frames.greet(connection, deadline)
        said = b""
        try:
            rank, use, said = frames.admit(connection, greeting, self._secret, deadline)
            if use not in (ASKS, LIVES):
                raise JoinError(Verdict.MALFORMED)
            if not rank < self.board.size:
                raise JoinError(Verdict.NO_SUCH_RANK)
            with self._changed:
                if (rank, use) in self._joined:
                    raise JoinError(Verdict.RANK_IS_TAKEN)
                if connection not in self._joining:
                    raise ConnectionError("closed to make room for another")
                del self._joining[connection]
                self._joined.add((rank, use))
        except JoinError as error:
            connection.settimeout(1.0)
            frames.decide(connection, self._secret, said, error.verdict)
            raise
        try:
            frames.decide(connection, self._secret, said, Verdict.WELCOME)
        except OSError:  # it may try again
            with self._changed:
                self._joined.discard((rank, use))
            raise
        return rank, Channel(connection, self._secret, said, True, self._limits)

    def _warn(self, connection: socket.socket, verdict: Verdict) -> None:
        """Say once for each verdict that a connection was refused."""
        with self._changed:
            first = verdict not in self._warned
            self._warned.add(verdict)
        if first:
            try:
                host = connection.getpeername()[0]
            except OSError:
                host = "a host that has gone"
            _log.warning(
                "refused a connection from %s to the store at %s:%d: %s (further ones of this kind "
                "are not reported)", host, *self.address, verdict.name.lower().replace("_", " "),
            )  # fmt: skip

    # ---- answers ---------------------------------------------------------------------------------

    def _answer_all(self, rank: int, channel: Channel) -> str | None:
        """Answer a connection until it breaks; return why, None where it left. OSError: closed."""
        expected = 1
        while True:
            answer: dict[str, Any] = {}
            values: Sequence[Any] = ()
            number, leaves = expected, False
            try:
                frame = channel.receive(expected, None)
                values = self._answer(rank, frame)
                leaves = frame.words["ask"] == "leave"
            except TimeoutError:
                return "sent half a message, and not the rest in time"
            except (BrokenFrameError, MemoryError) as error:
                cause = f"sent what is no message of the group: {error}"
                self._fails(rank, cause)  # before its rank hears: then everyone can know
                with contextlib.suppress(OSError):
                    channel.send(number, {"refused": cause[:TEXT], "lengths": []})
                return cause
            except RankError as error:
                answer["error"] = [error.rank, error.cause]
            except RefusedFrameError as error:
                answer["refused"], number = str(error), error.sequence
            except (ValueError, TypeError) as error:
                answer["refused"] = str(error)[:TEXT]
            answer["lengths"] = [len(value) for value in values]
            channel.send(number, answer, values)
            if number == expected:
                expected += 1
            if leaves:  # and not before: with the last to go the process of the server may end
                self._leaves(rank)

    def _answer(self, rank: int, frame: Frame) -> Sequence[Any]:
        board, words, value = self.board, frame.words, frame.value
        match words.get("ask"):
            case "gather":
                key, about = self._key(words), _text(words, "about")
                return board.gather(key, rank, value, _timeout(words), about)  # type: ignore[arg-type]
            case "put":
                board.put(self._key(words), value)
            case "take":
                source = self._rank(words, "source")
                return [board.take(self._key(words, new=False), source, _timeout(words))]
            case "fail":
                board.fail(self._rank(words, "of"), _text(words, "cause"))
            case "leave":
                self._leaving.add(rank)
            case "check":
                board.check()
            case other:
                raise ValueError(f"a store answers no {other!r}"[:TEXT])
        return []

    def _key(self, words: dict[str, Any], *, new: bool = True) -> str:
        """Return the key of a message; `new`: one that may need a place."""
        key = _text(words, "key", self._limits.key)
        if new and self.board.keys >= self._limits.keys:
            raise ValueError(f"{self._limits.keys} keys hold a value: no more may wait")
        return key

    def _rank(self, words: dict[str, Any], name: str) -> int:
        rank = words.get(name)
        if type(rank) is not int or not 0 <= rank < self.board.size:
            raise ValueError(f"{name} must be a rank below {self.board.size}, got {rank!r}"[:TEXT])
        return rank


def _text(words: dict[str, Any], name: str, most: int = TEXT) -> str:
    text = words.get(name)
    if not isinstance(text, str) or len(text) > most:
        got = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise ValueError(f"{name} must be a text of at most {most} characters, got {got}")
    return text


def _timeout(words: dict[str, Any]) -> float:
    timeout = words.get("timeout")
    if not isinstance(timeout, (int, float)) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        got = str(timeout)[:40]
        raise ValueError(f"timeout must be 0 to {threading.TIMEOUT_MAX:g} seconds, got {got}")
    return float(timeout)


class TcpStore:
    """The board of a `TcpServer`, as one rank sees it.

    Parameters
    ----------
    rank : int
    address : (str, int)
        Of the server.
    timeout : float
        Seconds that the server may take to be there, and the others to leave it.
    server : TcpServer, optional
        That of this process: it stays until all ranks have left.
    secret : bytes or Handover
        Of the group, or where rank 0 leaves it.

    Raises
    ------
    RankError
        If the server does not come, has another secret, or has no place for this rank.
    """

    def __init__(
        self,
        rank: int,
        address: Address,
        timeout: float,
        server: TcpServer | None = None,
        *,
        secret: bytes | Handover,
    ) -> None:
        self.rank, self._address, self._timeout, self._server = rank, address, timeout, server
        self._lives = _Connection(rank, LIVES, address, timeout, secret)
        self._asks = _Connection(rank, ASKS, address, timeout, secret)
        self.check()

    def gather(self, key: str, rank: int, value: bytes, timeout: float, about: str) -> list[bytes]:
        """As `cupyattn.distributed.store.Store` has it; `rank` is this one."""
        how = {"key": key, "timeout": timeout, "about": about[:TEXT]}
        return self._ask(self._asks, "gather", value, timeout, **how)

    def put(self, key: str, value: bytes) -> None:
        """As `cupyattn.distributed.store.Store` has it."""
        self._ask(self._asks, "put", value, key=key)

    def take(self, key: str, source: int, timeout: float) -> bytes:
        """As `cupyattn.distributed.store.Store` has it."""
        how: dict[str, Any] = {"key": key, "source": source, "timeout": timeout}
        return self._ask(self._asks, "take", wait=timeout, **how)[0]

    def fail(self, rank: int, cause: str) -> None:
        """As `cupyattn.distributed.store.Store` has it."""
        with contextlib.suppress(RankError):  # rank 0 has ended: everybody knows
            self._ask(self._lives, "fail", of=rank, cause=cause[:TEXT])

    def check(self) -> None:
        """As `cupyattn.distributed.store.Store` has it."""
        self._ask(self._lives, "check")

    def leave(self) -> None:
        """Tell the server, and close the connections."""
        self._ask(self._lives, "leave")
        for connection in (self._asks, self._lives):
            connection.close()
        if self._server is not None:
            self._server.close(self._timeout)

    def _ask(
        self, connection: _Connection, ask: str, value: bytes = b"", wait: float = 0.0, **how: Any
    ) -> list[bytes]:
        host, port = self._address
        try:
            frame = connection.ask({"ask": ask, **how}, value, wait)
        except (OSError, BrokenFrameError, RefusedFrameError) as error:
            raise RankError(
                0, f"ended: the store that it holds at {host}:{port} does not answer ({error})"
            ) from error
        if "error" in frame.words:
            raise RankError(*frame.words["error"])
        if "refused" in frame.words:
            raise RankError(
                self.rank, f"asked the store at {host}:{port} in vain: {frame.words['refused']}"
            )
        values, start, view = [], 0, memoryview(frame.value)
        for length in frame.words["lengths"]:
            values.append(bytes(view[start : start + length]))
            start += length
        return values


class _Connection:
    """A connection to a store, on which one thread at a time asks and is answered."""

    def __init__(
        self, rank: int, use: int, address: Address, timeout: float, known: bytes | Handover
    ) -> None:
        self._lock, self._number = threading.Lock(), 0
        end, pause = time.monotonic() + timeout, RETRY
        while True:
            try:
                self._socket, self._channel = _joined(rank, use, address, known)
                return
            except OSError as error:
                cause: RankError = _absent(rank, address, timeout, known, error)
                reason: Exception = error
            except JoinError as error:
                cause, reason = _refused(rank, address, error.verdict), error
                # NOTE: what rank 0 leaves may still be that of a group before this one.
                left = isinstance(known, Handover)
                if not (left and error.verdict is Verdict.WRONG_SECRET):
                    raise cause from error
            if time.monotonic() > end:
                raise cause from reason
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY)

    def ask(self, words: dict[str, Any], value: bytes, wait: float) -> Frame:
        """Ask, and return the answer, which may take so many seconds."""
        with self._lock:
            self._number += 1
            self._channel.send(self._number, words, [value])
            while True:
                frame = self._channel.receive(None, wait + GRACE, _ANY_VALUE)
                if frame.sequence == self._number:
                    return frame
                # An older number: somebody repeated a message on the way.

    def close(self) -> None:
        self._socket.close()


class _NoSecretError(OSError):
    """Rank 0 has left no secret so far."""


def _joined(
    rank: int, use: int, address: Address, known: bytes | Handover
) -> tuple[socket.socket, Channel]:
    """Return a connection that a store has let in; OSError or JoinError where there is none."""
    connection = socket.create_connection(address, timeout=GRACE)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = frames.read_greeting(connection)
        found = known if isinstance(known, bytes) else known.find()
        if found is None:
            raise _NoSecretError("rank 0 has left no secret")
        said = frames.join(connection, rank, use, found, greeting)
        return connection, Channel(connection, found, said, False, Limits())
    except BaseException:
        connection.close()
        raise


def _absent(
    rank: int, address: Address, timeout: float, known: bytes | Handover, error: OSError
) -> RankError:
    host, port = address
    if isinstance(error, _NoSecretError) and isinstance(known, Handover):
        return RankError(
            rank,
            f"found no secret of the group at {host}:{port} in {known.path} within {timeout:g} s: "
            f"{ADVICE}",
        )
    return RankError(0, f"holds no store at {host}:{port} after {timeout:g} s ({error})")


def _refused(rank: int, address: Address, verdict: Verdict) -> RankError:
    host, port = address
    causes = {
        Verdict.WRONG_SECRET: "has another secret than the store at {}: " + ADVICE,
        Verdict.NO_SUCH_RANK: "is not of the group at {}, which has fewer ranks",
        Verdict.RANK_IS_TAKEN: "is there twice: another process is this rank of the group at {}",
    }
    text = causes.get(verdict, "was refused by the store at {}, of another version of cupyattn")
    return RankError(rank, text.format(f"{host}:{port}"))


def _shut(connection: socket.socket) -> None:
    """End what waits on a connection in another thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
