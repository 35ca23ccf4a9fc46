"""Calls that come again at the same addresses: their graphs compute what their launches do."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cupyattn import attention, plan
from cupyattn.runtime import replay
from tests.gpu.support import arch_of, on_device
from tests.support.runs import RUNGS, asked_for, bits, normal

cupy = pytest.importorskip("cupy")

SHAPES = ((2, 4, 100, 64), (2, 2, 130, 64))


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_per_thread", replay._PerThread())


def options_of(rung: str) -> dict[str, Any]:
    return {**asked_for(rung), "arch": arch_of(rung), "causal": True}


def problem(seed: int = 0) -> tuple[Any, ...]:
    return on_device(*normal(*SHAPES, seed=seed))


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("default", [True, False], ids=["default stream", "another stream"])
def test_a_replay_reads_what_lies_there_by_then(rung: str, default: bool) -> None:
    """The first call is launched, the second recorded; all of them on new data."""
    inputs = problem()
    out = cupy.empty_like(inputs[0])
    into = plan(*inputs, out=out, **options_of(rung))
    stream = cupy.cuda.Stream.null if default else cupy.cuda.Stream(non_blocking=True)
    for seed in range(5):
        fresh = problem(seed)
        expected = bits(attention(*fresh, **options_of(rung)))
        cupy.cuda.Device().synchronize()
        with stream:
            for x, new in zip(inputs, fresh, strict=True):
                x[...] = new
            out.fill(cupy.nan)
            into(*inputs, out=out)
        stream.synchronize()
        assert bits(out) == expected
    assert len(replay.graphs(0)) >= 1


@pytest.mark.parametrize("rung", RUNGS)
def test_addresses_in_turns(rung: str) -> None:
    """Each set of operands has a graph; what the pool hands out for results is part of it."""
    problems = [problem(seed) for seed in range(3)]
    expected = [bits(attention(*inputs, **options_of(rung))) for inputs in problems]
    prepared = plan(*problems[0], **options_of(rung))
    for _ in range(6):
        for inputs, wanted in zip(problems, expected, strict=True):
            assert bits(prepared(*inputs)) == wanted
            assert bits(attention(*inputs, **options_of(rung))) == wanted
    assert len(replay.graphs(0)) >= 6


@pytest.mark.parametrize("rung", RUNGS)
def test_memory_that_was_used_for_something_else_between(rung: str) -> None:
    """Operands and results are given back to the pool, filled by others, and taken again."""
    wanted: dict[int, bytes] = {}
    prepared = plan(*problem(), **options_of(rung))
    for _ in range(4):
        for seed in range(3):
            inputs = problem(seed)
            found = bits(prepared(*inputs))
            assert wanted.setdefault(seed, found) == found
            nbytes = [x.nbytes for x in inputs]
            del inputs
            filled = [cupy.full(n, 0xFF, cupy.uint8) for n in nbytes]
            assert all(bool((x == 0xFF).all()) for x in filled)
            del filled
    assert len(set(wanted.values())) == 3


@pytest.mark.parametrize("rung", RUNGS)
def test_a_graph_of_the_caller_holds_the_kernels(rung: str) -> None:
    """Also of a call that has been replayed; its graph outlives what we recorded."""
    inputs = problem()
    out = cupy.empty_like(inputs[0])
    into = plan(*inputs, out=out, **options_of(rung))
    expected = bits(attention(*inputs, **options_of(rung)))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(3):
            into(*inputs, out=out)
        recorded = len(replay.graphs(0))
        stream.synchronize()
        stream.begin_capture()
        into(*inputs, out=out)
        graph = stream.end_capture()
        assert recorded == len(replay.graphs(0)) == 1
        replay.graphs(0).clear()
        out.fill(cupy.nan)
        graph.launch(stream)
    stream.synchronize()
    assert bits(out) == expected


@pytest.mark.parametrize("rung", RUNGS)
def test_threads_replay_at_once(rung: str) -> None:
    """One remembered call, a stream and graphs of each thread's own."""
    problems = [problem(seed) for seed in range(8)]
    expected = [bits(attention(*inputs, **options_of(rung))) for inputs in problems]
    cupy.cuda.Device().synchronize()

    def work(i: int) -> tuple[set[bytes], int]:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            found = set()
            for _ in range(50):
                o = attention(*problems[i], **options_of(rung))
                stream.synchronize()
                found.add(bits(o))
            return found, len(replay.graphs(0))

    with ThreadPoolExecutor(8) as pool:
        for i, (found, graphs) in enumerate(pool.map(work, range(8))):
            assert found == {expected[i]} and graphs >= 1


@pytest.mark.parametrize("rung", RUNGS)
def test_recording_leaves_a_graph_alone_that_another_thread_captures(rung: str) -> None:
    """In CUDA's default mode, in which no other thread may take memory of the device."""
    inputs = problem()
    out = cupy.full_like(inputs[0], cupy.nan)
    into = plan(*inputs, out=out, **options_of(rung))
    expected = bits(attention(*inputs, **options_of(rung)))
    theirs = cupy.zeros(1000, "float32")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with streams[0]:
        cupy.add(theirs, 1, out=theirs)
    cupy.cuda.Device().synchronize()

    def work() -> int:
        with streams[1]:
            for _ in range(3):
                into(*inputs, out=out)
        return len(replay.graphs(0))

    with ThreadPoolExecutor(1) as pool:
        with streams[0]:
            streams[0].begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            cupy.add(theirs, 1, out=theirs)
            recorded = pool.submit(work).result()
            cupy.add(theirs, 1, out=theirs)
            graph = streams[0].end_capture()
            graph.launch(streams[0])
        cupy.cuda.Device().synchronize()
    assert recorded == 1 and bits(out) == expected and bool((theirs == 3).all())


@pytest.mark.parametrize("rung", RUNGS)
def test_what_graphs_take_is_bounded(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In number, and in memory of the device: less than a mebibyte each.

    Other processes may take some of that memory meanwhile, so the least of several times counts.
    What was recorded before stays, as the driver would give its memory to the next.
    """
    prepared = plan(*problem(), **options_of(rung))
    launches = len(prepared._ready._launches)
    monkeypatch.setattr(replay, "MAX_LAUNCHES", 16 * launches)
    monkeypatch.setattr(replay, "HORIZON", 64)
    problems = [problem(seed % 3) for seed in range(48)]
    expected = [bits(prepared(*inputs)) for inputs in problems[:3]]
    kept, taken = [], []
    for _ in range(4):
        recorded = replay._PerThread()
        monkeypatch.setattr(replay, "_per_thread", recorded)
        kept.append(recorded)
        gc.collect()
        before, _ = cupy.cuda.runtime.memGetInfo()
        for _ in range(3):  # launched, recorded, replayed
            for seed, inputs in enumerate(problems):
                assert bits(prepared(*inputs)) == expected[seed % 3]
        assert len(replay.graphs(0)) == 16
        after, _ = cupy.cuda.runtime.memGetInfo()
        taken.append(before - after)
    assert min(taken) < 13 * 2**20
