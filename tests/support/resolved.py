"""Counts the calls of functions, above all of the function that resolves a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cupyattn.ops import operation
from cupyattn.ops.act_quant import ACT_QUANT
from cupyattn.ops.attention import ATTENTION
from cupyattn.ops.backward import BACKWARD
from cupyattn.ops.gemm import GEMM
from cupyattn.ops.layers import LAYERS
from cupyattn.ops.quantize import QUANTIZE


def watch_resolving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of an operation is added each time it resolves a call."""
    found: list[str] = []
    for one in (ACT_QUANT, ATTENTION, BACKWARD, GEMM, LAYERS, QUANTIZE):
        monkeypatch.setattr(one, "resolve", _heard(found, one.name, one.resolve))
    return found


def watch_running(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of an operation is added each time it runs a new call."""
    found: list[str] = []
    own = operation._run_new

    def run_new(one: Any, *given: Any) -> Any:
        found.append(one.name)
        return own(one, *given)

    monkeypatch.setattr(operation, "_run_new", run_new)
    return found


def watch_calls(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> list[str]:
    """Return a list to which the name of a function of a module is added each time it is called."""
    found: list[str] = []
    for module, name in functions:
        monkeypatch.setattr(module, name, _heard(found, name, getattr(module, name)))
    return found


def _heard(found: list[str], name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def heard(*given: Any, **options: Any) -> Any:
        found.append(name)
        return own(*given, **options)

    return heard
