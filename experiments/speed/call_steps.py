"""Through how many modules does a call go, and how many functions does a known one take?

Varies       public function
Holds fixed  batch 1, 2 heads, length 64, head_dim 64, float16; nothing is launched, so no device is
             needed; the interpreter skips kernels of the first call, and a stand-in for the driver
             skips kernels of known calls
Measures     of a first call of fa_tc, by `sys.setprofile`, three numbers; *stays* are runs of
             frames in one module of the package, including the caller's module at the end; modules;
             *moves* lead from one module of problem/ to another; of known calls the number of
             Python functions that are called; and lines of code by package, without docstrings,
             comments and blanks
Expect       no change to a call increases one of them
Run          python -m experiments.speed.call_steps [--json FILE]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import itertools
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import cupyattn as ca
from cupyattn import interpret
from cupyattn.arrays import memory
from cupyattn.cli import output
from cupyattn.ops import act_quant, gemm, quantize, weights  # noqa: F401  which are imported late
from cupyattn.runtime import ready, recent
from experiments._harness import recording

PACKAGE = Path(ca.__file__).parent
SHAPE = (1, 2, 64, 64)


def forget() -> None:
    """Let the next call be a first one: nothing of earlier calls is kept."""
    recent.CALLS.clear()
    for name, module in [*sys.modules.items()]:
        if name.startswith("cupyattn"):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def modules_of(call: Callable[[], object]) -> list[str]:
    """Return the module of each frame of ours that a call enters or returns to."""
    found: list[str] = []

    def watch(frame: FrameType | None, event: str, _: object) -> None:
        if event == "return":
            frame = frame.f_back if frame else None
        elif event != "call":
            return
        if frame and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            found.append(frame.f_code.co_filename)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def first_call() -> dict[str, int]:
    """Return the stays, the modules and the moves inside problem/ of a first call of fa_tc."""
    q, k, v = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype(np.float16)

    def call() -> object:
        return ca.attention(q, k, v, backend="interpret")

    with mock.patch.object(interpret, "run", lambda *_: None):
        call()  # triggers imports at first use
        forget()
        stays = [module for module, _ in itertools.groupby(modules_of(call))]
    inside = str(PACKAGE / "problem") + "/"
    pairs = itertools.pairwise(stays)
    moves = sum(one.startswith(inside) and other.startswith(inside) for one, other in pairs)
    return {"stays": len(stays) + 1, "modules": len(set(stays)), "moves": moves}


def array(shape: tuple[int, ...], dtype: str = "float16") -> Any:
    """Return an array of CuPy over memory of the host, which nothing reads or writes."""
    import cupy

    held = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 16, np.uint8)
    start = held.ctypes.data + -held.ctypes.data % 16
    owned = cupy.cuda.memory.UnownedMemory(start, held.size, held, 0)
    return cupy.ndarray(shape, np.dtype(dtype), cupy.cuda.memory.MemoryPointer(owned, 0))


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """Let calls on arrays of CuPy be planned and remembered, and launch nothing."""
    import cupy

    runtime, launched = cupy.cuda.runtime, lambda *_: None
    nowhere, on_device_of = contextlib.nullcontext(), memory.on_device_of
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(lambda size: array((size,), "uint8").data)
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (runtime, "getDevice", lambda: 0),
            (runtime, "setDevice", launched),
            (runtime, "streamIsCapturing", lambda _: False),
            (cupy.cuda, "get_current_stream", lambda *_: SimpleNamespace(ptr=7)),
            (cupy, "asarray", lambda x, *_: x),
            (ready, "compile_side_by_side", launched),
            (ready, "ready", lambda *_: ()),
            (ready.Ready, "launch", launched),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        for module in [*sys.modules.values()]:
            if getattr(module, "on_device_of", None) is on_device_of:
                stack.enter_context(mock.patch.object(module, "on_device_of", lambda _: nowhere))
        yield
    cupy.cuda.set_allocator(before)


def known_calls() -> dict[str, Callable[[], object]]:
    """Return a call of each function, all on small arrays."""
    how = {"arch": "sm_90"}
    q, k, v = (array(SHAPE) for _ in range(3))
    lse, x = array(SHAPE[:3], "float32"), array((64, 256))
    codes = array((64, 256), "int8"), array((64, 2), "float32")
    weight = array((256, 256), "int8"), array((2, 2), "float32")
    packed, ends = [array((64, 2, 64)) for _ in range(3)], array((3,), "int32")
    mask, counts = array((64, 64), "bool"), array((1,), "int32")
    found: dict[str, Callable[[], object]] = {}
    for rung in ca.VARIANTS:
        found[f"attention(), {rung}"] = functools.partial(
            ca.attention, q, k, v, variant=rung, **how
        )
    found["attention(), mask"] = lambda: ca.attention(q, k, v, variant="fa", mask=mask, **how)
    found["attention(), lengths"] = lambda: ca.attention(
        q, k, v, variant="fa", lengths_kv=counts, **how
    )
    found["attention_varlen()"] = lambda: ca.attention_varlen(
        *packed, ends, ends, max_len_q=48, max_len_k=48, variant="fa_tc", **how
    )
    found["attention_backward()"] = lambda: ca.attention_backward(q, q, k, v, q, lse, **how)
    found["quantize()"] = lambda: ca.quantize(q, k, v, **how)
    found["act_quant()"] = lambda: ca.act_quant(x)
    found["weight_quant()"] = lambda: ca.weight_quant(x)
    found["int8_gemm()"] = lambda: ca.int8_gemm(*codes, *weight, **how)
    prepared = ca.plan(q, k, v, variant="fa_tc", **how)
    found["prepared"] = lambda: prepared(q, k, v)
    return found


def functions_of(call: Callable[[], object]) -> int:
    """Return how many Python functions of the package a call calls."""
    found: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            found[frame.f_code.co_filename] += 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found.total()


def known() -> dict[str, int]:
    """Return how many Python functions known calls take."""
    forget()
    with no_device():
        found = {}
        for name, call in known_calls().items():
            for _ in range(2):
                call()
            found[name] = functions_of(call)
    return found


def code_lines(path: Path) -> int:
    """Return the lines of a file that hold code: no docstring, comment or blank line."""
    with path.open("rb") as file:
        kept = {
            line
            for one in tokenize.tokenize(file.readline)
            if one.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
                                tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)
            for line in range(one.start[0], one.end[0] + 1)
        }  # fmt: skip
    for node in ast.walk(ast.parse(path.read_bytes())):
        first = node.body[0] if isinstance(getattr(node, "body", None), list) and node.body else 0
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            kept -= {*range(first.lineno, (first.end_lineno or 0) + 1)}
    return len(kept)


def lines() -> dict[str, int]:
    """Return the lines of code by package, and of all tests."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        found[path.relative_to(PACKAGE).parts[0].removesuffix(".py")] += code_lines(path)
    every = {"cupyattn": found.total()}
    every["tests"] = sum(map(code_lines, (PACKAGE.parent / "tests").rglob("*.py")))
    return {**dict(sorted(found.items())), **every}


def run(args: argparse.Namespace) -> int:
    """Count, print the tables and write the record."""
    content = {"first": first_call(), "known": known(), "lines": lines()}
    for title, name in (
        ("a first call", "first"), ("known calls: functions", "known"), ("lines of code", "lines"),
    ):  # fmt: skip
        output.print_table([title, ""], [[key, str(n)] for key, n in content[name].items()])
        output.say()
    recording.keep(args, "call_steps", "cpu", content)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.guarded(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
