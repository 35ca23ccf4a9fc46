"""Prepared calls on a device: equal to attention(), with scratch memory of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cupyattn import attention, plan, quantize
from cupyattn.compiler import modules as kc
from tests.gpu.support import Captured, arch_of, checked_calls, on_device
from tests.support.runs import RUNGS, bits, normal, variant_of

cupy = pytest.importorskip("cupy")

SHAPES = ((2, 4, 100, 64), (2, 2, 130, 64))


def options_of(rung: str, **others: Any) -> dict[str, Any]:
    return {"variant": variant_of(rung).name, "arch": arch_of(rung), "causal": True, **others}


@pytest.mark.parametrize("rung", RUNGS)
def test_a_prepared_call_is_the_call(rung: str) -> None:
    prepared = plan(*on_device(*normal(*SHAPES)), return_lse=True, **options_of(rung))
    for seed in range(3):
        inputs = on_device(*normal(*SHAPES, seed=seed))
        o, lse = prepared(*inputs)
        expected, expected_lse = attention(*inputs, return_lse=True, **options_of(rung))
        assert bits(o) == bits(expected) and bits(lse) == bits(expected_lse)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_captured_call_owns_its_scratch_memory(rung: str) -> None:
    """Whatever else takes memory from the pool afterwards, a replay computes the same."""
    inputs = on_device(*normal(*SHAPES))
    out = cupy.full_like(inputs[0], cupy.nan)
    prepared = plan(*inputs, out=out, **options_of(rung))
    captured = Captured(lambda: prepared(*inputs, out=out))
    expected = bits(attention(*inputs, **options_of(rung)))
    cupy.cuda.Device().synchronize()
    with captured.stream:
        filled = [cupy.full(2**n, 0xFF, cupy.uint8) for n in range(4, 22)]
        out.fill(cupy.nan)
    captured.replay()
    assert bits(out) == expected and all(bool((x == 0xFF).all()) for x in filled)


def test_a_call_is_found_again_and_only_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A found call is neither checked nor planned."""
    q, k, v = on_device(*normal(*SHAPES))
    checked = checked_calls(monkeypatch)
    before = bits(attention(q, k, v, variant="fa"))
    assert bits(attention(*(x.copy() for x in (q, k, v)), variant="fa")) == before
    assert len(checked) == 1
    attention(q, k, v, variant="fa_warps")
    attention(q[:, :, 1:], k, v, variant="fa")
    attention(*(x.astype(cupy.float32) for x in (q, k, v)), variant="fa")
    attention(q, k[:, ::-1], v, variant="fa")
    assert len(checked) == 5
    kc.cache_clear(disk=False)  # what was loaded is stale from now on
    assert bits(attention(q, k, v, variant="fa")) == before and len(checked) == 6


@pytest.mark.parametrize("rung", RUNGS)
def test_layouts_strides_and_results_of_the_caller(rung: str) -> None:
    q, k, v = on_device(*normal(*SHAPES))
    expected = bits(attention(q, k, v, **options_of(rung)))
    turned = [cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    for _ in range(2):
        o = attention(*turned, layout="BSHD", **options_of(rung))
        assert bits(o.swapaxes(1, 2)) == expected
        scattered = [cupy.asfortranarray(x) for x in (q, k, v)]  # copied to be laid out
        assert bits(attention(*scattered, **options_of(rung))) == expected
    prepared = plan(*turned, layout="BSHD", **options_of(rung))
    assert bits(prepared(*turned).swapaxes(1, 2)) == expected


def test_quantised_operands_are_found_again() -> None:
    z = quantize(*on_device(*normal(*SHAPES)))
    expected = bits(attention(z))
    assert bits(attention(z)) == expected
    assert bits(plan(z)(z)) == expected
    other = quantize(*on_device(*normal(*SHAPES, seed=1)))
    assert bits(attention(other)) != expected


@pytest.mark.parametrize("rung", RUNGS)
def test_threads_share_a_remembered_call(rung: str) -> None:
    """Each thread has its own parameters, its own stream, its own scratch memory."""
    problems = [on_device(*normal(*SHAPES, seed=i)) for i in range(8)]
    expected = [bits(attention(*inputs, **options_of(rung))) for inputs in problems]
    cupy.cuda.Device().synchronize()

    def work(i: int) -> list[bytes]:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            found = [attention(*problems[i], **options_of(rung)) for _ in range(20)]
            stream.synchronize()
            return [bits(o) for o in found]

    with ThreadPoolExecutor(8) as pool:
        for i, found in enumerate(pool.map(work, range(8))):
            assert found == [expected[i]] * 20
