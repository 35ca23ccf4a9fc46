"""The fuzzer runs, and sees a planted fault."""

from __future__ import annotations

from typing import Any

import pytest

import cupyattn as ca
from experiments import fuzz


def test_a_few_calls_are_right() -> None:
    assert fuzz.main(["--calls", "20", "--others", "2"]) == 0


@pytest.mark.parametrize("name", ["attention", "act_quant"])
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(ca, name)

    def wrong(*args: Any, **options: Any) -> Any:
        o, lse = whole(*args, **options)
        if o.size:
            o[...] = o[::-1] + o.dtype.type(1)
        return o, lse

    monkeypatch.setattr(ca, name, wrong)
    outcomes = [fuzz.run_case(name, number, 0, "mirror")[0] for number in range(10)]
    assert "failed" in outcomes


def test_an_exception_of_another_kind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(ca, "attention", broken)
    assert fuzz.run_case("attention", 0, 0, "mirror") == ("failed", "KeyError: 'x'")
