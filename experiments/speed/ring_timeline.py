"""What does a ring of two devices do when, and which part of it waits for another?

Varies       keys and values in 16 bits, or their codes; transport; causal or not
Holds fixed  24 heads of head_dim 128, 118,800 rows (a video of Wan), float16, two devices
Measures     milliseconds at which each stage of one call begins and ends on each rank; by events of
             its streams, and by the host's clock; and the share of the exchange that overlaps
             attention
Run          python -m experiments.speed.ring_timeline [--quick] [--length N] [--heads N]
             [--transport nccl copies] [--json FILE]

Stages are marked in the library's own call: its functions are wrapped while one call runs. Events
between launches cost a few microseconds each, where a call takes 100 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

from cupyattn import distributed
from cupyattn.cli import output
from cupyattn.distributed import codes, copies, merging, nccl, rank_calls, ring
from cupyattn.distributed.start import TRANSPORTS
from experiments._harness import recording
from experiments.speed.scaling import (
    HEAD_DIM,
    STRONG,
    Problem,
    Way,
    call_of,
    carrier,
    check_devices,
    platform,
)

#: Rows of the table: rings of 16 bits and of codes.
WAYS = tuple(way for way in STRONG if way.ulysses == 1)
#: Calls before the one that is marked.
WARM = 3
#: Milliseconds of the shortest stage that is printed.
SHORTEST = 0.02


class Span(NamedTuple):
    """A stage, in milliseconds from the begin of the call."""

    name: str
    begin: float
    end: float
    #: When the host came to it.
    host: float


def milliseconds() -> float:
    """Return the host's clock."""
    return 1e3 * time.perf_counter()


class Timeline:
    """Events of the stages of one rank's call.

    Attributes
    ----------
    stages : list of (str, event, event, float)
        Name, begin and end, and the host's moment in milliseconds before it begins.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.stages: list[tuple[str, Any, Any, float]] = []

    def event(self, stream: Any = None) -> Any:
        """Return an event of a stream's moment, of the current one by default."""
        event = self._cupy.cuda.Event()
        event.record(stream)
        return event

    @contextlib.contextmanager
    def stage(self, name: str, stream: Any = None) -> Iterator[None]:
        """Mark all work that is launched within."""
        now, begin = milliseconds(), self.event(stream)
        yield
        self.stages.append((name, begin, self.event(stream), now))

    def between(self, begin: Any, end: Any) -> float:
        """Return the milliseconds between two events."""
        return float(self._cupy.cuda.get_elapsed_time(begin, end))

    def spans(self) -> list[Span]:
        """Return the stages in the order in which they begin; the whole call ends last."""
        if self._cupy is not None:
            self._cupy.cuda.Device().synchronize()
        _, first, _, start = self.stages[-1]  # of the whole call
        spans = [
            Span(name, self.between(first, begin), self.between(first, end), host - start)
            for name, begin, end, host in self.stages
        ]
        return sorted(spans, key=lambda span: span.begin)


class HostTimeline(Timeline):
    """The same by the host's clock, for ranks without devices."""

    def __init__(self) -> None:
        super().__init__(None)

    def event(self, stream: Any = None) -> Any:
        """Return the moment in milliseconds."""
        return milliseconds()

    def between(self, begin: Any, end: Any) -> float:
        """Return the milliseconds between two moments."""
        return float(end - begin)


#: Marks of this thread's rank, while its call is marked.
_marked = threading.local()


def _staged(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function on the stream that computes."""

    @functools.wraps(inner)
    def staged(*given: Any, **options: Any) -> Any:
        timeline = getattr(_marked, "timeline", None)
        if timeline is None:
            return inner(*given, **options)
        with timeline.stage(name):
            return inner(*given, **options)

    return staged


def _travelling(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of a group on the stream that its arrays travel on."""

    @functools.wraps(inner)
    def travelling(group: Any, *given: Any) -> Any:
        timeline = getattr(_marked, "timeline", None)
        if timeline is None:
            return inner(group, *given)
        with group.on_device():
            if isinstance(group, nccl.NcclGroup):  # it begins when the sent arrays are ready
                group._stream.wait_event(timeline.event())
            with timeline.stage("exchange", group._stream):
                return inner(group, *given)

    return travelling


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Wrap the stages of the library's rings."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in (
            (codes.TravellingCodes, "__init__", "quantise K, V"),
            (codes.TravellingCodes, "_query_codes", "quantise Q"),
            (codes, "run_attention", "attention"),
            (rank_calls, "_forward", "attention"),
            (merging.Partial, "add", "merge"),
            (ring, "empty_like_forms", "allocate"),
        ):
            inner = getattr(owner, attribute)
            stack.enter_context(mock.patch.object(owner, attribute, _staged(name, inner)))
        for group, attribute in ((nccl.NcclGroup, "_prepare"), (copies.CopyGroup, "send_off")):
            inner = getattr(group, attribute)
            stack.enter_context(mock.patch.object(group, attribute, _travelling(inner)))
        yield


