"""`accelerate`: an interrupt between any two lines of placing leaves the model as it was."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from cupyattn.interop import diffusers as interop
from cupyattn.interop.diffusers import interception
from cupyattn.interop.torch import activated, placing
from tests.interop import diffusers_cases as cases

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

#: Layers of one feed-forward network, and attention.
FEW = r"^transformer_blocks\.0\.(?:ff\.|attn$)"


@pytest.mark.parametrize(
    "function",
    [
        placing.place_layers, activated.place_activated_layers,
        interception.replace_class, interop.Int8Replacement.__init__,
    ],
    ids=lambda function: function.__qualname__,
)  # fmt: skip
def test_an_interruption_at_any_line_of_placing_takes_all_of_it_back(function: Any) -> None:
    model = cases.make("flux").transformer
    before = state(model)
    for line in sorted({line for *_, line in function.__code__.co_lines() if line}):
        with interrupted(function.__code__, line):
            interop.accelerate(model, include=FEW, compile=False, log=None).restore()
        assert state(model) == before, (function.__qualname__, line)


@contextlib.contextmanager
def interrupted(code: Any, line: int) -> Iterator[None]:
    """Interrupt the code before it runs a line for the first time, if it does."""
    is_left = True

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal is_left
        if frame.f_code is not code:
            return None
        if is_left and event == "line" and frame.f_lineno == line:
            is_left = False
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)


def state(model: Any) -> dict[str, Any]:
    """Return each module of a model with its class, its attributes' names, and its hooks."""
    return {
        name: (id(module), type(module), sorted(vars(module)), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }
