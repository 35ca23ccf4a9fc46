"""A board that ranks in several processes, on several hosts, share by way of a socket.

Rank 0 holds it. Every rank has two connections: one for questions, which may wait, and one as a
sign of life. If the second closes without a message, the rank has ended. Both are authenticated by
the secret of the group (`cupyattn.distributed.frames`). The store takes the rank of a message from
its connection, never from the message.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from cupyattn.distributed import frames
from cupyattn.distributed.frames import ASKS, LIVES, BrokenFrameError, Channel, Frame, Limits
from cupyattn.distributed.secret import ADVICE, Handover
from cupyattn.distributed.store import Board, Mailbox
from cupyattn.errors import RankError, shown

#: Extra seconds to wait for an answer beyond the requested timeout.
GRACE = 10.0
#: Seconds between two attempts to reach rank 0: at first, and at most.
RETRY, LONGEST_RETRY = 0.05, 1.0
#: Largest number of characters of a text in a message, such as a call or the cause of a failure.
TEXT = 4000

Address = tuple[str, int]
_log = logging.getLogger("cupyattn")


class TcpServer:
    """Holds the board, in threads of the process of rank 0.

    Parameters
    ----------
    size : int
        Ranks.
    address : (str, int)
        Name or number of the host at which ranks reach it, and port. Port 0 means any free port. It
        listens at this address alone.
    secret : bytes
        Secret of the group. A connection that does not prove to know it is closed.
    limits : Limits
        Limits of the messages that it accepts.

    Attributes
    ----------
    address : (str, int)
        The address with the port in use.
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
        self._leaving: set[int] = set()  # ranks that have announced it
        #: Ranks that were answered, or whose connection closed.
        self._answered_or_closed: set[int] = set()
        self._joined: set[tuple[int, int]] = set()  # ranks and uses of connections, never twice
        self._joining: dict[socket.socket, None] = {}  # in the order in which they came
        #: Logs each warning once.
        self._warn = functools.lru_cache(1000)(_log.warning)
        self._changed = threading.Condition()
        _make_room(address)
        self._listener = socket.create_server(address, family=_family(address))
        self.address: Address = address[0], self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        # If rank 0 ends by an error, the others receive the error first.
        atexit.register(self.close)
        _listening[self.address] = self

    def close(self, timeout: float = GRACE) -> None:
        """Wait until every other rank has gone, not longer than that; then stop listening."""
        atexit.unregister(self.close)
        with self._changed:
            others = set(range(1, self.board.size))
            self._changed.wait_for(lambda: others <= self._answered_or_closed, timeout)
        _shut(self._listener)  # ends the accept of the other thread
        self._listener.close()

    def _leaves(self, rank: int, failure: str | None) -> None:
        """Note that a rank has left, as announced or by a failure."""
        if failure is not None and rank not in self._leaving:
            self.board.fail(rank, failure)
        with self._changed:
            self._answered_or_closed.add(rank)
            self._changed.notify_all()

    # ---- joining ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, (host, *_) = self._listener.accept()
                with self._changed:
                    self._joining[connection] = None
                    if len(self._joining) > self._limits.joining:
                        # NOTE: the oldest, not the newest: a rank joins within milliseconds, so
                        # strangers that say nothing cannot keep it out.
                        oldest = next(iter(self._joining))
                        del self._joining[oldest]
                        _shut(oldest)
                threading.Thread(target=self._serve, args=(connection, host), daemon=True).start()
            except (OSError, RuntimeError):  # closed, or too many open files or threads for now
                time.sleep(RETRY)

    def _serve(self, connection: socket.socket, host: str) -> None:
        """Let a connection join, and answer it until it closes."""
        with connection:
            try:
                rank, channel = self._join(connection)
            except (BrokenFrameError, TimeoutError) as error:
                told = f"refused connections from {host} to the store at {_named(self.address)}"
                self._warn("%s: %s", told, str(error))
                return
            except OSError:
                return
            finally:
                with self._changed:
                    self._joining.pop(connection, None)
            failure = "sent a message at which the store failed"
            try:
                failure = self._answer_all(rank, channel)
            except OSError:
                failure = "ended: its connection closed"
            finally:  # the ranks are informed in any case
                self._leaves(rank, failure)

    def _join(self, connection: socket.socket) -> tuple[int, Channel]:
        """Return the rank and the channel of a connection; OSError if it has none."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel, rank, use = frames.admit(connection, self._secret, self._limits)
        where, refusal = _named(self.address), ""
        with self._changed:
            if not (rank < self.board.size and use in (ASKS, LIVES)):
                refusal = f"is not of the group at {where}, which has fewer ranks"
            elif (rank, use) in self._joined and self.board.failed:
                raise ConnectionError("joins the next group, which is not there yet")
            elif (rank, use) in self._joined:
                refusal = f"is there twice: another process is this rank of the group at {where}"
            else:
                self._joining.pop(connection, None)  # which no other connection closes any more
                self._joined.add((rank, use))
        try:
            channel.send(0, {"refused": refusal})
        except OSError:  # one that made room for another, too: it may try again
            with self._changed:
                self._joined.discard((rank, use))
            raise
        if refusal:
            raise BrokenFrameError(f"their rank {refusal}")
        return rank, channel

    # ---- answers ---------------------------------------------------------------------------------

    def _answer_all(self, rank: int, channel: Channel) -> str:
        """Answer a connection until it breaks; return why. OSError: closed."""
        expected = 1
        while True:
            try:
                frame = channel.receive(None)
            except TimeoutError:
                return "sent half a message, and not the rest in time"
            except (BrokenFrameError, MemoryError) as error:
                cause = f"sent data that is no message of the group: {error}"
                self._leaves(rank, cause)  # before its rank hears: then everyone can know
                with contextlib.suppress(OSError):
                    channel.send(expected, {"refused": cause[:TEXT]})
                return cause
            answer: dict[str, Any] = {}
            values: Sequence[bytes] = ()
            leaves = False
            try:
                if frame.number != expected:
                    raise ValueError(f"number {frame.number} came, {expected} is the next")
                expected += 1
                values = self._answer(rank, frame)
                answer["lengths"] = [len(value) for value in values]
                leaves = frame.words["ask"] == "leave"
            except RankError as error:
                answer["error"] = [error.rank, error.cause]
            except (ValueError, TypeError) as error:
                answer["refused"] = str(error)[:TEXT]
            channel.send(frame.number, answer, values)
            if leaves:  # and not before: with the last to go the process of the server may end
                self._leaves(rank, None)

    def _answer(self, rank: int, frame: Frame) -> Sequence[bytes]:
        """Execute a rank's request; return values for it."""
        if frame.refusal:
            raise ValueError(frame.refusal)
        board, value = self.board, bytes(frame.value)

        def field(name: str) -> Any:
            return _checked(name, frame.words.get(name), board.size)

        match frame.words.get("ask"):
            case "gather":
                return board.gather(field("key"), rank, value, field("timeout"), field("about"))
            case "put":
                board.put(field("key"), value)
            case "take":
                return [board.take(field("key"), field("source"), field("timeout"))]
            case "fail":
                board.fail(field("of"), field("cause"))
            case "leave":
                self._leaving.add(rank)
            case "check":
                board.check()
            case other:
                raise ValueError(f"a store answers no {shown(other)}")
        return []


