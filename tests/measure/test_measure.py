"""Measuring: the ladder's table, the statistics of times, the facts about a device."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import testing as cupyattn_testing
from cupyattn.distributions import make
from cupyattn.kernels import ladder
from cupyattn.measure import device, energy, nvml, timing
from cupyattn.measure import rungs as measure
from cupyattn.problem.checks import AttentionSpec


def call(**options: Any) -> AttentionSpec:
    sizes = {"batch": 2, "heads": 4, "heads_kv": 2, "len_q": 6, "len_kv": 9, "head_dim": 8}
    return AttentionSpec(**{**sizes, "dtype": "float16", "scale": 0.5, **options})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_rung_holds_its_bounds(dtype: str) -> None:
    q, k, v = make("outlier", 1, 4, 50, 70, 40, dtype, heads_kv=2)
    table = ca.ladder(q, k, v, causal=True)
    assert table.ok and table.backend == "mirror" and table.judged_rows == 50
    ran = [rung for rung in table.rungs if rung.judgement is not None]
    assert len(ran) == 5 - (dtype == "float32")
    for rung in ran:
        judged = rung.judgement
        assert judged is not None and 0 < judged.j2 <= 1 and judged.relative_error > 0
        assert (judged.j3 is not None) == (rung.variant == "fa_int8")
        assert rung.seconds is None and rung.tflops is None and rung.share is None
    lines = str(table).splitlines()
    assert lines[0].split()[:5] == ["rung", "run", "by", "J2", "J3"] and lines[6] == ""
    assert "\n".join(lines[7:]) == table.legend and "PTX J2" not in table.legend


@pytest.mark.parametrize("quant", [None, ca.QuantConfig(pv="int8", symmetric=False)])
def test_memory_counts_output_workspace_codes_and_scales(quant: ca.QuantConfig | None) -> None:
    q, k, v = make("normal", 1, 2, 64, 48, 32)
    found = {rung.variant: rung.memory_bytes for rung in ca.ladder(q, k, v, quant=quant).rungs}
    output = q.nbytes
    assert found["fa"] == found["fa_warps"] == found["fa_tc"] == output
    assert found["unfused"] == output + 4 * 2 * 64 * 48
    prepared = ca.plan(q, k, v, variant="fa_int8", quant=quant)
    assert found["fa_int8"] == output + prepared.workspace_bytes
    z = ca.quantize(q, k, v, quant=quant)
    held = z.nbytes - (0 if z.v is None else z.v.nbytes)
    assert prepared.workspace_bytes > held  # and the sums of slices


def test_the_relative_error_is_against_the_callers_arrays() -> None:
    q, k, v = make("normal", 1, 2, 64, 64, 32)
    rungs = {rung.variant: rung for rung in ca.ladder(q, k, v).rungs}
    exact = ca.reference.attention_exact(q, k, v)
    for name, rung in rungs.items():
        o = ca.attention(q, k, v, variant=name).astype(np.float64)
        want = np.linalg.norm(o - exact) / np.linalg.norm(exact)
        assert rung.judgement is not None
        assert rung.judgement.relative_error == pytest.approx(want, rel=1e-12)


def test_a_fault_is_seen() -> None:
    q, k, v = make("normal", 1, 1, 40, 40, 16)
    o = ca.attention(q, k, v, variant="fa_tc")
    assert measure.judge(o, q, k, v, variant="fa_tc").ok
    o[0, 0, 13, 5] *= np.float16(1.02)
    assert not measure.judge(o, q, k, v, variant="fa_tc").ok
    o[0, 0, 13, 5] = np.nan
    assert measure.judge(o, q, k, v, variant="fa_tc").j2 == math.inf


def test_what_quantising_may_cost_decides_too() -> None:
    good = measure.Judgement(0.5, 0.9, 0.1)
    assert good.ok
    assert not replace(good, j3=1.01).ok and not replace(good, j2=1.01).ok
    assert not replace(good, j2=math.inf).ok and not replace(good, j2=math.nan).ok


def test_large_inputs_are_judged_in_part() -> None:
    large = call(batch=4, heads=16, heads_kv=16, len_q=4096, len_kv=4096)
    rows = measure.judged_rows(large, seed=1)
    assert 64 <= rows.size < 300
    edges = {x for edge in range(128, 4096, 128) for x in (edge - 1, edge)}
    assert {0, 4095} | edges <= set(rows.tolist())
    assert not np.array_equal(rows, measure.judged_rows(large, seed=2))
    for len_kv, least in ((118_800, 40), (10**7, 2 * measure.LEAST_SAMPLED)):
        huge = measure.judged_rows(call(batch=1, heads=24, len_q=10**5, len_kv=len_kv))
        assert {0, 10**5 - 1} <= set(huge.tolist()) and least <= huge.size < 60
    small = call(len_q=500, len_kv=500)
    assert measure.judged_rows(small).tolist() == list(range(500))
    for variant in ladder.VARIANTS.values():
        for tiles in variant.tiles.values():
            assert measure.EDGE_ROWS % tiles.block_q == 0


def test_admitted_pairs_are_counted_as_the_mask_admits() -> None:
    for len_q, len_kv, shift in ((6, 9, 3), (9, 6, -3), (6, 9, 0), (5, 0, -5), (0, 5, 5)):
        one = call(len_q=len_q, len_kv=len_kv, causal=True, causal_shift=shift)
        mask = np.arange(len_kv) <= np.arange(len_q)[:, None] + shift
        assert measure.admitted_pairs(one) == int(mask.sum())
    assert measure.admitted_pairs(call()) == 54


def test_speed_and_share() -> None:
    judged = measure.Judgement(0.5, None, 0.1)
    rung = measure.Rung("fa", "idea", judged, seconds=2.0, operations=8 * 10**12, ceiling=1e13)
    assert rung.tflops == 4.0 and rung.share == pytest.approx(0.4)
    table = measure.Ladder((rung,), call(), "cuda")
    (row,) = table.cells
    assert len(row) == len(table.header) and row[4:7] == ("2 s", "4", "40 %")
    assert rung.to_dict()["tflops"] == 4.0


def test_a_rung_that_misses_its_bound_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def times(calls: dict[str, Any], **_: Any) -> dict[str, list[float]]:
        timed.extend(calls)
        return {name: [0.5] * 15 for name in calls}

    monkeypatch.setattr(timing, "time_interleaved", times)
    monkeypatch.setattr(timing, "rotated", lambda arrays: [tuple(arrays)])
    monkeypatch.setattr(device, "device_ceiling", lambda family: None)
    good = measure.Rung("fa", "", measure.Judgement(0.9, None, 0.1), operations=10)
    missed = measure.Rung("fa_tc", "", measure.Judgement(1.1, None, 0.1), operations=10)
    found = measure._timed([good, missed], (1, 2, 3), {"quant": None}, 15, None)
    assert timed == ["fa"] and found[0].seconds == 0.5
    assert found[1].seconds is None and "not timed" in found[1].note


# ---- times ---------------------------------------------------------------------------------------


def test_the_interval_holds_the_median_and_narrows() -> None:
    rng = np.random.default_rng(0)
    few, many = rng.normal(10, 1, 15), rng.normal(10, 1, 1500)
    a, b = timing.median(few), timing.median(many)
    assert a.low <= a.median == float(np.median(few)) <= a.high
    assert b.high - b.low < 0.3 * (a.high - a.low)
    with pytest.raises(ValueError, match="at least one"):
        timing.median([])


def test_ratios_are_paired() -> None:
    drift = np.linspace(1, 3, 15)  # clocks fall while both are measured
    ratio = timing.paired_ratio(2 * drift, drift)
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="equally many"):
        timing.paired_ratio([1.0], [1.0, 2.0])


def test_inputs_rotate_through_more_than_twice_the_cache() -> None:
    arrays = [np.zeros(1000, np.uint8), np.ones(24, np.uint8)]
    sets = timing.rotated(arrays, cache_bytes=10 * 1024)
    assert sum(a.nbytes for one in sets for a in one) >= 2 * 10 * 1024
    assert len({a.ctypes.data for one in sets for a in one}) == 2 * len(sets)
    assert all(np.array_equal(one[1], arrays[1]) for one in sets)
    assert len(timing.rotated([np.zeros(2**20, np.uint8)], cache_bytes=1024)) == 2


class Clock:
    """A device on which a call takes as long as it says."""

    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Event:
        at = 0.0

        def record(self, stream: Any = None) -> None:
            self.at = clock.now

        def synchronize(self) -> None:
            pass

    cupy = types.ModuleType("cupy")
    scratch = types.SimpleNamespace(fill=lambda value: None)
    cupy.empty = lambda size, dtype: scratch  # type: ignore[attr-defined]
    cupy.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Event=Event,
        get_current_stream=lambda: None,
        get_elapsed_time=lambda a, b: 1e3 * (b.at - a.at),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return clock


def test_a_call_follows_either_neighbour_alike(fake_cupy: Clock) -> None:
    order: list[str] = []

    def taking(name: str) -> Any:
        def call(i: int) -> None:
            fake_cupy.now += 0.5
            order.append(name)

        return call

    timing.time_interleaved({name: taking(name) for name in "abc"}, rounds=4, warmup=1)
    assert "".join(order) == "abc" + "abc" + "cba" + "bca" + "acb"


def test_calls_take_turns_in_a_moving_order(fake_cupy: Clock) -> None:
    order: list[str] = []
    indices: list[int] = []

    def taking(name: str, seconds: float) -> Any:
        def call(i: int) -> None:
            fake_cupy.now += seconds
            if not order or order[-1] != name:
                order.append(name)
            if name == "slow":
                indices.append(i)

        return call

    calls = {"slow": taking("slow", 0.5), "fast": taking("fast", 1e-4)}
    done: list[str] = []
    found = timing.time_interleaved(calls, rounds=4, warmup=1, advance=done.append)
    assert found["slow"] == pytest.approx([0.5] * 4)
    assert found["fast"] == pytest.approx([1e-4] * 4)
    assert order == ["slow", "fast"] * 4
    assert indices == [0, 0, 1, 2, 3] and sorted(done) == ["fast"] * 4 + ["slow"] * 4


def test_short_calls_are_repeated_within_a_sample(fake_cupy: Clock) -> None:
    count = 0

    def quick(i: int) -> None:
        nonlocal count
        count += 1
        fake_cupy.now += 1e-4

    timing.time_interleaved({"quick": quick}, rounds=3, warmup=2, sample_seconds=2e-3)
    assert count == 2 + 3 * 20


def test_calls_are_captured_in_order_and_a_capture_always_ends(
    fake_cupy: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []

    class Stream(contextlib.nullcontext[None]):
        def __init__(self, non_blocking: bool) -> None:
            super().__init__()
            assert non_blocking

        def begin_capture(self) -> None:
            steps.append("begin")

        def end_capture(self) -> Any:
            steps.append("end")
            return types.SimpleNamespace(launch=lambda stream: steps.append("launch"))

    monkeypatch.setattr(sys.modules["cupy"].cuda, "Stream", Stream, raising=False)
    graph = timing.captured(steps.append, 3)
    graph(7)
    assert steps == ["begin", 0, 1, 2, "end", "launch"]
    with pytest.raises(ZeroDivisionError):
        timing.captured(lambda i: 1 // i, 2)
    assert steps[6:] == ["begin", "end"]


# ---- the device ----------------------------------------------------------------------------------


def test_a_missing_cupy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert device.device_missing().startswith("CuPy is not installed")


def test_the_ceiling_is_the_harmonic_mean_of_both_products() -> None:
    fp16, int8 = 4096 * 132 * 1.98e9, 8192 * 132 * 1.98e9
    assert device.ceiling("tensor_core", 90, 132, 1.98e9) == pytest.approx(fp16)
    mixed = 2 / (1 / fp16 + 1 / int8)
    assert device.ceiling("int8", 90, 132, 1.98e9) == pytest.approx(mixed)
    assert device.ceiling("int8", 86, 82, 1.7e9) is None
    for variant in ladder.VARIANTS.values():
        assert device.ceiling(variant.family, 80, 108, 1.41e9) is not None


class Meter:
    """A monitor whose clock moves by each piece of work, and whose counter moves by ticks."""

    def __init__(self, watts: float, tick: float) -> None:
        self.watts, self.tick, self.now = watts, tick, 0.01

    def energy_joules(self) -> float:
        return self.watts * (self.now // self.tick * self.tick if self.tick else 0.0)

    def clock(self) -> float:
        return self.now

    def work(self) -> int:
        self.now += 0.02
        return 4


def test_energy_is_counted_from_renewal_to_renewal() -> None:
    meter = Meter(500.0, 0.1)
    found = energy.window(meter.work, meter, 2.0, clock=meter.clock)  # type: ignore[arg-type]
    assert 2.0 <= found.seconds <= 2.15 and found.watts == pytest.approx(500, rel=0.01)
    assert found.calls == pytest.approx(4 * found.seconds / 0.02)
    assert found.joules_per_call == pytest.approx(500 * 0.02 / 4, rel=0.01)


def test_a_counter_that_stands_still_is_said_so() -> None:
    meter = Meter(500.0, 0.0)
    with pytest.raises(nvml.NvmlError, match="stood still at 0.0 J"):
        energy.window(meter.work, meter, 1.0, clock=meter.clock)  # type: ignore[arg-type]


class Library:
    """A stand-in for the driver's library, which answers each question with a number."""

    def __init__(self, **answers: int) -> None:
        self.answers, self.closed = answers, False

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> int:
            if name not in self.answers:
                return 3  # not supported
            if len(arguments) > 1:
                arguments[-1]._obj.value = self.answers[name]
            return 0

        return ask

    def nvmlShutdown(self) -> int:
        self.closed = True
        return 0


