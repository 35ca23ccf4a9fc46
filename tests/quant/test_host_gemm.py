"""The host's part of INT8 products on CuPy arrays, without a device, like test_host_calls.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays import described
from cupyattn.ops import act_quant, gemm, weights
from cupyattn.ops.act_quant import act_quant_except
from cupyattn.plans.records import TensorMap
from cupyattn.runtime import launches, recent, tensor_map
from tests.runtime.test_host_calls import Driver, array, driver  # noqa: F401

cupy = pytest.importorskip("cupy")

K, N = 256, 384


@dataclass
class Host:
    """The driver's stand-in, and every plan that ran."""

    driver: Driver
    plans: list[Any] = field(default_factory=list)

    def passed(self, number: int) -> tuple[str, dict[str, int]]:
        """Return the kernel of a launch, and by buffer the addresses that it was passed."""
        entry, stream, values = self.driver.launches[number]
        assert stream == self.driver.stream
        one = next(one for plan in self.plans for one in plan.launches if one.entry == entry)
        found = {}
        for parameter, value in zip(one.params, values, strict=True):
            if isinstance(parameter, TensorMap):
                found[f"{parameter.buffer} of a map"] = int.from_bytes(value[:8], "little")
                continue
            struct, fields = parameter
            packed = np.frombuffer(value, struct)[0]
            found |= {x: int(packed[name]) for name, x in fields.items() if isinstance(x, str)}
        return entry, found


@contextlib.contextmanager
def watched(
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    *planners: tuple[Any, str],
) -> Iterator[Host]:
    """Keep every plan that these functions of modules make; arrays have no device to go to."""
    found = Host(driver)

    def told(function: Any) -> Any:
        def planned(*arguments: Any, **options: Any) -> Any:
            plan = function(*arguments, **options)
            driver.expect([plan])
            found.plans.append(plan)
            return plan

        return planned

    for module, name in planners:
        monkeypatch.setattr(module, name, told(getattr(module, name)))
    recent.CALLS.clear()
    yield found
    recent.CALLS.clear()


