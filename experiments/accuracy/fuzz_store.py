"""Does a group at work survive hostile messages to its store, and is each of them answered?

Varies       the message: strangers' bytes, half messages and floods; joins with a wrong secret, a
             repeated one or a wrong rank; authentic messages of a member that make no sense
Holds fixed  three ranks on loopback that gather words and exchange arrays all the while
Measures     answers, closed connections, seconds until either; rounds of the group, memory used
Run          python -m experiments.accuracy.fuzz_store [--count 5000] [--seed 0] [--quick]
             [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli import output
from cupyattn.distributed import HostGroup, RankError, frames, secret
from cupyattn.distributed.frames import ASKS, LIVES, Channel, Limits
from cupyattn.distributed.tcp import TcpServer, TcpStore
from experiments._harness import recording

RANKS = 3
#: Seconds for a connection to join: short, since half messages wait for their end.
LIMITS = Limits(join_seconds=0.4)
#: Seconds within which a message has its answer or a closed connection, on a busy machine.
BOUND = 10.0
#: Bytes that the process may grow by.
GROWTH = 256 * 2**20
#: Connections of a flood: more than may be joining at a time.
FLOOD = LIMITS.joining + 16


def rss() -> int:
    """Return the bytes of memory of this process; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


class Group:
    """Three ranks that work until they are told to stop."""

    def __init__(self) -> None:
        self.secret = secret.make()
        self.server = TcpServer(RANKS, secret=self.secret, limits=LIMITS)
        self.address = self.server.address
        self.rounds, self.errors = [0] * RANKS, list[str]()
        self.stop, self.stores = threading.Event(), dict[int, TcpStore]()
        self._threads = [threading.Thread(target=self._work, args=(r,)) for r in range(RANKS)]
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + 30
        while min(self.rounds) < 1 and not self.errors and time.monotonic() < end:
            time.sleep(0.01)

    def _work(self, rank: int) -> None:
        try:
            store = TcpStore(
                rank, self.address, 30, self.server if rank == 0 else None, secret=self.secret
            )
            self.stores[rank] = store
            with HostGroup(store, rank, RANKS, 30) as group:
                while not all(group.gather("stop", self.stop.is_set())):
                    self._round(group)
        except Exception as error:  # noqa: BLE001 - any error is a finding
            self.errors.append(f"rank {rank}: {type(error).__name__}: {error}")

    def _round(self, group: HostGroup) -> None:
        rank, count = group.rank, self.rounds[group.rank]
        after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
        found = np.empty(1000, np.int64)
        group.exchange([(after, np.arange(1000) * rank + count)], [(before, found)]).wait()
        if not np.array_equal(found, np.arange(1000) * before + count):
            raise RankError(before, "sent other numbers")
        self.rounds[rank] += 1
        time.sleep(0.002)

    def close(self) -> None:
        """Let the ranks stop together, and the server end."""
        self.stop.set()
        for thread in self._threads:
            thread.join(60)
            if thread.is_alive():
                self.errors.append("a rank did not stop")
        self.server.close(0.0)


@dataclass
class Row:
    """Results of the messages of a kind."""

    kind: str
    messages: int = 0
    answered: int = 0
    closed: int = 0
    neither: int = 0
    longest: float = 0.0


