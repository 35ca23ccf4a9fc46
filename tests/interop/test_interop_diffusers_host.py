"""What the host does for attention of diffusers' modules, with no device, as test_host_calls.py
and test_interop_torch_host.py.
"""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn import QuantConfig, UnsupportedError
from cupyattn.runtime import recent
from tests.interop.test_interop_torch_host import OnDevice, calls, planned_no_more  # noqa: F401
from tests.runtime.test_host_calls import Driver, array, check, driver, planned  # noqa: F401

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

layers = importlib.import_module("cupyattn.interop.diffusers.layers")
steps = importlib.import_module("cupyattn.interop.diffusers.steps")
Schedule = importlib.import_module("cupyattn.interop.diffusers.noise").Schedule

HEADS, LENGTH, HEAD_DIM = 4, 70, 64
#: Noise-to-signal ratios, whose middle is 1.
RATIOS = np.float64([4, 2, 1, 0.5, 0.25])
NO_OPTIONS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}


class Tensor(OnDevice):
    """A tensor (batch, heads, len, head_dim) that lies as (batch, len, heads, head_dim)."""

    device = SimpleNamespace(index=0, type="cuda")
    ndim, requires_grad = 4, False

    def __init__(self, like: Any = None) -> None:
        super().__init__(array((1, LENGTH, HEADS, HEAD_DIM)).swapaxes(1, 2))
        self.dtype = torch.float16


class Policy:
    """Policy: 16 bits below half of the middle noise. It records its arguments."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def mode(self, timestep: int, ratio: float) -> str:
        self.asked.append(ratio)
        return "precision" if ratio < 0.5 else "balanced"


@pytest.fixture
def layer(driver: Driver, calls: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    monkeypatch.setattr(layers, "Tensor", Tensor)
    monkeypatch.setattr(layers, "PLAIN", (Tensor,))
    monkeypatch.setattr(torch, "empty_like", Tensor)
    shared = {"quant": QuantConfig(), "backend": None, "arch": "sm_90"}
    return layers.Layer("x", None, Policy(), steps.Step(), 0, **shared)


def attend(layer: Any, schedule: Any, ratio: float) -> tuple[dict[str, Any], Any]:
    """Call a layer at a noise level; return arrays of its operands and of its result."""
    layer._step.set((schedule, ratio))
    given = {name: Tensor() for name in "qkv"}
    o = layer.attend(*given.values(), None, NO_OPTIONS)
    return {name: x.array for name, x in given.items()}, o.array


def test_a_form_that_was_seen_is_launched_from_addresses_and_counted(
    layer: Any,
    driver: Driver,  # noqa: F811
    calls: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is checked or planned the second time; the policy is asked every time."""
    schedule, example = Schedule(RATIOS, None), [Tensor().array for _ in range(4)]
    made = {
        variant: planned(example[:3], example[3], variant=variant, arch="sm_90")
        for variant in ("fa_int8", "fa_tc")
    }
    for plans in made.values():
        driver.expect(plans)
    for driver.stream in (7, 8, 9):
        for ratio, variant, read in ((1.0, "fa_int8", "v"), (0.25, "fa_tc", "qkv")):
            given, o = attend(layer, schedule, ratio)
            assert o.strides == given["q"].strides and not o.flags.c_contiguous
            check(driver, made[variant], {**{name: given[name] for name in read}, "o": o})
        planned_no_more(monkeypatch)
    assert layer._policy.asked == [1.0, 0.25] * 3
    report = layer.report()
    assert report.modes == {"balanced": 3, "precision": 3} and not report.native
    assert not report.fallbacks


def test_fallbacks_of_every_schedule_are_counted(
    layer: Any,
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = layers.calls.forward

    def refuses(settings: Any, *operands: Any) -> Any:
        if settings.of_call.variant == "fa_int8":
            raise UnsupportedError("no such device")
        return own(settings, *operands)

    monkeypatch.setattr(layers.calls, "forward", refuses)
    example = [Tensor().array for _ in range(4)]
    driver.expect(planned(example[:3], example[3], variant="fa_tc", arch="sm_90"))
    with caplog.at_level(logging.DEBUG, "cupyattn"):
        for _ in range(2):
            schedule = Schedule(RATIOS, None)
            for ratio in (1.0, 1.0, 0.25):
                attend(layer, schedule, ratio)
    report = layer.report()
    assert report.modes == {"balanced": 4, "precision": 2}
    assert report.fallbacks == {"no such device": 4}
    assert [r.levelno for r in caplog.records] == [logging.WARNING, logging.DEBUG] * 2
    assert "mode 'balanced' fell back to 16 bits (call 2): no such device" in caplog.text


def test_what_a_model_hands_over_transposed_is_copied_first(
    layer: Any,
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels read along the last axis: another order costs a copy, and no error."""
    example = [Tensor().array for _ in range(4)]
    driver.expect(planned(example[:3], example[3], variant="fa_tc", arch="sm_90"))
    copied = []

    class Transposed(Tensor):
        def stride(self, axis: int | None = None) -> Any:
            return 2 if axis == 3 else super().stride(axis)

        def contiguous(self) -> Tensor:
            copied.append(Tensor())
            return copied[-1]

    layer._step.set((Schedule(RATIOS, None), 0.25))
    monkeypatch.setattr(recent.CALLS, "remember", lambda *_: None)
    q, k = Tensor(), Transposed()
    given = layer._run({"q": q, "k": k, "v": Tensor()}, None, "precision")
    made = planned(example[:3], example[3], variant="fa_tc", arch="sm_90")
    check(driver, made, {"q": q.array, "k": copied[0].array, "o": given.array})