@pytest.fixture
def host(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:  # noqa: F811
    planners = (
        (gemm, "plan_gemm"), (act_quant, "plan_act_quant"), (weights, "plan_weight_blocks"),
        (act_quant, "plan_row_quant"), (weights, "plan_row_quant"),
    )  # fmt: skip
    with watched(driver, monkeypatch, *planners) as found:
        yield found


def operands(m: int, strategy: str = "block") -> dict[str, Any]:
    a_scales, b_scales = (m, K // 128), (N // 128, K // 128)
    if strategy == "channel":
        a_scales, b_scales = (m, 1), (N, 1)
    return {
        "a": array((m, K), "int8"), "a_scales": array(a_scales, "float32"),
        "b": array((N, K), "int8"), "b_scales": array(b_scales, "float32"),
    }  # fmt: skip


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_a_product_that_comes_again_gets_the_new_addresses(
    host: Host, arch: str, strategy: str
) -> None:
    for turn in range(3):
        given, bias = operands(5, strategy), array((N,), "float32")
        given = {name: x[None] if name[0] == "a" else x for name, x in given.items()}
        c = ca.int8_gemm(*given.values(), bias=bias, activation="silu", arch=arch)
        assert c.shape == (1, 5, N) and c.dtype == np.float16
        entry, found = host.passed(turn)
        known = {**given, "bias": bias, "c": c}
        assert entry == {"block": "gemm_int8", "channel": "gemm_int8_channel"}[strategy]
        assert found.keys() - known.keys() <= {"a of a map", "b of a map"}
        for name, x in known.items():
            assert found[name] == x.data.ptr, name
        if arch == "sm_90a":
            assert found["a of a map"] == given["a"].data.ptr
            assert found["b of a map"] == given["b"].data.ptr
    assert len(host.plans) == 1 and len(recent.CALLS) == 1


def test_a_product_goes_where_the_caller_says(host: Host) -> None:
    for turn in range(3):
        given, out = operands(5), array((5, N))
        assert ca.int8_gemm(*given.values(), arch="sm_90", out=out) is out
        assert host.passed(turn)[1]["c"] == out.data.ptr
    assert len(host.plans) == len(recent.CALLS) == 1
    with pytest.raises(ValueError, match="out must not share memory with b$"):  # found again
        codes = given["b"].view(np.float16).reshape(-1)[: 5 * N].reshape(5, N)
        ca.int8_gemm(*given.values(), arch="sm_90", out=codes)
    assert len(host.driver.launches) == 3


def test_a_map_is_encoded_once_for_each_address(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one form take turns: what describes their arrays is remembered."""
    made, plain = [], tensor_map.encode
    monkeypatch.setattr(
        tensor_map, "encode", lambda address, *rest: made.append(address) or plain(address, *rest)
    )
    layers, kept = [operands(5) for _ in range(3)], []  # no result where another one was
    for turn in range(9):
        given = layers[turn % 3]
        kept.append(ca.int8_gemm(*given.values(), arch="sm_90a"))
        _, found = host.passed(turn)
        assert found["a of a map"] == given["a"].data.ptr
        assert found["b of a map"] == given["b"].data.ptr
    assert sorted(made) == sorted(x[name].data.ptr for x in layers for name in "ab")
    monkeypatch.setattr(launches, "_MAX_ENCODED", 3)  # the fourth begins anew
    kept.append(ca.int8_gemm(*operands(5).values(), arch="sm_90a"))
    kept.append(ca.int8_gemm(*layers[0].values(), arch="sm_90a"))
    assert len(made) == 6 + 4
    _, found = host.passed(10)
    assert found["a of a map"] == layers[0]["a"].data.ptr


def test_what_differs_is_another_call(host: Host) -> None:
    for m, options in ((5, {}), (6, {}), (6, {"out_dtype": "float32"}), (6, {"activation": "gelu"}),
                       (6, {"tiles": ca.GemmTiles(32, 32, 2, 2)})):  # fmt: skip
        ca.int8_gemm(*operands(m).values(), arch="sm_90", **options)
    shifted = operands(6)
    shifted["a"] = array((6, K + 16), "int8")[:, 8 : 8 + K]
    ca.int8_gemm(*shifted.values(), arch="sm_90")
    assert len(host.plans) == len(host.driver.launches) == len(recent.CALLS) == 6


def test_what_is_copied_is_copied_by_each_call(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call makes a separate copy, and the second call is known all the same."""
    copies: list[Any] = []

    def copied(x: Any) -> Any:
        copies.append(contiguous(x))
        return copies[-1]

    monkeypatch.setitem(described._STEPS, "whole", copied)
    for turn in range(3):
        given = operands(4)
        given["a"] = array((4, 2 * K), "int8")[:, ::2]  # whose last axis is not contiguous
        ca.int8_gemm(*given.values(), arch="sm_90")
        assert len(host.driver.launches) == len(copies) == turn + 1 and len(recent.CALLS) == 1
        _, found = host.passed(turn)
        assert found["a"] == copies[-1].data.ptr and found["b"] == given["b"].data.ptr


def contiguous(x: Any) -> Any:
    """Stand in for a copy, which takes a device."""
    return x if x.strides[-1] == x.itemsize else array(x.shape, x.dtype)


def test_activations_that_come_again(host: Host) -> None:
    place = array((K,), "int32")
    columns = np.arange(3, dtype=np.int32)
    for turn in range(3):
        x = array((2, 5, K))
        codes, scales = ca.act_quant(x)
        entry, found = host.passed(2 * turn)
        assert entry == "act_quant" and (codes.shape, scales.shape) == ((2, 5, K), (2, 5, 2))
        assert found == {"x": x.data.ptr, "codes": codes.data.ptr, "scales": scales.data.ptr}
        codes, scales, kept = act_quant_except(x, columns, place, "float16")
        assert kept.shape == (2, 5, 8) and kept.dtype == np.float16
    assert len(host.driver.launches) == 6 and len(recent.CALLS) == 2


def test_rows_that_come_again(host: Host) -> None:
    """Activations and weights by channel: one kernel, each with its own operand."""
    for turn in range(3):
        for number, function in enumerate((ca.act_quant, ca.weight_quant)):
            x = array((N, K))
            codes, scales = function(x, strategy="channel")
            entry, found = host.passed(2 * turn + number)
            assert entry == "row_quant" and (codes.shape, scales.shape) == ((N, K), (N, 1))
            assert set(found.values()) == {x.data.ptr, codes.data.ptr, scales.data.ptr}
    assert len(host.driver.launches) == 6 and len(recent.CALLS) == 2


def test_weights_that_come_again(host: Host) -> None:
    for turn in range(3):
        w = array((N, 2, K // 2))
        codes, scales = ca.weight_quant(w)
        entry, found = host.passed(2 * turn)
        assert entry == "weight_quant" and (codes.shape, scales.shape) == (w.shape, (3, 2))
        assert found == {"w": w.data.ptr, "codes": codes.data.ptr, "scales": scales.data.ptr}
        back = ca.weight_dequant(codes, scales, out_dtype="bfloat16")
        entry, found = host.passed(2 * turn + 1)
        assert entry == "weight_dequant" and back.shape == w.shape
        assert found == {"w": back.data.ptr, "codes": codes.data.ptr, "scales": scales.data.ptr}
    assert len(host.plans) == len(recent.CALLS) == 2