def test_nvml_answers_in_watts_and_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(
        nvmlInit_v2=0, nvmlDeviceGetHandleByPciBusId_v2=7, nvmlDeviceGetPowerUsage=412_500,
        nvmlDeviceGetTotalEnergyConsumption=2**40 + 500, nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetMaxClockInfo=1985, nvmlDeviceGetTemperature=41,
    )  # fmt: skip
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: library)
    with nvml.monitor("0000:01:00.0") as monitor:
        assert monitor is not None and monitor.handle.value == 7
        assert monitor.power_w() == 412.5 and monitor.temperature_c() == 41
        assert monitor.energy_joules() == (2**40 + 500) / 1e3  # more than 32 bits hold
    assert library.closed
    assert device.clocks("0000:01:00.0")["sm_clock_max_mhz"] == 1985
    del library.answers["nvmlDeviceGetPowerUsage"]
    assert device.clocks("0000:01:00.0") == {}
    del library.answers["nvmlDeviceGetHandleByPciBusId_v2"]
    with nvml.monitor("0000:01:00.0") as monitor:
        assert monitor is None


def test_the_environment_of_a_checkout_names_its_revision() -> None:
    facts = device.environment()
    assert facts["cupyattn"] == ca.__version__ and facts["numpy"] == np.__version__
    if "revision" in facts:  # not in an unpacked sdist
        assert len(facts["revision"]) == 40 and isinstance(facts["dirty"], bool)


# ---- the face ------------------------------------------------------------------------------------


def test_every_public_name_is_there() -> None:
    for name in ca.__all__:
        assert getattr(ca, name) is not None
    assert set(ca.__all__) <= set(dir(ca))
    assert callable(ca.ladder) and ca.testing is cupyattn_testing
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ca.nonsense
