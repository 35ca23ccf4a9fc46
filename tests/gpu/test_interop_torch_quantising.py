"""Weights quantised on a device: verdicts, codes and memory.

tests/interop/test_interop_torch_quantising.py has the tests without a device.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch has no CUDA device", allow_module_level=True)
from tests.interop.test_interop_torch_quantising import weights  # noqa: E402 - imports torch

interop = importlib.import_module("cupyattn.interop.torch")
quantising = importlib.import_module("cupyattn.interop.torch.quantising")


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_verdicts_and_codes_are_those_of_the_host(strategy: str) -> None:
    config = ca.Int8Config(strategy=strategy)
    for name, w in weights().items():
        report, made = quantising.coded(name, w.cuda(), config)
        expected, codes = quantising.coded(name, w, config)
        assert (report.verdict, report.reason) == (expected.verdict, expected.reason)
        assert (made is None) == (codes is None)
        for found, other in zip(made or (), codes or (), strict=True):
            assert found.is_cuda and np.array_equal(found.cpu(), other)


@pytest.mark.parametrize("originals", ["cpu", "drop"])
def test_beside_the_model_there_is_memory_for_a_layer(originals: str) -> None:
    layers = [torch.nn.Linear(3072, 12288, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    layers.clear()
    layer = 3072 * 12288 * 2
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    interop.replace_linear_with_int8(model, originals=originals)
    assert torch.cuda.max_memory_allocated() - before < 2 * layer
    assert torch.cuda.memory_allocated() - before < -1.9 * layer
