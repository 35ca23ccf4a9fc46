"""Streams and graphs: work goes to the caller's current stream and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.support import Captured, attend, held, on_device, prebuild, specs_of
from tests.support.runs import RUNGS, bits, normal

cupy = pytest.importorskip("cupy")


@pytest.fixture(params=[0, 1], ids=["first device", "second device"], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with either of two devices as the current one, where there are two."""
    if request.param >= cupy.cuda.runtime.getDeviceCount():
        pytest.skip("needs two devices")
    with cupy.cuda.Device(request.param):
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild(
        spec
        for variant in RUNGS
        for causal, lse in ((True, True), (True, False), (False, False))
        for spec in specs_of(variant, "float16", 64, causal, lse=lse)
    )


@pytest.mark.parametrize("variant", RUNGS)
def test_attention_waits_for_its_own_stream(variant: str) -> None:
    """The inputs are made late, on the same stream: run anywhere else, attention would see NaN."""
    sources = on_device(*normal((2, 4, 100, 64), (2, 2, 130, 64)))
    expected, expected_lse = attend(variant, *sources, causal=True, return_lse=True)
    inputs = [cupy.full_like(x, cupy.nan) for x in sources]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:  # memory, and copying's kernel too: to load one waits for what is running
        attend(variant, *inputs, causal=True, return_lse=True)
        for x, source in zip(inputs, sources, strict=True):
            x[...] = source
            x[...] = cupy.nan
    stream.synchronize()
    with stream, held():
        for x, source in zip(inputs, sources, strict=True):
            x[...] = source
        o, lse = attend(variant, *inputs, causal=True, return_lse=True)
        assert not stream.done, "attention waited for the device"
    stream.synchronize()
    assert bits(o) == bits(expected) and bits(lse) == bits(expected_lse)


@pytest.mark.parametrize("variant", RUNGS)
def test_two_streams_do_not_disturb_each_other(variant: str) -> None:
    problems = [on_device(*normal((2, 4, 300, 64), (2, 2, 300, 64), seed=i)) for i in range(4)]
    expected = [bits(attend(variant, *inputs)) for inputs in problems]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in problems]
    results = []
    for _ in range(5):
        for inputs, stream in zip(problems, streams, strict=True):
            with stream:
                results.append(attend(variant, *inputs))
    for stream in streams:
        stream.synchronize()
    assert [bits(o) for o in results] == expected * 5


@pytest.mark.parametrize("variant", RUNGS)
def test_a_captured_call_runs_on_new_data(variant: str) -> None:
    inputs = on_device(*normal((2, 4, 100, 64), (2, 2, 130, 64)))
    out = cupy.full_like(inputs[0], cupy.nan)
    captured = Captured(lambda: attend(variant, *inputs, causal=True, out=out))
    for seed in (1, 2):
        fresh = on_device(*normal((2, 4, 100, 64), (2, 2, 130, 64), seed=seed))
        expected = attend(variant, *fresh, causal=True)
        for x, new in zip(inputs, fresh, strict=True):
            x[...] = new
        out.fill(cupy.nan)
        captured.replay()
        assert bits(out) == bits(expected)


@pytest.mark.parametrize("variant", RUNGS)
def test_streams_of_two_devices_at_once(variant: str) -> None:
    """One thread hands calls to both in turns; modules, counters and scratch memory are each's."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    hosts = [normal((2, 4, 300, 64), (2, 2, 300, 64), seed=seed) for seed in range(2)]
    problems, expected, streams = [], [], []
    for number, host in enumerate(hosts):
        with cupy.cuda.Device(number):
            problems.append(on_device(*host))
            expected.append(bits(attend(variant, *problems[-1], causal=True)))
            streams.append(cupy.cuda.Stream(non_blocking=True))
            cupy.cuda.Device().synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(20):
        for number, inputs in enumerate(problems):
            with cupy.cuda.Device(number), streams[number]:
                results[number].append(attend(variant, *inputs, causal=True))
    for number, found in enumerate(results):
        with cupy.cuda.Device(number):
            streams[number].synchronize()
            assert all(o.device.id == number for o in found)
            assert {bits(o) for o in found} == {expected[number]}
