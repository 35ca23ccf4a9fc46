"""Repeated calls at the same addresses, without a device, like test_host_calls.py: launches,
recorded graphs, and graphs launched in their place.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from cupyattn import QuantConfig, attention, attention_backward, plan
from cupyattn.arrays.operand import Operand
from cupyattn.errors import KernelLaunchError
from cupyattn.plans.backward import BackwardOperands, plan_backward
from cupyattn.problem.backward_form import settle_backward
from cupyattn.problem.settings import check_attention
from cupyattn.runtime import replay
from tests.runtime.test_host_calls import (  # noqa: F401
    SHAPES,
    Done,
    Driver,
    array,
    check,
    driver,
    planned,
)

cupy = pytest.importorskip("cupy")

#: Calls of one kernel; of three; of two that quantise and one fill before the third.
CALLS: dict[str, dict[str, Any]] = {
    "fa": {"variant": "fa", "arch": "sm_90"},
    "unfused": {"variant": "unfused", "arch": "sm_90"},
    "fa_int8": {
        "variant": "fa_int8", "arch": "sm_90", "quant": QuantConfig(granularity_k="tensor"),
    },
}  # fmt: skip


def problem() -> tuple[list[Any], Any]:
    """Operands and a result somewhere else than all others that are alive."""
    return [array(s) for s in SHAPES], array(SHAPES[0])


@pytest.mark.parametrize("rung", CALLS)
def test_a_call_is_launched_then_recorded_then_replayed(
    driver: Driver,  # noqa: F811
    rung: str,
) -> None:
    """Each time the kernels get what the plan says, once, on the stream of that call."""
    inputs, out = problem()
    options = CALLS[rung]
    made = planned(inputs, out, **options)
    driver.expect(made)
    into = plan(*inputs, out=out, **options)
    known = {"v": inputs[2], "o": out}
    zeros = any(work.zeros for p in made for work in p.workspace)
    for turn in range(5):
        driver.stream = 7 + turn
        assert into(*inputs, out=out) is out
        check(driver, made, known)
        assert [fill[-1] for fill in driver.fills] == [driver.stream] * zeros
        driver.fills.clear()
    assert driver.replays == [(0, stream) for stream in (8, 9, 10, 11)]
    assert len(driver.graphs) == 1 and not driver.recording


def test_other_addresses_are_other_calls(driver: Driver) -> None:  # noqa: F811
    """Whether it is an operand, the result or scratch memory that lies elsewhere."""
    options = CALLS["unfused"]
    problems = [problem() for _ in range(2)]
    made = planned(problems[0][0], problems[0][1], **options)
    driver.expect(made)
    calls = [plan(*problems[0][0], out=problems[0][1], **options) for _ in range(2)]
    (q, k, v), out = problems[0]
    (other, *_), other_out = problems[1]
    cases = [
        (into, (first, k, v), o) for into in calls for first in (q, other) for o in (out, other_out)
    ]
    for _ in range(3):
        for into, (first, *rest), o in cases:
            into(first, *rest, out=o)
            check(driver, made, {"q": first, "k": k, "v": v, "o": o})
    assert len(driver.graphs) == len(cases) == 8
    assert driver.replays == [(i, driver.stream) for _ in range(2) for i in range(8)]


def test_two_operands_that_change_places_are_another_call(driver: Driver) -> None:  # noqa: F811
    (q, k, v), out = problem()
    made = planned((q, k, v), out, **CALLS["unfused"])
    driver.expect(made)
    into = plan(q, k, v, out=out, **CALLS["unfused"])
    for turn in range(6):
        keys, values = (k, v) if turn % 2 else (v, k)
        into(q, keys, values, out=out)
        check(driver, made, {"q": q, "k": keys, "v": values, "o": out})
    assert len(driver.graphs) == 2


def test_what_attention_remembers_is_replayed_where_the_pool_gives_the_same_memory(
    driver: Driver,  # noqa: F811
) -> None:
    pool: dict[int, Any] = {}
    cupy.cuda.set_allocator(lambda size: pool.setdefault(size, array((size,), "uint8").data))
    inputs, _ = problem()
    made = planned(inputs, **CALLS["unfused"])
    driver.expect(made)
    for _ in range(4):
        o = attention(*inputs, **CALLS["unfused"])
        check(driver, made, {"q": inputs[0], "o": o})
    assert len(driver.graphs) == 1 and len(driver.replays) == 3


def test_gradients_are_replayed_too(driver: Driver) -> None:  # noqa: F811
    pool: dict[int, Any] = {}
    cupy.cuda.set_allocator(lambda size: pool.setdefault(size, array((size,), "uint8").data))
    shapes = {"d_out": SHAPES[0], "q": SHAPES[0], "k": SHAPES[1], "v": SHAPES[2], "o": SHAPES[0]}
    inputs = {name: array(shape) for name, shape in shapes.items()}
    described = {name: Operand.of(a) for name, a in inputs.items()}
    described |= {f"d{name}": described[name] for name in "qkv"}
    call = check_attention(*(inputs[n] for n in "qkv"), return_lse=True)
    settled = settle_backward(call, described, deterministic=None, arch="sm_90")
    made = [plan_backward(settled, BackwardOperands(**described))]
    driver.expect(made)
    inputs["lse"] = array(SHAPES[0][:3], "float32")
    for _ in range(4):
        found = attention_backward(*inputs.values(), arch="sm_90")
        check(driver, made, {**inputs, **found._asdict()})
    assert len(driver.graphs) == 1 and driver.replays


@pytest.mark.parametrize("rung", CALLS)
def test_a_graph_of_the_caller_gets_the_launches_themselves(
    driver: Driver,  # noqa: F811
    rung: str,
) -> None:
    """Recorded or not: a graph of ours within another could not be taken apart by its owner."""
    inputs, out = problem()
    made = planned(inputs, out, **CALLS[rung])
    driver.expect(made)
    into = plan(*inputs, out=out, **CALLS[rung])
    for _ in range(3):
        into(*inputs, out=out)
    driver.launches.clear()
    driver.fills.clear()
    replays = len(driver.replays)
    driver.recording[driver.stream] = theirs = Done()
    into(*inputs, out=out)
    assert len(driver.replays) == replays and not driver.launches and not driver.fills
    driver.launches += theirs.launches
    check(driver, made, {"v": inputs[2], "o": out})
    assert len(theirs.fills) == any(work.zeros for p in made for work in p.workspace)


def test_a_call_that_has_to_wait_is_not_replayed(
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With CUPYATTN_DEBUG every launch is waited for, which a graph does not allow within it."""
    monkeypatch.setenv("CUPYATTN_DEBUG", "1")
    waited: list[int] = []
    monkeypatch.setattr(cupy.cuda.runtime, "streamSynchronize", waited.append)
    inputs, out = problem()
    driver.expect(planned(inputs, out, **CALLS["unfused"]))
    into = plan(*inputs, out=out, **CALLS["unfused"])
    for _ in range(3):
        into(*inputs, out=out)
    assert waited == [driver.stream] * 9 and not driver.graphs


