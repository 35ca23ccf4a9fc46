"""Classes of mistakes that only a device can show; `tests/kernels/test_bug_classes.py` has all
twelve.

Elsewhere in this folder: 1 and 2 in `test_memory.py`, 3 in `test_attention.py` and `test_exact.py`,
4 and 11 in `test_memory.py`, 5 in `test_all_lengths.py`, 6 in `test_attention.py`, codes of 8 in
`test_quantize.py`, 10 in `test_exact.py`.
"""

from __future__ import annotations

import pytest

from cupyattn import plan
from cupyattn.compiler import modules as kc
from tests.gpu.support import (
    arch_of,
    attend,
    form_taken,
    held,
    on_device,
    prebuild,
    run,
    specs_of,
)
from tests.hopper import hopper_pv8_cases
from tests.kernels.test_bug_classes import LEAST_OPTIMISED
from tests.support.runs import RUNGS, assert_same, bits, normal, variant_of

cupy = pytest.importorskip("cupy")

#: Every form that takes any call, the Hopper forms of 8-bit V among them.
ALL = (*RUNGS, *hopper_pv8_cases.RUNGS)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild(
        spec
        for rung in ALL
        for lse in (False, True)
        for spec in specs_of(rung, "float16", 64, True, lse=lse)
    )


@pytest.mark.parametrize("rung", [*RUNGS, "fa_int8@fused", "fa_tc@split"])
def test_7_a_thousand_runs_at_batch_60_are_one(rung: str) -> None:
    """A race that shows once in many blocks and many runs; every result is compared bit by bit."""
    len_q, len_kv = (5, 700) if rung == "fa_tc@split" else (65, 200)
    inputs = on_device(*normal((60, 4, len_q, 64), (60, 2, len_kv, 64)))
    assert form_taken(rung, inputs) == (rung.partition("@")[2] or "portable")
    first, first_lse = attend(rung, *inputs, causal=True, return_lse=True)
    differing = cupy.zeros((), "int64")
    for _ in range(999):
        o, lse = attend(rung, *inputs, causal=True, return_lse=True)
        differing += (o.view("u2") != first.view("u2")).sum()
        differing += (lse.view("u4") != first_lse.view("u4")).sum()
    assert int(differing) == 0


@pytest.mark.parametrize("rung", [*ALL, "fa_int8@fused", "fa_tc@split"])
def test_7_another_level_of_optimisation_is_within_the_bound(
    rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other registers and another order of instructions: what no barrier orders shows, and what
    was never written. Also in one result of fifty runs."""
    len_q, len_kv = (5, 700) if rung == "fa_tc@split" else (65, 200)
    inputs = on_device(*normal((20, 4, len_q, 64), (20, 2, len_kv, 64)))
    usual = run(rung, inputs, causal=True)
    assert usual.form == (rung.partition("@")[2] or "portable")
    usual.check()
    kc.cache_clear(disk=False)
    try:
        monkeypatch.setattr(kc, "OPTIONS", (*kc.OPTIONS, LEAST_OPTIMISED))
        before = kc.cache_info()
        other = run(rung, inputs, causal=True)
        after = kc.cache_info()
        assert after.compiled + after.disk_hits > before.compiled + before.disk_hits
        other.check()
        for _ in range(50):
            assert_same(run(rung, inputs, causal=True), other)
    finally:
        kc.cache_clear(disk=False)  # what comes next is compiled as ever


@pytest.mark.parametrize("rung", [one for one in ALL if variant_of(one).family != "unfused"])
def test_8_more_than_160_000_tokens(rung: str) -> None:
    """One head with a tail, of which sampled rows are judged, on the device."""
    shape = 1, 1, 163_907, 64
    found = run(rung, on_device(*normal(shape, shape)))
    assert found.form == (rung.partition("@")[2] or "portable")
    report = found.judge(host=False)
    assert report.passed and report.rows >= 64, str(report)


@pytest.mark.parametrize("rung", RUNGS)
def test_9_arrays_of_another_device(rung: str) -> None:
    """The device of the arrays runs the call, on its current stream, whichever is current."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    sources = on_device(*normal((2, 4, 100, 64), (2, 2, 130, 64)))
    expected = bits(attend(rung, *sources, causal=True))
    with cupy.cuda.Device(1):
        there = [cupy.asarray(x) for x in sources]
        late = [cupy.full_like(x, cupy.nan) for x in there]
        prepared = plan(*there, variant=variant_of(rung).name, arch=arch_of(rung), causal=True)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            attend(rung, *there, causal=True)  # this stream's pool has memory
        stream.synchronize()
        cupy.cuda.Device(1).synchronize()
        with stream, held():
            for x, source in zip(late, there, strict=True):
                x[...] = source
            after = attend(rung, *late, causal=True)
            assert not stream.done, "attention waited for the device"
        stream.synchronize()
    assert after.device.id == 1 and bits(after) == expected
    with cupy.cuda.Device(0):
        for call in (lambda: attend(rung, *there, causal=True), lambda: prepared(*there)):
            o = call()
            assert o.device.id == 1 and bits(o) == expected
            assert cupy.cuda.runtime.getDevice() == 0
    for mixed in ((sources[0], *there[1:]), (*there[:2], sources[2])):
        with pytest.raises(ValueError, match="must lie on one device, got q on"):
            attend(rung, *mixed, causal=True)
    with pytest.raises(ValueError, match="on device 1, got"):
        prepared(*sources)