#: Servers of this process by their address.
_listening: weakref.WeakValueDictionary[Address, TcpServer] = weakref.WeakValueDictionary()


def _make_room(address: Address) -> None:
    """Stop listening for a failed group if the next group takes its address."""
    before = _listening.pop(address, None)
    if before is not None and before.board.failed:
        before.close(0.0)


def _checked(name: str, value: Any, size: int) -> Any:
    """Return a field of a message; raise ValueError for values invalid in a group of this size."""
    if name == "timeout":
        right = isinstance(value, (int, float)) and 0 <= value <= threading.TIMEOUT_MAX
        wanted = f"0 to {threading.TIMEOUT_MAX:g} seconds"
    elif name in ("source", "of"):
        right, wanted = type(value) is int and 0 <= value < size, f"a rank below {size}"
    else:
        right = isinstance(value, str) and len(value) <= TEXT
        wanted = f"a text of at most {TEXT} characters"
    if not right:
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")
    return value


class TcpStore(Mailbox):
    """The board of a `TcpServer`, as one rank sees it.

    Parameters
    ----------
    rank : int
    address : (str, int)
        Address of the server.
    timeout : float
        Seconds that the server may take to be there, and the others to leave it.
    server : TcpServer, optional
        That of this process: it stays until all ranks have left.
    secret : bytes or Handover
        Secret of the group, or the place where rank 0 leaves it.

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
        self.rank, self._where = rank, _named(address)
        self._timeout, self._server = timeout, server
        self._lives, self._asks = (
            _joined(rank, use, address, timeout, secret) for use in (LIVES, ASKS)
        )
        self.check()

    def gather(self, key: str, rank: int, value: bytes, timeout: float, about: str) -> list[bytes]:
        words = {"ask": "gather", "key": key, "timeout": timeout, "about": about[:TEXT]}
        return self._ask(self._asks, words, value, timeout)

    def put(self, key: str, value: bytes) -> None:
        self._ask(self._asks, {"ask": "put", "key": key}, value)

    def take(self, key: str, source: int, timeout: float) -> bytes:
        words = {"ask": "take", "key": key, "source": source, "timeout": timeout}
        return self._ask(self._asks, words, wait=timeout)[0]

    def fail(self, rank: int, cause: str) -> None:
        with contextlib.suppress(RankError):  # rank 0 has ended: everybody knows
            self._ask(self._lives, {"ask": "fail", "of": rank, "cause": cause[:TEXT]})

    def check(self) -> None:
        self._ask(self._lives, {"ask": "check"})

    def leave(self) -> None:
        """Tell the server, and close the connections."""
        self._ask(self._lives, {"ask": "leave"})
        for channel in (self._asks, self._lives):
            channel.connection.close()
        if self._server is not None:
            self._server.close(self._timeout)

    def _ask(
        self, channel: Channel, words: dict[str, Any], value: bytes = b"", wait: float = 0.0
    ) -> list[bytes]:
        try:
            frame = channel.ask(words, value, wait + GRACE)
        except OSError as error:
            raise RankError(
                0, f"ended: the store that it holds at {self._where} does not answer ({error})"
            ) from error
        if "error" in frame.words:
            raise RankError(*frame.words["error"])
        if "refused" in frame.words:
            raise RankError(
                self.rank, f"asked the store at {self._where} in vain: {frame.words['refused']}"
            )
        values, start = [], 0
        for length in frame.words["lengths"]:
            values.append(bytes(frame.value[start : start + length]))
            start += length
        return values


def _joined(
    rank: int, use: int, address: Address, timeout: float, known: bytes | Handover
) -> Channel:
    """Return a connection that a store has let in; RankError if none does within the timeout."""
    where, pause, end = _named(address), RETRY, time.monotonic() + timeout
    while True:
        try:
            return _try_to_join(rank, use, address, known)
        except OSError as error:
            # NOTE: what rank 0 leaves may still be the secret of a group before this one.
            final = isinstance(error, BrokenFrameError) and isinstance(known, bytes)
            if final or time.monotonic() > end:
                raise _cause(rank, where, timeout, error) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_RETRY)


def _cause(rank: int, where: str, timeout: float, error: OSError) -> RankError:
    """Return the error for a rank that could not join."""
    if isinstance(error, BrokenFrameError):
        return RankError(rank, f"has another secret than the store at {where}: {ADVICE}")
    if isinstance(error, FileNotFoundError):
        found = f"found no secret of the group at {where} in {error.filename} within {timeout:g} s"
        return RankError(rank, f"{found}: {ADVICE}")
    return RankError(0, f"holds no store at {where} after {timeout:g} s ({error})")


def _try_to_join(rank: int, use: int, address: Address, known: bytes | Handover) -> Channel:
    """Return a connection that a store has let in.

    FileNotFoundError: rank 0 has left no secret so far. BrokenFrameError: the store has another
    one. OSError: there is no store. RankError: it refuses this rank.
    """
    with contextlib.ExitStack() as closing:
        connection = closing.enter_context(socket.create_connection(address, timeout=GRACE))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secret = known if isinstance(known, bytes) else known.find()
        channel = frames.join(connection, rank, use, secret, GRACE)
        if refused := channel.answer(GRACE).words["refused"]:
            raise RankError(rank, refused)
        closing.pop_all()
        return channel


def _named(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _family(address: Address) -> socket.AddressFamily:
    """Return IPv4 if the host has such an address, otherwise its own family."""
    families: list[socket.AddressFamily] = []
    with contextlib.suppress(socket.gaierror):  # which is said, with the name, by who listens there
        families = [found[0] for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]
    return families[0] if families and socket.AF_INET not in families else socket.AF_INET


def _shut(connection: socket.socket) -> None:
    """End the wait of another thread on a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
