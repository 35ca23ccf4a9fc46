"""The host's part of torch's linear layers, without a device, like test_interop_torch_host.py."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest

from cupyattn.arrays import described
from cupyattn.runtime import recent

torch = pytest.importorskip("torch")

from tests.interop.test_interop_torch_host import (  # noqa: E402, F401 - needs torch
    OnDevice,
    calls,
    empty,
    planned_no_more,
)
from tests.quant.test_host_gemm import Host, K, N, host, operands  # noqa: E402, F401
from tests.runtime.test_host_calls import array, driver  # noqa: E402, F401


@pytest.fixture
def made(calls: Any, monkeypatch: pytest.MonkeyPatch) -> list[OnDevice]:  # noqa: F811
    """The scratch memory that calls take of torch."""
    found: list[OnDevice] = []

    def noted(shape: Any, strides: Any, dtype: Any) -> OnDevice:
        new = empty(shape, strides, dtype)
        if dtype is torch.uint8:
            found.append(new)
        return new

    monkeypatch.setattr(calls.bridge, "_empty", noted)
    return found


def test_a_linear_layer_on_tensors_is_planned_once(
    host: Host,  # noqa: F811
    made: list[OnDevice],
) -> None:
    """Kernels get the addresses of tensors; no array is made of one."""
    linear = importlib.import_module("cupyattn.interop.torch.linear")
    given = operands(5)
    weight, scales = OnDevice(given["b"]), OnDevice(given["b_scales"])
    bias, planned = OnDevice(array((N,), "float32")), 0
    for turn in range(3):
        x = OnDevice(array((2, 5, K)))
        y = linear.run(x, weight, scales, bias, "silu", "sm_90", None)
        assert y.shape == (2, 5, N)
        entry, quantised = host.passed(2 * turn)
        assert entry == "act_quant" and quantised["x"] == x.data_ptr()
        _, multiplied = host.passed(2 * turn + 1)
        assert multiplied["c"] == y.data_ptr() and multiplied["bias"] == bias.data_ptr()
        assert multiplied["a"] == quantised["codes"]
        assert multiplied["a_scales"] == quantised["scales"]
        assert multiplied["b"] == weight.data_ptr()
        assert multiplied["b_scales"] == scales.data_ptr()
        planned = planned or len(host.plans)
        start = made[-1].data_ptr()
        assert made[-1].shape == (10 * K + 256,)  # codes, and 20 scales
        assert (quantised["codes"], quantised["scales"]) == (start, start + 10 * K)
    known = len(recent.CALLS)
    assert len(host.plans) == planned and len(made) == 3
    linear.run(OnDevice(array((2, 5, K))), weight, scales, None, "silu", "sm_90", None)
    assert len(recent.CALLS) > known  # another form: without a bias


@pytest.mark.parametrize("summed", [False, True])
def test_what_inductor_runs_of_a_layer_is_planned_once(
    summed: bool,
    host: Host,  # noqa: F811
    made: list[OnDevice],
) -> None:
    """Kernels get the addresses of the tensors of each call, a gate's rows at their distance."""
    parts = importlib.import_module("cupyattn.interop.torch.linear_parts")
    given, planned = operands(5), 0
    weight = [OnDevice(given[name]) for name in ("b", "b_scales")]
    for turn in range(3):
        x, residual, gate = OnDevice(array((2, 5, K))), OnDevice(array((2, 5, N))), Gate()
        beside = (None, residual, gate) if summed else (None, None, None)
        y = parts.run_layer(x, *weight, *beside, "gelu", "sm_90", None)
        entry, quantised = host.passed(2 * turn)
        assert entry == "act_quant" and quantised["x"] == x.data_ptr()
        _, multiplied = host.passed(2 * turn + 1)
        assert multiplied["c"] == y.data_ptr() and multiplied["b"] == weight[0].data_ptr()
        assert multiplied["a"] == quantised["codes"]
        planned = planned or len(host.plans)
        assert len(host.plans) == planned and len(made) == turn + 1
        if summed:
            assert multiplied["residual"] == residual.data_ptr()
            assert multiplied["gate"] == gate.data_ptr()


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_layers_of_one_input_quantise_it_once_and_are_one_graph(
    strategy: str,
    host: Host,  # noqa: F811
    calls: Any,  # noqa: F811
    made: list[OnDevice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that comes again at its addresses is one launch, of a graph of all kernels."""
    parts = importlib.import_module("cupyattn.interop.torch.linear_parts")
    given = [operands(5, strategy) for _ in range(3)]
    weights, scales = ([OnDevice(one[name]) for one in given] for name in ("b", "b_scales"))
    biases = [OnDevice(array((N,))) for _ in range(3)]
    x = OnDevice(array((2, 5, K)))
    how = ["", "silu", ""], "sm_90", None
    for _ in range(2):
        results = parts._layers(x, weights, scales, biases, *how)
        assert [y.shape for y in results] == [(2, 5, N)] * 3
    _, quantised = host.passed(4)
    assert len(host.driver.launches) == 8 and quantised["x"] == x.data_ptr()
    assert quantised["codes"] == made[-1].data_ptr()
    for number in range(3):
        _, multiplied = host.passed(5 + number)
        assert multiplied["a"] == quantised["codes"]
        assert multiplied["a_scales"] == quantised["scales"]
        assert multiplied["b"] == weights[number].data_ptr()
        assert multiplied["b_scales"] == scales[number].data_ptr()
        assert multiplied["c"] == results[number].data_ptr()
        assert multiplied["bias"] == biases[number].data_ptr()
    planned, same = len(host.plans), itertools.cycle([*results, made[-1]])
    monkeypatch.setattr(calls.bridge, "_empty", lambda *_: next(same))
    for _ in range(2):
        parts._layers(x, weights, scales, biases, *how)
    assert len(host.plans) == planned and host.driver.replays[-2:] == [(0, 7)] * 2
    assert len(host.driver.graphs[0].launches) == 4


class Gate(OnDevice):
    """The second of three parts of a modulation."""

    def __init__(self) -> None:
        super().__init__(array((2, 1, 3 * N))[..., N : 2 * N])


def test_a_gate_that_has_to_be_copied_is_read_from_its_copy_every_time(
    host: Host,  # noqa: F811
    made: list[OnDevice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows lie at no common distance."""
    parts = importlib.import_module("cupyattn.interop.torch.linear_parts")
    copies = []

    def gathered(x: Any, *shape: int) -> Any:
        copies.append(array(shape))
        return copies[-1]

    monkeypatch.setitem(described._STEPS, "gathered", gathered)
    given = operands(5)
    weight = [OnDevice(given[name]) for name in ("b", "b_scales")]
    for turn in range(3):
        residual = OnDevice(array((2, 2, 5, N)))
        x, gate = OnDevice(array((2, 2, 5, K))), OnDevice(array((2, 3, N))[:, :2])
        parts.run_layer(x, *weight, None, residual, gate, "", "sm_90", None)
        assert len(copies) == turn + 1
        assert host.passed(2 * turn + 1)[1]["gate"] == copies[turn].data.ptr
        planned_no_more(monkeypatch)