def timelines(
    way: Way, problem: Problem, ranks: int | Sequence[int], transport: str, seed: int
) -> list[list[Span]]:
    """Return the spans of one call on each of two ranks; the first is the whole call."""
    rows = problem.partition(2)

    def on_rank(group: Any) -> Any:
        xp, wait, _ = platform(ranks)
        rng = xp.random.default_rng(seed + group.rank)
        shape = problem.batch, problem.heads, rows.lengths[group.rank], problem.head_dim
        operands = [rng.standard_normal(shape, dtype="f4").astype("f2") for _ in range(3)]
        call = call_of(way, problem, group)
        for _ in range(WARM):
            call(*operands)
        wait()
        group.barrier()
        timeline = HostTimeline() if isinstance(ranks, int) else Timeline(xp)
        _marked.timeline = timeline
        with timeline.stage("call"):
            call(*operands)
        _marked.timeline = None
        return timeline.spans()

    with marked():
        found: list[Any] = distributed.run(on_rank, ranks, transport=transport)
    return found


def beside(spans: Sequence[Span]) -> float:
    """Return the share of the exchange that lies beside attention.

    Examples
    --------
    >>> stages = ("attention", 0.0, 4.0), ("exchange", 3.0, 5.0), ("attention", 4.5, 6.0)
    >>> beside([Span(*stage, host=0.0) for stage in stages])
    0.75
    """
    exchanges, attention = (
        [span for span in spans if span.name == name] for name in ("exchange", "attention")
    )
    covered = sum(
        max(0.0, min(span.end, other.end) - max(span.begin, other.begin))
        for span in exchanges
        for other in attention
    )
    return covered / max(sum(span.end - span.begin for span in exchanges), 1e-9)


def run(args: argparse.Namespace) -> int:
    """Mark one call of each way, print the stages and write the record."""
    if not args.quick:
        check_devices(2)
    ranks = 2 if args.quick else [0, 1]
    length, heads, head_dim = (256, 2, 32) if args.quick else (args.length, args.heads, HEAD_DIM)
    rows = []
    for causal in (False, True):
        problem = Problem(1, heads, length, causal, head_dim=head_dim)
        for way in WAYS:
            for transport in args.transport[: 1 if args.quick else None]:
                for rank, spans in enumerate(timelines(way, problem, ranks, transport, args.seed)):
                    (call_ms,) = (x.end - x.begin for x in spans if x.name == "call")
                    rows.append({
                        "way": way.name, "problem": problem.name, "rank": rank,
                        "transport": carrier(transport, ranks), "call_ms": call_ms,
                        "beside_attention": beside(spans), "stages": spans,
                    })  # fmt: skip
    for row in rows:
        print(
            f"\n{row['problem']}, {row['way']}, {row['transport']}, rank {row['rank']}: "
            f"{row['call_ms']:.2f} ms; {row['beside_attention']:.0%} of the exchange lies beside "
            "attention"
        )
        longest = [span for span in row["stages"] if span.end - span.begin > SHORTEST]
        output.print_table(
            ["stage", "host comes, ms", "begins, ms", "ends, ms", "takes, ms"],
            [
                [x.name, *(f"{n:.2f}" for n in (x.host, x.begin, x.end, x.end - x.begin))]
                for x in longest
            ],
        )
    recording.keep(args, "ring_timeline", "mirror" if args.quick else "cuda", {"rows": rows})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--length", type=int, default=118800, metavar="N")
    parser.add_argument("--heads", type=int, default=24, metavar="N")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, nargs="+", default=list(TRANSPORTS[1:])
    )
    return recording.guarded(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
