"""The order of accesses, checked against plain vector clocks; races; arrays in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cupyattn.interpret.memory import GlobalMemory, duplicate, span
from cupyattn.interpret.ordering import WARP, Clocks
from cupyattn.interpret.shadow import Shadow

BLOCKS, THREADS = 2, 64
LANES = BLOCKS * THREADS
COUNTERS = 2

# ---- order ---------------------------------------------------------------------------------------


class PlainClocks:
    """seen[t, u]: up to which time thread t comes after what thread u did."""

    def __init__(self) -> None:
        self.now = 0
        self.seen = np.zeros((LANES, LANES), int)
        self.left = np.zeros((COUNTERS, LANES), int)  # by a counter: what was left there

    def release(self, lane: int, counter: int) -> None:
        self.seen[lane, lane] = self.now
        self.left[counter] = np.maximum(self.left[counter], self.seen[lane])

    def acquire(self, lane: int, counter: int) -> None:
        self.seen[lane] = np.maximum(self.seen[lane], self.left[counter])

    def meet(self, lanes: np.ndarray) -> None:
        self.seen[lanes, lanes] = self.now
        self.seen[lanes] = self.seen[lanes].max(axis=0)

    def ordered(self, lane: int, other: int, time: int) -> bool:
        return lane == other or time <= self.seen[lane, other]


def lanes_of(block: int, warps: list[int], mask: int) -> np.ndarray:
    lanes = np.arange(THREADS).reshape(-1, WARP)[sorted(set(warps))]
    here = [bool(mask >> i & 1) for i in range(WARP)]
    return block * THREADS + lanes[:, here].ravel()


MEETING = st.one_of(
    st.tuples(st.just("block"), st.integers(0, BLOCKS - 1)),
    st.tuples(st.just("warp"), st.integers(0, LANES // WARP - 1)),
    st.tuples(
        st.just("some"),
        st.builds(
            lanes_of,
            st.integers(0, BLOCKS - 1),
            st.lists(st.integers(0, THREADS // WARP - 1), min_size=1, max_size=2),
            st.integers(1, 2**32 - 1) | st.sampled_from([0xFFFF, 0xFFFF0000, 0xFFFFFFFF, 1]),
        ),
    ),
)
#: Lanes that count, two of each block.
COUNTING_LANES = (0, 40, THREADS, LANES - 1)
COUNTING = st.tuples(
    st.sampled_from(["release", "acquire"]),
    st.tuples(st.sampled_from(COUNTING_LANES), st.integers(0, COUNTERS - 1)),
)


@example([("warp", 3), ("release", (LANES - 1, 0)), ("acquire", (THREADS, 0))], 0)
@given(st.lists(MEETING | COUNTING, max_size=16), st.integers(0, 2**32 - 1))
def test_clocks_agree_with_plain_vector_clocks(steps: list[tuple[str, Any]], seed: int) -> None:
    """After each meeting, for every pair of threads and every time so far."""
    draw = np.random.default_rng(seed)
    clocks, plain = Clocks(BLOCKS, THREADS), PlainClocks()
    for kind, who in steps:
        clocks.now += 1
        plain.now += 1
        if kind == "block":
            clocks.meet_blocks(np.array([who]))
            plain.meet(np.arange(who * THREADS, (who + 1) * THREADS))
        elif kind in ("release", "acquire"):
            lane, counter = who
            getattr(clocks.between, kind)(clocks, np.array([lane]), np.array([counter]))
            getattr(plain, kind)(lane, counter)
        elif kind == "warp":
            clocks.meet_warps(np.array([who]))
            plain.meet(np.arange(who * WARP, (who + 1) * WARP))
        else:
            clocks.meet(who)
            plain.meet(who)
        clocks.now += 1  # an access, which nothing has ordered yet
        plain.now += 1
        lanes, others = draw.integers(0, LANES, (2, 200))
        lanes[::2] = draw.choice(COUNTING_LANES, 100)
        times = draw.integers(1, plain.now + 1, 200).astype(np.int32)
        found = clocks.ordered(lanes, others, times)
        asked = zip(lanes, others, times, strict=True)
        assert found.tolist() == [plain.ordered(*one) for one in asked]


@given(st.lists(MEETING, max_size=8))
def test_what_one_thread_hands_on_another_comes_after(steps: list[tuple[str, Any]]) -> None:
    """Lane 40 acquires what lane 3 had seen: from then on it comes after all of that."""
    clocks, plain = Clocks(BLOCKS, THREADS), PlainClocks()
    for kind, who in steps:
        clocks.now += 1
        plain.now += 1
        lanes = {
            "block": lambda n: np.arange(n * THREADS, (n + 1) * THREADS),
            "warp": lambda n: np.arange(n * WARP, (n + 1) * WARP),
            "some": lambda n: n,
        }[kind](who)
        clocks.meet(lanes)
        plain.meet(lanes)
    clocks.now += 1
    plain.now += 1
    view = clocks.views(np.array([3])).max(axis=0)
    clocks.acquire(np.array([40]), view)
    plain.seen[3, 3] = plain.now
    plain.seen[40] = np.maximum(plain.seen[40], plain.seen[3])
    for other in range(THREADS):
        for time in range(1, plain.now + 1):
            found = clocks.ordered(np.array([40]), np.array([other]), np.array([time], np.int32))
            assert found[0] == plain.ordered(40, other, time)


def test_threads_of_earlier_batches_are_never_ordered() -> None:
    clocks = Clocks(1, WARP, first=3 * WARP, now=10)
    before = np.arange(-WARP, 0)
    assert not clocks.ordered(np.arange(WARP), before, np.full(WARP, 1, np.int32)).any()
    assert clocks.ordered(np.arange(WARP), np.arange(WARP), np.full(WARP, 10, np.int32)).all()


# ---- accesses ------------------------------------------------------------------------------------

GRANULES = 6  # of a block
#: Few lanes and granules, so that they meet: who, whether to write, where, and how many from there.
ACCESS = st.tuples(
    st.just("access"),
    st.tuples(
        st.sampled_from([0, 1, 40]), st.booleans(),
        st.integers(0, GRANULES - 2), st.integers(1, 2),
    ),
)  # fmt: skip
BOTH = ("some", np.array([0, 40]))


# Reads that wait while a later one is entered: of another granule, and of the same one.
@example([("access", (0, False, 0, 1)), ("access", (1, False, 3, 1)), ("access", (1, True, 3, 1)),
          ("access", (40, True, 0, 1))])  # fmt: skip
@example([("access", (0, False, 1, 1)), BOTH, ("access", (0, False, 1, 2)),
          ("access", (0, True, 2, 1)), ("access", (40, True, 1, 1))])  # fmt: skip
@given(st.lists(MEETING | ACCESS, max_size=24))
def test_races_are_those_of_a_list_of_all_accesses(steps: list[tuple[str, Any]]) -> None:
    clocks, plain = Clocks(BLOCKS, THREADS), PlainClocks()
    shadow = Shadow(
        "memory", BLOCKS * GRANULES, 4, THREADS, initialised=True, period=4 * GRANULES
    )  # fmt: skip
    reads: list[tuple[int, int, int]] = []  # granule, lane, time
    writes: dict[int, tuple[int, int]] = {}

    def report(kind: str, *_: Any) -> None:
        raise LookupError(kind)

    for kind, who in steps:
        clocks.now += 1
        plain.now += 1
        if kind != "access":
            lanes = {
                "block": lambda n: np.arange(n * THREADS, (n + 1) * THREADS),
                "warp": lambda n: np.arange(n * WARP, (n + 1) * WARP),
                "some": lambda n: n,
            }[kind](who)
            plain.meet(lanes)
            clocks.meet_blocks(np.array([who])) if kind == "block" else clocks.meet(lanes)
            continue
        lane, is_write, first, count = who
        touched = range(first, first + count)
        earlier = [(u, t) for g, (u, t) in writes.items() if g in touched]
        earlier += [(u, t) for g, u, t in reads if is_write and g in touched]
        race = not all(plain.ordered(lane, *one) for one in earlier)
        try:
            if is_write:
                written, owners = np.arange(first, first + count), np.full(count, lane)
                shadow.before_write(written, owners, clocks, report)
                shadow.wrote(written, owners, clocks, report)
            else:
                at = np.array([first]), np.array([lane])
                shadow.before_read(*at, clocks, report, count=count)
        except LookupError:
            assert race
            return
        assert not race
        for granule in touched:
            if is_write:
                writes[granule] = lane, plain.now
            else:
                reads.append((granule, lane, plain.now))


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("lane", [0, 1])
def test_a_read_that_ends_later_outlasts_one_that_waits_to_be_entered(
    lane: int, lent: bool
) -> None:
    """A lane and lane 40 meet after a read by the first; then a product ends that read the same.

    Reads of the first lane of a warp, which speaks for all of them, are kept apart.
    """
    clocks = Clocks(1, THREADS)
    clocks.now = 1
    shadow = Shadow("memory", GRANULES, 4, THREADS, initialised=True, period=4 * GRANULES)
    races: list[str] = []

    def report(kind: str, *_: Any) -> None:
        races.append(kind)

    granule, reader, writer = np.array([2]), np.array([lane]), np.array([40])
    shadow.before_read(granule, reader, clocks, report)
    clocks.now = 2
    clocks.meet(np.array([lane, 40]))
    clocks.now = 3
    if lent:
        shadow.lend(granule)
        shadow.give_back(granule, reader, clocks)
    clocks.now = 4
    shadow.before_write(granule, writer, clocks, report)
    assert races == (["race"] if lent else [])


# ---- arrays --------------------------------------------------------------------------------------


def layouts() -> dict[str, np.ndarray]:
    x = np.arange(6 * 8 * 10, dtype=np.float16).reshape(6, 8, 10)
    return {
        "contiguous": x,
        "rows apart": x[:, ::2, 1:9],
        "reversed": x[::-1, :, ::-1],
        "transposed": x.T,
        "broadcast": np.broadcast_to(x[:1], x.shape),
        "empty": x[:, :0],
        "one element": x[2:3, 3:4, 4:5],
    }


@pytest.mark.parametrize("name", layouts())
def test_a_duplicate_lies_as_its_original_does(name: str) -> None:
    x = layouts()[name]
    copy = duplicate(x)
    assert copy.strides == x.strides and copy.shape == x.shape and copy.dtype == x.dtype
    np.testing.assert_array_equal(copy, x)
    if x.size:
        assert (copy.ctypes.data - x.ctypes.data) % 256 == 0
        assert not np.shares_memory(copy, x)


@pytest.mark.parametrize("name", layouts())
def test_every_element_is_where_strides_say_and_nothing_else_is(name: str) -> None:
    x = layouts()[name]
    memory = GlobalMemory(2)
    address = memory.add("x", x, writable=False)
    array = memory.arrays[0]
    np.testing.assert_array_equal(array.elements, x)
    assert span(x) == (array.before, array.nbytes)
    if not x.size:
        return
    assert (address - x.ctypes.data) % 256 == 0
    offsets = [
        sum(i * s for i, s in zip(index, x.strides, strict=True)) for index in np.ndindex(x.shape)
    ]
    reports: list[str] = []

    def report(kind: str, *_: Any) -> None:
        reports.append(kind)
        raise LookupError

    memory.attach(Clocks(1, WARP), report)
    owned = set(offsets)
    lane = np.zeros(1, np.intp)
    for offset, value in zip(offsets, x.ravel(), strict=True):
        loaded = memory.load(np.array([address + offset]), 2, 1, lane).view(np.float16)
        assert loaded[0, 0] == value
    low, high = min(offsets) - 64, max(offsets) + 64
    for offset in range(low, high, 2):
        if offset not in owned:
            with pytest.raises(LookupError):
                memory.load(np.array([address + offset]), 2, 1, lane)
    assert set(reports) == {"out of bounds"}
