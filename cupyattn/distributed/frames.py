"""Authenticated messages on a TCP connection: how a rank joins, how messages look, their limits.

Each side sends a fresh nonce. From both nonces and the secret of the group follow the keys of the
connection, one for each direction. Every message carries its number and two codes (HMAC-SHA256):
one of its header, which announces a length, and one of everything. A length is believed only after
the code of its header. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The first bytes of both sides; the number changes with the layout of anything below.
MAGIC = b"CUPYATTN-STORE-3"
_NONCE, _CODE = 32, 32
#: Bytes of a greeting: MAGIC and a nonce.
GREETING = len(MAGIC) + _NONCE
#: Behind the greeting of a rank: its number and the use of the connection. The code of `_PROVES`
#: follows, which proves that the rank knows the secret.
_WHO = struct.Struct("!IB")
_PROVES = b"join"
#: Number of a message, bytes of its body: JSON, a newline, and a value of any bytes.
_HEADER = struct.Struct("!QQ")
#: Bytes that are read at a time.
_CHUNK = 2**20
#: Uses of a connection: a rank has one of each.
ASKS, LIVES = 0, 1


@dataclass(frozen=True)
class Limits:
    """Limits of the messages that a store accepts."""

    #: Bytes of the words of a message (JSON), and of words and value.
    words: int = 2**20
    value: int = 2**34
    #: Connections that have not proved yet that they know the secret. One more closes the oldest.
    joining: int = 64
    #: Seconds that such a connection has.
    join_seconds: float = 10.0
    #: Seconds for a message from its first byte to its last, plus its bytes divided by the rate.
    message_seconds: float = 60.0
    rate: float = 2.0**20


class BrokenFrameError(ConnectionError):
    """The other side is not of the group, or announces too much: the connection is of no use."""


class Frame(NamedTuple):
    """A message: its number, its words, its value, and why it is refused (empty: it is not)."""

    number: int
    words: dict[str, Any]
    value: memoryview | bytes = b""
    refusal: str = ""


def _code(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


# ---- joining -------------------------------------------------------------------------------------


def admit(connection: socket.socket, secret: bytes, limits: Limits) -> tuple[Channel, int, int]:
    """Greet a connection that wants to join; return its channel, its rank and its use.

    Rank and use are authentic, but the group may have no such rank. BrokenFrameError for another
    secret or no request to join. OSError if the connection closes or the request is late.
    """
    deadline = time.monotonic() + limits.join_seconds
    greeting = MAGIC + secrets.token_bytes(_NONCE)
    connection.settimeout(limits.join_seconds)
    connection.sendall(greeting)
    asked = bytes(_exactly(connection, GREETING + _WHO.size, deadline))
    proof = _exactly(connection, _CODE, deadline)
    if not asked.startswith(MAGIC):
        raise BrokenFrameError("malformed")
    channel = Channel(connection, secret, greeting + asked, limits, of_store=True)
    if not hmac.compare_digest(_code(channel.receives, _PROVES), proof):
        # NOTE: an answer with a code would let a stranger try secrets without asking again.
        connection.sendall(bytes(_HEADER.size + _CODE))
        raise BrokenFrameError("wrong secret")
    return channel, *_WHO.unpack(asked[GREETING:])


def join(connection: socket.socket, rank: int, use: int, secret: bytes, seconds: float) -> Channel:
    """Ask to join a store, which answers by message 0.

    OSError if the connection closes, or if the store is silent or of another version.
    """
    greeting = bytes(_exactly(connection, GREETING, time.monotonic() + seconds))
    if not greeting.startswith(MAGIC):
        raise ConnectionError("the server there is no store of this version")
    asked = MAGIC + secrets.token_bytes(_NONCE) + _WHO.pack(rank, use)
    # NOTE: an answer may hold what every rank has left.
    channel = Channel(connection, secret, greeting + asked, Limits(value=2**62), of_store=False)
    connection.sendall(asked + _code(channel.sends, _PROVES))
    return channel


# ---- messages ------------------------------------------------------------------------------------


class Channel:
    """A connection of a store and a rank, as one of them sees it.

    Its keys follow from the secret and the greetings of both sides, `said`.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, said: bytes, limits: Limits, of_store: bool
    ) -> None:
        self.connection, self._limits = connection, limits
        keys = [_code(secret, way + said) for way in (b"to the store", b"from the store")]
        self.receives, self.sends = keys if of_store else keys[::-1]
        self.lock, self.number = threading.Lock(), 0  # of the last question

    def send(self, number: int, words: dict[str, Any], values: Iterable[Any] = ()) -> None:
        """Send a message whose value is all of these, one behind the other."""
        parts = [json.dumps(words).encode() + b"\n", *values]
        length = sum(len(part) for part in parts)
        header = _HEADER.pack(number, length)
        code = _code(self.sends, header)
        whole = hmac.new(self.sends, code, "sha256")
        for part in parts:
            whole.update(part)
        self.connection.settimeout(self._seconds(length))
        self.connection.sendall(b"".join((header, code, *parts, whole.digest())))

    def receive(self, wait: float | None) -> Frame:
        """Return the next message; its first byte must come within `wait` seconds (None: no limit).

        BrokenFrameError if it is not authentic or announces too many bytes. OSError if the
        connection closes or the message is late.
        """
        self.connection.settimeout(wait)
        start = _exactly(self.connection, 1, None)
        begun = time.monotonic()
        start += _exactly(self.connection, _HEADER.size + _CODE - 1, begun + self._seconds(0))
        header, code = bytes(start[: _HEADER.size]), bytes(start[_HEADER.size :])
        if not hmac.compare_digest(_code(self.receives, header), code):
            raise BrokenFrameError("the header of a message has a wrong code")
        number, length = _HEADER.unpack(header)
        if length > self._limits.value:
            raise BrokenFrameError(
                f"a message announces {length} bytes, at most {self._limits.value} are accepted"
            )
        body = _exactly(self.connection, length + _CODE, begun + self._seconds(length))
        view, end = memoryview(body)[:length], body.find(b"\n", 0, self._limits.words)
        whole = hmac.new(self.receives, code, "sha256")
        whole.update(view)
        if not hmac.compare_digest(whole.digest(), body[length:]):
            return Frame(number, {}, refusal="its code does not match its message")
        try:
            words = json.loads(bytes(view[: max(end, 0)]))
        except (ValueError, RecursionError) as error:
            return Frame(number, {}, refusal=f"its words are no JSON: {error}"[:200])
        if not isinstance(words, dict):
            return Frame(number, {}, refusal=f"its words are a {type(words).__name__}, no object")
        return Frame(number, words, view[end + 1 :])

    def ask(self, words: dict[str, Any], value: bytes, wait: float) -> Frame:
        """Send a question, one thread at a time, and return the answer."""
        with self.lock:
            self.number += 1
            self.send(self.number, words, [value])
            return self.answer(wait)

    def answer(self, wait: float) -> Frame:
        """Return the answer to the last question; BrokenFrameError if it was changed on its way."""
        while (frame := self.receive(wait)).number != self.number and not frame.refusal:
            pass  # an older number: a message was repeated on its way
        if frame.refusal:
            raise BrokenFrameError(frame.refusal)
        return frame

    def _seconds(self, length: int) -> float:
        return self._limits.message_seconds + length / self._limits.rate


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    """Return so many bytes; ConnectionError or, past the deadline, TimeoutError."""
    found = bytearray(count)
    view, at = memoryview(found), 0
    while at < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        some = connection.recv_into(view[at : at + _CHUNK])
        if not some:
            raise ConnectionError("the other side has closed the connection")
        at += some
    return found
