"""Authenticated messages on a TCP connection: how a rank joins, how messages look, their limits.

Both sides know the secret of the group and prove it to each other by HMAC-SHA256 over two fresh
nonces. From the nonces follow the keys of the connection, one for each direction. Every message
carries a sequence number and two codes: one of its header, which announces the lengths, and one of
everything. A length is believed only after the code of its header. Nothing is encrypted.
"""

from __future__ import annotations

import enum
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The first bytes of both sides; the number changes with the layout of anything below.
MAGIC = b"CUPYATTN-STORE-2"
_NONCE, _CODE = 32, 32
#: What a rank says to join, between the nonce and the code: its number, the use of the connection.
_WHO = struct.Struct("!IB")
#: Beginning, sequence number, bytes of the words (JSON), bytes of the value behind them.
_HEADER = struct.Struct("!4sQIQ")
_BEGIN = b"CAFM"
#: Bytes that are read, hashed and sent at a time.
_CHUNK = 2**20
#: A message of at most so many bytes is sent by one call.
_SMALL = 2**16
#: Uses of a connection: a rank has one of each.
ASKS, LIVES = 0, 1


@dataclass(frozen=True)
class Limits:
    """What a store accepts.

    Parameters
    ----------
    words : int
        Bytes of the JSON of a message.
    value : int
        Bytes of the value of a message.
    key : int
        Characters of a key.
    keys : int
        Keys that hold a value at a time.
    joining : int
        Connections that have not proved yet that they know the secret. One more closes the oldest.
    join_seconds : float
        Seconds that such a connection has.
    message_seconds, rate : float
        Seconds that a message may take from its first byte to its last, and the bytes per second
        that are expected of what is longer.
    """

    words: int = 2**20
    value: int = 2**34
    key: int = 1024
    keys: int = 2**16
    joining: int = 64
    join_seconds: float = 10.0
    message_seconds: float = 60.0
    rate: float = 2.0**20

    def seconds(self, count: int) -> float:
        """Return the seconds that a message of so many bytes may take."""
        return self.message_seconds + count / self.rate


class Verdict(enum.IntEnum):
    """The answer to a connection that wants to join."""

    WELCOME = 0
    MALFORMED = 1
    TOO_SLOW = 2
    WRONG_SECRET = 3
    NO_SUCH_RANK = 4
    RANK_IS_TAKEN = 5


