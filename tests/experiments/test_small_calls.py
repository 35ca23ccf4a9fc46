"""experiments/_harness/small_*.py: the calls that faults are noticed by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import cupyattn as ca
from experiments._harness import (
    small_codes,
    small_draws,
    small_gradients,
    small_layers,
    small_shapes,
)
from experiments._harness.small_attention import attention_calls
from experiments._harness.small_calls import small_calls

#: The cheapest call of each kind of judgement.
QUICK = (
    "fa_tc: large scores, ties", "fa_int8: not finite", "fa_tc: packed", "fa_int8: scales: token",
    "quantize: tensor, float16", "activations by row: float16", "weight by block: (50, 40), 16",
    "product: rows", "norm_quant: gelu", "kept keys: 7 of 33", "merge: float16", "4 bits: bytes",
    "layer, outliers",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_calls_have_nothing_to_say(name: str) -> None:
    assert small_calls()[name]() == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(small_calls()) - set(QUICK)))
def test_no_call_has_anything_to_say(name: str) -> None:
    assert small_calls()[name]() == ""


def altered(function: Callable[..., np.ndarray], by: float) -> Callable[..., np.ndarray]:
    def wrong(*args: object, **options: object) -> np.ndarray:
        found = function(*args, **options)
        if options.get("backend") == "interpret":
            found = (found[0], found[1] * np.float32(by), *found[2:])
        return found

    return wrong


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = altered(ca.act_quant, 1.001)
    said = small_layers.codes(wrong, (3, 300), "float16", "channel")
    assert said == "bits of result 1 differ from the mirror's"
    monkeypatch.setattr(small_layers.ca, "norm_quant", altered(ca.norm_quant, 1.1))
    calls = small_layers.layer_calls()
    assert "bits of result 1" in calls["norm_quant: layer"]()
    assert "of the bound of codes" in calls["norm_quant: gelu"]()


def test_names_say_what_is_called() -> None:
    parts = (
        attention_calls, small_shapes.shape_calls, small_codes.code_calls,
        small_gradients.gradient_calls, small_layers.layer_calls, small_draws.draw_calls,
    )  # fmt: skip
    assert len(small_calls()) == sum(len(x()) for x in parts)
