"""The way of an operand to its launch on a device, as test_ways.py, with no device."""

from __future__ import annotations

import pytest

from cupyattn.runtime import recent
from tests.problem.test_ways import OPERATIONS, SIZES, call_of, check, steps
from tests.runtime.test_host_calls import Driver, array, cupy, driver  # noqa: F401


@pytest.mark.parametrize("operation", OPERATIONS)
def test_to_the_launch(
    operation: str,
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first call, and a recalled one."""
    launched: list[int] = []
    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", lambda one, *_: launched.append(one))
    arrays = {name: array(shape, dtype) for name, (shape, dtype) in SIZES.items()}
    call, operand = call_of(operation, arrays, None), arrays[OPERATIONS[operation]]
    recent.CALLS.clear()
    first = steps(call, operand)
    check(first, "arrays", "runtime")
    count = len(launched)
    assert count
    again = steps(call, operand)
    check(again, "runtime")
    assert len(launched) == 2 * count and len(again) < len(first)
    recent.CALLS.clear()