def test_scales_that_a_caller_gives_are_copied_in_every_replay(
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[tuple[int, ...]] = []
    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", lambda *copy: copies.append(copy))
    quant = QuantConfig("head", "tensor", smooth_k=False, scales=(np.ones((1, 4, 1), "f4"), 0.2))
    options: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90", "quant": quant}
    inputs, out = problem()
    driver.expect(planned(inputs, out, **options))
    into = plan(*inputs, out=out, **options)
    for _ in range(4):
        into(*inputs, out=out)
    assert len(driver.replays) == 3
    launched, recorded = copies[:2], copies[2:]  # replays copy by themselves
    assert [one[:-1] for one in launched] == [one[:-1] for one in recorded]
    assert {one[-1] for one in launched} == {driver.stream} != {one[-1] for one in recorded}


def test_scales_that_a_graph_is_yet_to_make_are_not_kept(driver: Driver) -> None:  # noqa: F811
    """While a caller captures, nothing that is copied to the device is there for other calls."""
    quant, q = QuantConfig("tensor", "tensor", scales=(0.1, 0.2)), array(SHAPES[0])
    entries = (1, 4), (1, 2)
    driver.recording[driver.stream] = Done()
    captured = quant.scales_beside(q, entries)
    driver.recording.clear()
    kept = quant.scales_beside(q, entries)
    assert kept is not captured and quant.scales_beside(q, entries) is kept


def test_threads_record_graphs_of_their_own(driver: Driver) -> None:  # noqa: F811
    """The driver lets no two threads use one graph; what one has recorded the other launches."""
    inputs, out = problem()
    driver.expect(planned(inputs, out, **CALLS["unfused"]))
    into = plan(*inputs, out=out, **CALLS["unfused"])

    def work() -> None:
        for _ in range(3):
            into(*inputs, out=out)

    for number in range(2):
        driver.replays.clear()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert [graph for graph, _ in driver.replays] == [number, number]
    assert len(replay.graphs(0)) == 0


# ---- what a thread keeps -------------------------------------------------------------------------


@pytest.fixture
def graphs(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> replay.Graphs:  # noqa: F811
    monkeypatch.setattr(replay, "MAX_LAUNCHES", 2)
    monkeypatch.setattr(replay, "HORIZON", 6)
    return replay.graphs(0)


def test_graphs_are_bounded_and_the_one_not_used_for_longest_makes_room(
    driver: Driver,  # noqa: F811
    graphs: replay.Graphs,
) -> None:
    def recorded(*keys: str) -> int:
        before = len(driver.graphs)
        for key in keys:
            graphs.launch(key, lambda _: None, 7)
        return len(driver.graphs) - before

    assert recorded(*"aabb") == 2 and len(graphs) == 2
    assert recorded(*"cccc") == 0, "both were of use of late"
    assert recorded(*"aaa") == 0, "replays"
    assert recorded("c") == 1 and len(graphs) == 2, "b was not for longer than the horizon"
    assert recorded(*"aacc") == 0
    assert recorded("b") == 0, "b has to be seen anew"


def test_calls_in_turns_that_are_too_many_are_not_recorded_anew(
    driver: Driver,  # noqa: F811
    graphs: replay.Graphs,
) -> None:
    """In every turn, as many calls as there are places are replayed, and the others launched."""
    done: list[str] = []
    for _ in range(20):
        for key in "abcd":
            graphs.launch(key, lambda stream, key=key: done.append(f"{key}{stream}"), 7)
    assert len(driver.graphs) == 2
    assert done.count("c7") == done.count("d7") == 20
    assert [done.count(f"{key}7") for key in "ab"] == [1, 1] and len(driver.replays) == 2 * 19


def test_a_whole_model_has_room(driver: Driver) -> None:  # noqa: F811
    """1,000 calls of four launches in turns: all are replayed from the third turn on."""
    graphs = replay.graphs(0)
    for turn in range(3):
        driver.replays.clear()
        for number in range(1000):
            graphs.launch(number, lambda _: None, 7, 4)
        assert len(driver.replays) == (0 if turn == 0 else 1000)
    assert len(graphs) == len(driver.graphs) == 1000


def test_graphs_of_many_launches_take_more_room(
    driver: Driver,  # noqa: F811
    graphs: replay.Graphs,
) -> None:
    """As many graphs as fit are kept; a graph larger than the whole room never is."""
    for key, launches in (("a", 1), ("b", 1), ("c", 2), ("d", 3)):
        for _ in range(10):
            graphs.launch(key, lambda _: None, 7, launches)
    assert set(graphs._graphs) == {"c"} and len(driver.graphs) == 3


def test_a_graph_that_made_room_is_destroyed_and_says_so(graphs: replay.Graphs) -> None:
    """Whoever keeps one sees by its handle that it must not be launched any more."""
    first, second = (graphs.launch("a", lambda _: None, 7) for _ in range(2))
    assert first is None and second is not None and second.handle is not None
    for key in "bbccccccccc":
        graphs.launch(key, lambda _: None, 7)
    assert second.handle is None and "a" not in graphs._graphs
    kept = graphs.launch("c", lambda _: None, 7)
    graphs.clear()
    assert kept is not None and kept.handle is None and len(graphs) == 0


def test_a_graph_that_its_keeper_launches_keeps_its_place(
    driver: Driver,  # noqa: F811
    graphs: replay.Graphs,
) -> None:
    for key in "aabb":
        kept = graphs.launch(key, lambda _: None, 7)
    assert kept is not None
    for _ in range(20):  # b by its keeper alone, a not at all
        graphs.calls += 1
        kept.last_call = graphs.calls
    for key in "cc":
        graphs.launch(key, lambda _: None, 7)
    assert set(graphs._graphs) == {"b", "c"} and kept.handle is not None


def test_every_device_has_room_of_its_own(
    driver: Driver,  # noqa: F811
    graphs: replay.Graphs,
) -> None:
    for device in range(3):
        for key in "aabb":
            replay.graphs(device).launch(key, lambda _: None, 7)
    assert [len(replay.graphs(device)) for device in range(3)] == [2, 2, 2]


def test_what_never_comes_again_is_forgotten(graphs: replay.Graphs) -> None:
    for number in range(100):
        graphs.launch(number, lambda _: None, 7)
    assert len(graphs._seen) == 6 and len(graphs) == 0


def test_recording_may_take_memory_while_another_thread_captures(
    driver: Driver,  # noqa: F811
    graphs: replay.Graphs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread says so from before its stream is made until the graph was launched, and no
    longer, whatever happens.
    """
    mode = [0]  # CUDA's default

    def exchange(given: Any) -> int:
        value = ctypes.cast(given, ctypes.POINTER(ctypes.c_int))
        mode[0], value[0] = value[0], mode[0]
        return 0

    relaxed, told = cupy.cuda.runtime.streamCaptureModeRelaxed, []
    monkeypatch.setattr(replay, "_exchange_mode", lambda: exchange)
    monkeypatch.setattr(
        cupy.cuda, "Stream", lambda **given: (told.append(mode[0]), driver.new_stream(**given))[1]
    )
    monkeypatch.setattr(cupy.cuda.runtime, "graphLaunch", lambda *_: told.append(mode[0]))
    for _ in range(3):
        graphs.launch("a", lambda _: None, 7)
    assert told == [relaxed, relaxed, 0] and mode == [0]

    def refused(stream: int) -> None:
        if stream != 7:
            raise KernelLaunchError("no such grid")

    graphs.launch("b", refused, 7)
    with pytest.raises(KernelLaunchError, match="no such grid"):
        graphs.launch("b", refused, 7)
    assert mode == [0] and not driver.recording and len(graphs) == 1
    monkeypatch.setattr(replay, "_exchange_mode", lambda: lambda _: 3)
    graphs.launch("c", lambda _: None, 7)
    with pytest.raises(KernelLaunchError, match=r"StreamCaptureMode\(2\) failed with error 3"):
        graphs.launch("c", lambda _: None, 7)


def test_graphs_of_a_thread_that_ends_are_given_back_while_another_captures(
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[int] = []
    monkeypatch.setattr(
        replay, "_exchange_mode", lambda: lambda mode: modes.append(mode._obj.value) or 0
    )
    relaxed = cupy.cuda.runtime.streamCaptureModeRelaxed

    def work() -> None:
        replay.graphs(0).launch("a", lambda _: None, 7)
        assert not modes
        replay.graphs(0).launch("a", lambda _: None, 7)
        assert modes == [relaxed] * 2  # there and back: this driver leaves the mode as it is

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert modes == [relaxed] * 4
        modes.clear()
