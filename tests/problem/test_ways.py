"""The way of an operand from the function that a user calls to the mirror or the interpreter: few
packages, and no function gets it from one that stands below."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from tests.support.resolved import watch_resolving
from tests.test_structure import PACKAGE, RANK, place

#: The most packages that an operand may enter.
MOST = 9
#: Operations, and what their first operand is called.
OPERATIONS = {
    "attention": "q", "fa_int8": "q", "attention_backward": "q", "quantize": "q", "int8_gemm": "a",
}  # fmt: skip


def call_of(operation: str, arrays: dict[str, Any], backend: str | None) -> Callable[[], object]:
    """One call on arrays by name, on a backend: None, the device."""
    q, k, v, a, a_scales, b, b_scales = (
        arrays[name] for name in ("q", "k", "v", "a", "a_scales", "b", "b_scales")
    )
    options: dict[str, Any] = {"arch": "sm_90"} if backend is None else {"backend": backend}
    return {
        "attention": lambda: ca.attention(q, k, v, **options),
        "fa_int8": lambda: ca.attention(q, k, v, variant="fa_int8", **options),
        "attention_backward": lambda: ca.attention_backward(
            arrays["o"], q, k, v, arrays["o"], arrays["lse"], **options
        ),
        "quantize": lambda: ca.quantize(q, k, v, **options),
        "int8_gemm": lambda: ca.int8_gemm(a, a_scales, b, b_scales, **options),
    }[operation]


#: Shapes and types of the operands of all calls.
SIZES: dict[str, tuple[tuple[int, ...], str]] = {
    **dict.fromkeys("qkv", ((1, 1, 4, 16), "float16")), "o": ((1, 1, 4, 16), "float16"),
    "lse": ((1, 1, 4), "float32"), "a": ((3, 128), "int8"), "a_scales": ((3, 1), "float32"),
    "b": ((128, 128), "int8"), "b_scales": ((1, 1), "float32"),
}  # fmt: skip


def carries(x: Any, array: Any, depth: int = 0) -> bool:
    """Whether a value is an array or a view of it, or holds one: in a record of ours, too."""
    if isinstance(x, type(array)):
        return x is array or (x.base is not None and carries(x.base, array, depth))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        x = vars(x) if hasattr(x, "__dict__") else {}
    if isinstance(x, dict):
        x = list(x.values())
    within = isinstance(x, (list, tuple)) and depth < 4
    return within and any(carries(one, array, depth + 1) for one in x)


@functools.cache
def package_of(file: str) -> str | None:
    """The package that a file belongs to, None where it is not ours."""
    path = Path(file)
    return place(path) if path.is_relative_to(PACKAGE) else None


@functools.cache
def is_caller(file: str) -> bool:
    """Whether a frame of this file counts as a caller: one of ours, and no decorator's."""
    own = package_of(file) is not None
    return own and Path(file) != PACKAGE / "problem" / "borrowed_names.py"


def place_of_caller(frame: FrameType) -> str:
    """The package that called a function; an operation, where none of ours did."""
    caller = frame.f_back
    while caller and not is_caller(caller.f_code.co_filename):
        caller = caller.f_back
    return (package_of(caller.f_code.co_filename) if caller else None) or "ops"


def steps(call: Callable[[], object], array: Any) -> list[tuple[str, str]]:
    """Return by whom an array is passed, and to whom: packages, for each function that gets it."""
    found: list[tuple[str, str]] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        entered = package_of(frame.f_code.co_filename)
        if entered is None or entered == "interpret" == place_of_caller(frame):
            return  # of thousands of instructions, whose operands have entered with the first
        if not any(carries(x, array) for x in list(frame.f_locals.values())):
            return
        found.append((place_of_caller(frame), entered))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def check(found: list[tuple[str, str]], *passed: str) -> set[str]:
    """Return the packages: few, those named among them, and no function called from above them."""
    entered = {to for _, to in found}
    assert {"ops", *passed} <= entered and len(entered) <= MOST, entered
    climbs = {(by, to) for by, to in found if by != to and RANK[to] >= RANK[by]}
    assert not climbs, climbs
    return entered


@pytest.mark.parametrize("backend", ["interpret", "mirror"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_the_host(operation: str, backend: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(1, 9, s).astype(dtype) for name, (s, dtype) in SIZES.items()}
    call = call_of(operation, arrays, backend)
    call()  # compiles, and imports what is imported when it is first needed
    found = steps(call, arrays[OPERATIONS[operation]])
    entered = check(found, "arrays", *(["interpret"] if backend == "interpret" else []))
    assert backend == "interpret" or "plans" not in entered  # the mirror needs no plan


@pytest.mark.parametrize("backend", ["interpret", "mirror"])
def test_other_queries_of_codes(backend: str) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 4, 16)).astype(np.float16)
    codes = ca.quantize_kv(k, v, backend=backend)
    codes.with_q(q, backend=backend)
    check(steps(lambda: codes.with_q(q, backend=backend), q), "arrays", "quant")


@pytest.mark.parametrize("backend", ["interpret", "mirror"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_is_resolved_once(
    operation: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(1, 9, s).astype(dtype) for name, (s, dtype) in SIZES.items()}
    found = watch_resolving(monkeypatch)
    call_of(operation, arrays, backend)()
    forward = ["attention"] if operation == "attention_backward" else []  # whose gradients they are
    own = "attention" if operation == "fa_int8" else operation
    assert found == [own, *forward]


@pytest.mark.parametrize("way", [("ops", "interop"), ("plans", "reference")])
def test_a_way_back_is_found(way: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check([("ops", "ops"), way])