@dataclass
class Fuzzer:
    """Makes hostile messages, and sees what becomes of them.

    Every method that is in `kinds` sends one and returns "answered" or "closed"; OSError where
    neither came within the bound.
    """

    group: Group
    random: random.Random

    def kinds(self) -> dict[str, tuple[int, Callable[[], str]]]:
        """Return how often each kind comes, relative to the others, and what sends one."""
        return {
            "random bytes": (20, self.random_bytes),
            "a join cut short": (10, self.cut_short),
            "half a join, then nothing": (1, self.half),
            "a huge length": (10, self.huge),
            "JSON of the layout before": (10, self.old_layout),
            "wrong secret": (10, self.wrong_secret),
            "repeated join": (10, self.repeated),
            "reflected greeting": (5, self.reflected),
            "rank out of range": (5, self.wrong_rank),
            "rank that is there": (5, self.same_rank),
            "flood of connections": (1, self.flood),
            "member: words that make no sense": (40, self.member_words),
            "member: bytes that are no JSON": (20, self.member_bytes),
            "member: wrong code": (10, self.member_code),
            "member: repeated or skipped number": (10, self.member_number),
        }

    # ---- strangers -------------------------------------------------------------------------------

    def send(self, data: bytes | Callable[[bytes], bytes], *, ends: bool = True) -> str:
        """Send bytes, or what follows from the greeting, on a new connection."""
        with socket.create_connection(self.group.address, timeout=BOUND) as connection:
            with contextlib.suppress(ConnectionError):
                greeting = read_greeting(connection)
                connection.sendall(data if isinstance(data, bytes) else data(greeting))
                if ends:
                    with contextlib.suppress(OSError):  # the store has closed it already
                        connection.shutdown(socket.SHUT_WR)
            return wait_for_answer(connection)

    def random_bytes(self) -> str:
        data = self.random.randbytes(self.random.choice((0, 1, 16, 84, 85, 5000)))
        return self.send(data if self.random.random() < 0.5 else frames.MAGIC + data)

    def cut_short(self) -> str:
        whole = self.joining(self.group.secret, 1)
        return self.send(lambda greeting: whole(greeting)[: self.random.randrange(84)])

    def half(self) -> str:
        whole = self.joining(self.group.secret, 1)
        return self.send(lambda greeting: whole(greeting)[: self.random.randrange(84)], ends=False)

    def huge(self) -> str:
        length = self.random.choice((2**32 - 1, 2**63, 2**34 + 1, 2**40))
        header = frames._HEADER.pack(1, length)
        return self.send(self.random.choice((b"", frames.MAGIC)) + header + bytes(4000))

    def old_layout(self) -> str:
        words = {"ask": "fail", "rank": 1, "of": 0, "cause": "was told to"}
        said = self.random.choice((json.dumps(words).encode(), b"[" * 50_000, b"\xff\xfe{", b"{"))
        return self.send(len(said).to_bytes(4, "big") + bytes(8) + said)

    def joining(self, known: bytes, rank: int, use: int = ASKS) -> Callable[[bytes], bytes]:
        def data(greeting: bytes) -> bytes:
            asked = frames.MAGIC + self.random.randbytes(32) + frames._WHO.pack(rank, use)
            said = greeting + asked
            channel = Channel(None, known, said, LIMITS, of_store=False)  # type: ignore[arg-type]
            return asked + frames._code(channel.sends, frames._PROVES)

        return data

    def wrong_secret(self) -> str:
        known = self.random.choice((b"", b"x" * 64, self.group.secret[:-1], self.group.secret * 2))
        return self.send(self.joining(known, self.random.randrange(RANKS)))

    def repeated(self) -> str:
        earlier = self.joining(self.group.secret, self.random.randrange(RANKS))
        recorded = earlier(frames.MAGIC + self.random.randbytes(32))
        return self.send(recorded + self.random.randbytes(self.random.choice((0, 200))))

    def reflected(self) -> str:
        return self.send(lambda greeting: greeting + self.random.randbytes(37))

    def wrong_rank(self) -> str:
        rank = self.random.choice((RANKS, 7, 2**31, 2**32 - 1))
        return self.send(self.joining(self.group.secret, rank))

    def same_rank(self) -> str:
        use = self.random.choice((ASKS, LIVES, 2, 255))
        return self.send(self.joining(self.group.secret, self.random.randrange(RANKS), use))

    def flood(self) -> str:
        """Hold more connections than may join; one that knows the secret is still answered."""
        with contextlib.ExitStack() as held:
            for _ in range(FLOOD):
                held.enter_context(socket.create_connection(self.group.address, timeout=BOUND))
            return self.same_rank()

    # ---- a member --------------------------------------------------------------------------------

    def member(
        self, said: bytes, value: bytes = b"", *, code: bytes | None = None, number: int = 1
    ) -> str:
        """Send an authentic message on a connection of the last rank, so many numbers ahead.

        Only what the store refuses counts as answered.
        """
        channel = self.group.stores[RANKS - 1]._lives
        with channel.lock:
            sequence = channel.number + number
            body = said + b"\n" + value
            header = frames._HEADER.pack(sequence, len(body))
            begin = frames._code(channel.sends, header)
            end = frames._code(channel.sends, begin + body) if code is None else code
            channel.connection.sendall(header + begin + body + end)
            if number == 1:
                channel.number += 1
            frame = channel.receive(BOUND)
        if frame.number != sequence or "refused" not in frame.words:
            raise ValueError(f"answered by {frame.words} to {frame.number}")
        return "answered"

    def member_words(self) -> str:
        odd = [None, True, -1, RANKS, 10**30, 1e400, "1", "", [], {}, float("nan"), "x" * 5000]
        pick = self.random.choice
        ask = pick(["gather", "put", "take", "fail", "gone", "", None, [], {}, 5, "__class__"])
        words: dict[str, Any] = {"ask": ask, "rank": 1, "timeout": pick([-1, 1e300, *odd[:2]])}
        words |= {"key": pick([x for x in odd if not isinstance(x, str)] + ["x" * 5000])}
        words |= {"about": pick(odd), "source": pick([-1, RANKS, None, "0", 1.0, True])}
        words |= {"of": pick([-1, RANKS, None, "0", 0.0, False]), "cause": pick(odd)}
        for name in ("timeout", "key", "about", "source", "of", "cause"):
            if self.random.random() < 0.2:
                del words[name]
        return self.member(json.dumps(words).encode(), self.random.randbytes(pick((0, 9, 9000))))

    def member_bytes(self) -> str:
        deep = self.random.choice((10**3, 10**5, LIMITS.words // 2))
        words = (
            b"", b"\xff" * 9, b"[" * deep + b"]" * deep, b'{"a":' * 10**5, b"5", b"null", b"[]",
            b'"ask"', b"1" * 10**5, b'{"ask": "check"', self.random.randbytes(100), b"\0" * 99,
        )  # fmt: skip
        return self.member(self.random.choice(words))

    def member_code(self) -> str:
        said = json.dumps({"ask": "fail", "of": 0, "cause": "was told to"}).encode()
        return self.member(said, code=self.random.randbytes(32))

    def member_number(self) -> str:
        said = json.dumps({"ask": "fail", "of": 0, "cause": "was told to"}).encode()
        ahead = self.random.choice((2, 100, 10**9, 0))
        return self.member(said, self.random.randbytes(50), number=ahead)


def read_greeting(connection: socket.socket) -> bytes:
    """Return what a store sends first; ConnectionError where it has closed the connection."""
    found = b""
    while len(found) < frames.GREETING:
        if not (some := connection.recv(frames.GREETING - len(found))):
            raise ConnectionError("closed")
        found += some
    return found


def wait_for_answer(connection: socket.socket) -> str:
    """Return whether an answer came before the connection closed."""
    got, end = b"", time.monotonic() + BOUND
    with contextlib.suppress(ConnectionError):
        while some := connection.recv(4096):
            got += some
            if time.monotonic() > end:
                raise TimeoutError("the connection does not close")
    return "answered" if got else "closed"


def run(args: argparse.Namespace) -> int:
    """Send the messages, print what became of them and write the record."""
    group = Group()
    fuzzer = Fuzzer(group, random.Random(args.seed))
    kinds = fuzzer.kinds()
    weights = [weight for weight, _ in kinds.values()]
    rows = {name: Row(name) for name in kinds}
    examples: list[str] = []
    start, most, begun = rss(), 0, time.monotonic()
    count = 300 if args.quick else args.count
    chosen = [*kinds, *fuzzer.random.choices(list(kinds), weights, k=max(0, count - len(kinds)))]
    for name in chosen[:count]:  # each kind once, then by chance
        row, at = rows[name], time.monotonic()
        row.messages += 1
        try:
            became = kinds[name][1]()
            row.answered += became == "answered"
            row.closed += became == "closed"
        except (OSError, ValueError, RankError) as error:
            row.neither += 1
            examples.append(f"{name}: {type(error).__name__}: {error}"[:300])
        row.longest = max(row.longest, time.monotonic() - at)
        most = max(most, rss() - start)
        if group.errors or len(examples) > 20:
            break
    seconds = time.monotonic() - begun
    group.close()
    sent = sum(row.messages for row in rows.values())
    cells = [
        [row.kind, *map(str, (row.messages, row.answered, row.closed, row.neither))]
        + [f"{row.longest:.2f} s"]
        for row in rows.values()
    ]
    output.print_table(["message", "sent", "answered", "closed", "neither", "longest"], cells)
    found = {
        "messages": sent, "ranks": RANKS, "rounds": min(group.rounds), "errors": group.errors,
        "unanswered": examples, "growth_bytes": most, "seconds": seconds,
        "bounds": {"seconds": BOUND, "growth_bytes": GROWTH},
        "rows": [asdict(row) for row in rows.values()],
    }  # fmt: skip
    print(
        f"{sent} messages in {seconds:.0f} s, {min(group.rounds)} rounds of the group, "
        f"{most / 2**20:.1f} MiB more memory, errors of the group: {group.errors or 'none'}"
    )
    print(*examples, sep="\n", end="")
    recording.keep(args, "fuzz_store", "store", found)
    longest = max(row.longest for row in rows.values())
    good = not group.errors and not examples and most < GROWTH and longest < BOUND
    return 0 if good and sent == count else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--count", type=int, default=5000, help="messages (5000)")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