class JoinError(Exception):
    """A connection does not join the group.

    Parameters
    ----------
    verdict : Verdict
        Why.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.name.lower().replace("_", " "))
        self.verdict = verdict

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.verdict,), vars(self)  # notes are among them


class BrokenFrameError(Exception):
    """Where the next message begins is not known: the connection is of no more use."""


class RefusedFrameError(Exception):
    """A message is refused; the connection goes on.

    Parameters
    ----------
    sequence : int
        Its number.
    cause : str
        Why.
    """

    def __init__(self, sequence: int, cause: str) -> None:
        super().__init__(cause)
        self.sequence = sequence

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sequence, str(self)), vars(self)  # notes are among them


class Frame(NamedTuple):
    """A message: its number, its words, its value."""

    sequence: int
    words: dict[str, Any]
    value: bytearray


def _code(key: bytes, *messages: bytes) -> bytes:
    return hmac.digest(key, b"".join(messages), "sha256")


# ---- joining -------------------------------------------------------------------------------------


def greet(connection: socket.socket, deadline: float) -> bytes:
    """Send the greeting of a store, and return it."""
    greeting = MAGIC + secrets.token_bytes(_NONCE)
    _set_deadline(connection, deadline)
    connection.sendall(greeting)
    return greeting


def admit(
    connection: socket.socket, greeting: bytes, secret: bytes, deadline: float
) -> tuple[int, int, bytes]:
    """Read who wants to join, and check that they know the secret.

    Returns
    -------
    rank, use : int
        As the other side says; not checked.
    said : bytes
        What both sides have said, for `decide` and `Channel`.

    Raises
    ------
    JoinError
        If it is no request to join, comes too late or is made with another secret.
    OSError
        If the connection closes.
    """
    try:
        begin = _exactly(connection, len(MAGIC), deadline)
        if begin != MAGIC:
            raise JoinError(Verdict.MALFORMED)
        rest = _exactly(connection, _NONCE + _WHO.size, deadline)
        code = _exactly(connection, _CODE, deadline)
    except TimeoutError:
        raise JoinError(Verdict.TOO_SLOW) from None
    said = greeting + begin + rest
    if not hmac.compare_digest(_code(secret, b"join", said), code):
        raise JoinError(Verdict.WRONG_SECRET)
    rank, use = _WHO.unpack(rest[_NONCE:])
    return rank, use, said


def decide(connection: socket.socket, secret: bytes, said: bytes, verdict: Verdict) -> None:
    """Send the answer to a request to join; `said` is empty where there was no valid one."""
    sent = bytes([verdict])
    connection.sendall(sent + (_code(secret, b"verdict", said, sent) if said else bytes(_CODE)))


def join(connection: socket.socket, rank: int, use: int, secret: bytes, greeting: bytes) -> bytes:
    """Ask to join; return what both sides have said, for `Channel`.

    Raises
    ------
    JoinError
        If the store refuses, or does not know the secret.
    OSError
        If the connection closes or the store does not answer.
    """
    said = greeting + MAGIC + secrets.token_bytes(_NONCE) + _WHO.pack(rank, use)
    connection.sendall(said[len(greeting) :] + _code(secret, b"join", said))
    answer = _exactly(connection, 1 + _CODE, _deadline_of(connection))
    expected = _code(secret, b"verdict", said, bytes(answer[:1]))
    if not hmac.compare_digest(expected, answer[1:]):
        raise JoinError(Verdict.WRONG_SECRET)
    if answer[0] != Verdict.WELCOME:
        raise JoinError(Verdict(answer[0]))
    return said


def read_greeting(connection: socket.socket) -> bytes:
    """Return the greeting of a store; ConnectionError where something else listens."""
    greeting = _exactly(connection, len(MAGIC) + _NONCE, _deadline_of(connection))
    if not greeting.startswith(MAGIC):
        raise ConnectionError("what listens there is no store of this version")
    return bytes(greeting)


# ---- messages ------------------------------------------------------------------------------------


class Channel:
    """A connection whose two sides have proved that they know the secret.

    Parameters
    ----------
    connection : socket.socket
        After `join` or `decide`.
    secret, said : bytes
        The secret, and what both sides have said.
    of_store : bool
        Whether this is the store's side.
    limits : Limits
        What it accepts.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, said: bytes, of_store: bool, limits: Limits
    ) -> None:
        self._connection, self._limits = connection, limits
        keys = _code(secret, b"to the store", said), _code(secret, b"from the store", said)
        self._receives, self._sends = keys if of_store else keys[::-1]

    def send(self, sequence: int, words: dict[str, Any], values: Sequence[Any] = ()) -> None:
        """Send a message; ValueError where it is longer than what is accepted."""
        said, limits = json.dumps(words).encode(), self._limits
        count = sum(len(value) for value in values)
        if len(said) > limits.words:
            raise ValueError(f"the words of a message are {len(said)} bytes, {limits.words} may be")
        header = _HEADER.pack(_BEGIN, sequence, len(said), count)
        code = hmac.new(self._sends, header + said, "sha256")
        begin = header + _code(self._sends, b"header", header) + said
        self._connection.settimeout(limits.seconds(count))
        if count <= _SMALL:
            value = b"".join(values)
            code.update(value)
            self._connection.sendall(begin + value + code.digest())
            return
        self._connection.sendall(begin)
        for value in values:
            view = memoryview(value)
            for start in range(0, len(view), _CHUNK):
                code.update(view[start : start + _CHUNK])
                self._connection.sendall(view[start : start + _CHUNK])
        self._connection.sendall(code.digest())

    def receive(
        self, expected: int | None, wait: float | None, value_limit: int | None = None
    ) -> Frame:
        """Return the next message.

        Parameters
        ----------
        expected : int or None
            Its number; None: any.
        wait : float or None
            Seconds until its first byte; None: without end.
        value_limit : int, optional
            In place of the limits'.

        Raises
        ------
        BrokenFrameError
            If it is not of the other side, or announces too much.
        RefusedFrameError
            If it is another number's, was changed or is no JSON.
        OSError
            If the connection closes, or too much time passes: TimeoutError.
        """
        limits = self._limits
        self._connection.settimeout(wait)
        first = _exactly(self._connection, 1, None)
        deadline = time.monotonic() + limits.message_seconds
        rest = _exactly(self._connection, _HEADER.size + _CODE - 1, deadline)
        header, code = bytes(first + rest[: _HEADER.size - 1]), rest[_HEADER.size - 1 :]
        if not hmac.compare_digest(_code(self._receives, b"header", header), code):
            raise BrokenFrameError("the header of a message has a wrong code")
        _, sequence, of_words, of_value = _HEADER.unpack(header)
        most = limits.value if value_limit is None else value_limit
        if of_words > limits.words or of_value > most:
            raise BrokenFrameError(
                f"a message announces {of_words} and {of_value} bytes, at most {limits.words} "
                f"and {most} are accepted"
            )
        deadline += of_value / limits.rate
        if expected is not None and sequence != expected:
            self._skip(of_words + of_value + _CODE, deadline)
            raise RefusedFrameError(sequence, f"number {sequence} came, {expected} is the next")
        found = hmac.new(self._receives, header, "sha256")
        said = _exactly(self._connection, of_words, deadline, found)
        value = _exactly(self._connection, of_value, deadline, found)
        code = _exactly(self._connection, _CODE, deadline)
        if not hmac.compare_digest(found.digest(), code):
            raise RefusedFrameError(sequence, "its code is not that of what it says")
        try:
            words = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise RefusedFrameError(sequence, f"its words are no JSON: {error}"[:200]) from None
        if not isinstance(words, dict):
            raise RefusedFrameError(sequence, f"its words are a {type(words).__name__}, no object")
        return Frame(sequence, words, value)

    def _skip(self, count: int, deadline: float) -> None:
        while count:
            count -= len(_exactly(self._connection, min(count, _CHUNK), deadline))


def _exactly(
    connection: socket.socket, count: int, deadline: float | None, code: Any = None
) -> bytearray:
    """Return so many bytes, and update a code with them.

    ConnectionError where the other side has closed, TimeoutError past the deadline.
    """
    found = bytearray(count)
    view, at = memoryview(found), 0
    while at < count:
        if deadline is not None:
            _set_deadline(connection, deadline)
        some = connection.recv_into(view[at : at + _CHUNK])
        if not some:
            raise ConnectionError("the other side has closed the connection")
        if code is not None:
            code.update(view[at : at + some])
        at += some
    return found


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left)


def _deadline_of(connection: socket.socket) -> float | None:
    """Return when the timeout of a connection ends, from now on."""
    timeout = connection.gettimeout()
    return None if timeout is None else time.monotonic() + timeout
