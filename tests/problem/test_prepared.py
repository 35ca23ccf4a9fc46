"""Prepared calls: the same results as `attention`, arrays of another form refused, layouts held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn import QuantConfig, attention, plan, quantize
from cupyattn.errors import DeviceMemoryError, UnsupportedError
from cupyattn.ops.attention import ATTENTION
from cupyattn.ops.prepared import Prepared
from cupyattn.runtime import scratch
from cupyattn.runtime.recent import CALLS
from tests.support.runs import in_turn, on_both

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def normal(dtype: str = "float16", len_q: int = 20, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = ((2, 4, len_q, 32), (2, 2, 40, 32), (2, 2, 40, 32))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def turned(*operands: np.ndarray) -> Arrays:
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in operands)
    return q, k, v


@pytest.mark.parametrize(("variant", "backend"), on_both(1))
def test_a_prepared_call_is_the_call(variant: str, backend: str) -> None:
    options: dict[str, Any] = {"variant": variant, "backend": backend, "causal": True}
    prepared = plan(*normal(), return_lse=True, **options)
    for seed in (0, 1):
        o, lse = prepared(*normal(seed=seed))
        expected, expected_lse = attention(*normal(seed=seed), return_lse=True, **options)
        np.testing.assert_array_equal(o, expected)
        np.testing.assert_array_equal(lse, expected_lse)
    assert str(prepared).startswith(f"{variant}: asked for by name")


@pytest.mark.parametrize("variant", in_turn(2))
def test_layouts_are_the_same_call_turned(variant: str) -> None:
    """A result that was not given has the caller's layout, and the kernel must know it."""
    q, k, v = normal()
    options: dict[str, Any] = {"variant": variant, "backend": "interpret"}
    expected = attention(q, k, v, **options)
    found = attention(*turned(q, k, v), layout="BSHD", **options)
    np.testing.assert_array_equal(found.swapaxes(1, 2), expected)
    prepared = plan(*turned(q, k, v), layout="BSHD", **options)
    np.testing.assert_array_equal(prepared(*turned(q, k, v)).swapaxes(1, 2), expected)


def test_a_caller_may_bring_the_result() -> None:
    q, k, v = normal()
    out = np.full(q.shape, np.nan, q.dtype)
    prepared = plan(q, k, v, out=out, backend="interpret")
    assert prepared(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, attention(q, k, v, backend="interpret"))
    with pytest.raises(ValueError, match="out was planned as shape"):
        prepared(q, k, v)
    with pytest.raises(ValueError, match="out was not given when the call was planned"):
        plan(q, k, v, backend="interpret")(q, k, v, out=out)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_given_scales_are_those_of_the_day(backend: str) -> None:
    """A configuration keeps copies; NaN that a call writes over its scales is gone in the next."""
    q, k, v = normal("float16")
    scales = np.full((1, 4, 1), 0.03, np.float32), np.full((1, 2, 1), 0.04, np.float32)
    options: dict[str, Any] = {"variant": "fa_int8", "backend": backend}
    quant = QuantConfig("head", "head", scales=scales)
    prepared = plan(q, k, v, quant=quant, **options)
    expected = prepared(q, k, v)
    for scale in scales:
        scale[...] = 1.0
    np.testing.assert_array_equal(prepared(q, k, v), expected)
    np.testing.assert_array_equal(attention(q, k, v, quant=quant, **options), expected)
    bad = q.copy()
    bad[0, 0, 0, 0] = np.nan
    assert np.isnan(prepared(bad, k, v)[0, 0, 0]).all()
    np.testing.assert_array_equal(prepared(q, k, v), expected)


@pytest.mark.slow
def test_quantised_calls_are_prepared() -> None:
    q, k, v = normal("float32")
    scales = (np.full((2, 4, 1), 0.03, np.float32), 0.03)
    static = QuantConfig(granularity_q="head", granularity_k="tensor", scales=scales)
    for quant in (None, static, QuantConfig(granularity_q="tensor", smooth_k=False)):
        options: dict[str, Any] = {"variant": "fa_int8", "quant": quant}
        prepared = plan(q, k, v, backend="interpret", **options)
        assert prepared.workspace_bytes > q.size + k.size
        for seed in (0, 1):
            operands = normal("float32", seed=seed)
            expected = attention(*operands, backend="mirror", **options)
            np.testing.assert_allclose(prepared(*operands), expected, atol=2e-3)
    z = quantize(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16))
    prepared = plan(z, backend="interpret")
    np.testing.assert_array_equal(prepared(z), attention(z, backend="interpret"))
    assert prepared.workspace_bytes == 0


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("unfused", {}, "unfused needs 35,840 bytes beside its operands, 25,600 of them for 'S'"),
        ("fa_tc", {"return_lse": True}, "fa_tc needs 10,880 bytes .* 10,240 of them for 'o'"),
        ("fa_int8", {}, r"fa_int8 needs .* bytes .*: use QuantConfig\(smooth_k=False, fused"),
        (
            "fa_int8",
            {"quant": QuantConfig(smooth_k=False, fused=True)},
            "needs 10,240 .*: split the batch or",
        ),
        # Codes of 4 bits have no form that quantises by itself.
        ("fa_int8", {"quant": QuantConfig(qk_bits=4)}, "needs .* bytes .*: split the batch or"),
    ],
)
def test_what_does_not_fit_says_how_much_it_needs(
    variant: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    operands = normal()
    monkeypatch.setattr("cupyattn.interpret.run", full)
    with pytest.raises(DeviceMemoryError, match=message):
        attention(*operands, variant=variant, backend="interpret", **options)


@pytest.mark.parametrize(("limit", "free"), [(0, 150), (1000, 100)])
def test_free_memory_is_what_the_pool_could_hand_out(
    limit: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the pool counts, and so does memory that it keeps for others."""
    cupy = pytest.importorskip("cupy")
    pool = SimpleNamespace(free_bytes=lambda: 50, get_limit=lambda: limit, used_bytes=lambda: 900)
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool)
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (100, 2000))
    assert scratch.free_bytes() == free


def test_arrays_of_another_form_are_refused() -> None:
    q, k, v = normal()
    prepared = plan(q, k, v, backend="mirror")
    with pytest.raises(ValueError, match=r"q was planned as shape \(2, 4, 20, 32\).*plan again"):
        prepared(*normal(len_q=21))
    with pytest.raises(ValueError, match=r"q was planned as .* got shape .* dtype float32"):
        prepared(*normal("float32"))
    wide = np.zeros((2, 2, 40, 40), np.float16)[..., :32]
    with pytest.raises(ValueError, match=r"k was planned as .* strides"):
        prepared(q, wide, v)


def test_what_cannot_be_called_cannot_be_planned() -> None:
    q, k, v = normal()
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'casual'"):
        plan(q, k, v, casual=True)
    with pytest.raises(UnsupportedError):
        plan(q, k, v, quant=QuantConfig(qk_bits=4, symmetric=False))
    with pytest.raises(ValueError, match="agree on length"):
        plan(q, k, v[:, :, :3])


def test_only_arrays_on_a_device_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host every call is checked again: nothing there is as fast as a launch."""
    before, checked, resolve = len(CALLS), [], ATTENTION.resolve
    monkeypatch.setattr(ATTENTION, "resolve", lambda *a: checked.append(a) or resolve(*a))
    for _ in range(2):
        attention(*normal())
    assert len(checked) == 2 and len(CALLS) == before
    assert isinstance(plan(*normal()), Prepared)
