"""A board that ranks in several processes, on several hosts, share by way of a socket.

Rank 0 holds it. Every rank has two connections: one for what it asks, which may wait, and one that
says that it lives: where that closes without a word, the rank has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
import struct
import threading
import time
from typing import Any

from cupyattn.distributed.store import Board
from cupyattn.errors import RankError

#: Bytes of the words of a message and of the value behind them.
_SIZES = struct.Struct("!IQ")
#: Seconds that an answer may take longer than what was asked for is waited for.
GRACE = 10.0
#: Seconds between two attempts to reach rank 0.
RETRY = 0.05

Address = tuple[str, int]


class TcpServer:
    """Holds the board, in threads of the process of rank 0.

    Parameters
    ----------
    size : int
        Ranks.
    address : (str, int)
        Name or number of the host that ranks reach it at, and port; 0: any that is free. It
        listens there alone, and whoever can reach it is trusted.

    Attributes
    ----------
    address : (str, int)
        With the port that was found.
    """

    def __init__(self, size: int, address: Address = ("localhost", 0)) -> None:
        self.board = Board(size)
        self._gone: set[int] = set()  # ranks that have left, or whose connection closed
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
        self._listener.close()

    def _leaves(self, rank: int) -> bool:
        """Note that a rank has gone; return whether that is news."""
        with self._changed:
            news = rank not in self._gone
            self._gone.add(rank)
            self._changed.notify_all()
        return news

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one connection until it closes."""
        rank: int | None = None
        with connection:
            while True:
                try:
                    words, value = _receive(connection)
                except OSError:
                    if rank is not None and self._leaves(rank):
                        self.board.fail(rank, "ended: its connection closed")
                    return
                rank = int(words["rank"])
                answer: dict[str, Any] = {}
                values: list[bytes] = []
                try:
                    values = self._answer(words, value)
                except RankError as error:
                    answer["error"] = [error.rank, error.cause]
                answer["lengths"] = [len(x) for x in values]
                with contextlib.suppress(OSError):  # the next receive says so, too
                    _send(connection, answer, b"".join(values))

    def _answer(self, words: dict[str, Any], value: bytes) -> list[bytes]:
        board, rank = self.board, int(words["rank"])
        match words["ask"]:
            case "gather":
                return board.gather(words["key"], rank, value, words["timeout"], words["about"])
            case "put":
                board.put(words["key"], value)
            case "take":
                return [board.take(words["key"], words["source"], words["timeout"])]
            case "fail":
                board.fail(words["of"], words["cause"])
            case "leave":
                self._leaves(rank)
            case "check":
                board.check()
        return []


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

    Raises
    ------
    RankError
        If it does not come.
    """

    def __init__(
        self, rank: int, address: Address, timeout: float, server: TcpServer | None = None
    ) -> None:
        self.rank, self._address, self._timeout, self._server = rank, address, timeout, server
        self._asks, self._lives = (_Connection(address, timeout) for _ in range(2))
        self._ask(self._lives, "check")  # now the server knows whose it is
        self._ask(self._asks, "check")

    def gather(self, key: str, rank: int, value: bytes, timeout: float, about: str) -> list[bytes]:
        """As `cupyattn.distributed.store.Store` has it."""
        how = {"key": key, "timeout": timeout, "about": about}
        return self._ask(self._asks, "gather", value, timeout, **how)

    def put(self, key: str, value: bytes) -> None:
        """As `cupyattn.distributed.store.Store` has it."""
        self._ask(self._asks, "put", value, key=key)

    def take(self, key: str, source: int, timeout: float) -> bytes:
        """As `cupyattn.distributed.store.Store` has it."""
        connection = self._asks
        return self._ask(connection, "take", wait=timeout, key=key, source=source, timeout=timeout)[
            0
        ]

    def fail(self, rank: int, cause: str) -> None:
        """As `cupyattn.distributed.store.Store` has it."""
        with contextlib.suppress(RankError):  # rank 0 has ended: everybody knows
            self._ask(self._lives, "fail", of=rank, cause=cause)

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
        try:
            words, found = connection.ask({"ask": ask, "rank": self.rank, **how}, value, wait)
        except OSError as error:
            host, port = self._address
            raise RankError(
                0, f"ended: the store that it holds at {host}:{port} does not answer ({error})"
            ) from error
        if "error" in words:
            raise RankError(*words["error"])
        values, start = [], 0
        for length in words["lengths"]:
            values.append(found[start : start + length])
            start += length
        return values


class _Connection:
    """A socket on which one thread at a time asks and is answered."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._lock = threading.Lock()
        end = time.monotonic() + timeout
        while True:
            try:
                self._socket = socket.create_connection(address, timeout=GRACE)
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise RankError(
                        0, f"holds no store at {address[0]}:{address[1]} after {timeout:g} s"
                    ) from error
                time.sleep(RETRY)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, words: dict[str, Any], value: bytes, wait: float) -> tuple[dict[str, Any], bytes]:
        """Ask, and return the answer, which may take so many seconds."""
        with self._lock:
            self._socket.settimeout(wait + GRACE)
            _send(self._socket, words, value)
            return _receive(self._socket)

    def close(self) -> None:
        self._socket.close()


def _send(connection: socket.socket, words: dict[str, Any], value: bytes) -> None:
    said = json.dumps(words).encode()
    connection.sendall(_SIZES.pack(len(said), len(value)) + said + value)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    of_words, of_value = _SIZES.unpack(_exactly(connection, _SIZES.size))
    words: dict[str, Any] = json.loads(_exactly(connection, of_words))
    return words, _exactly(connection, of_value)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes; ConnectionError where the other side has closed."""
    found = bytearray()
    while len(found) < count:
        some = connection.recv(min(count - len(found), 2**20))
        if not some:
            raise ConnectionError("the other side has closed the connection")
        found += some
    return bytes(found)
