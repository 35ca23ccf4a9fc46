"""What the tests on a device share: problems, runs, judgements, buffers with guards around them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cupyattn import api, attention, checks, launch, quantize, testing
from cupyattn import compile as kc
from cupyattn.launch import Operand
from cupyattn.quant import QuantizedQKV
from cupyattn.registry import VARIANTS, lookup
from cupyattn.request import Options, resolve
from cupyattn.rounding import STORAGE

cupy = pytest.importorskip("cupy")

#: Every rung with every storage type that it takes.
CELLS = [(name, dtype) for name, variant in VARIANTS.items() for dtype in variant.dtypes]
#: Rungs whose operands are the caller's own.
PLAIN = [name for name, variant in VARIANTS.items() if variant.family != "int8"]
#: Elements of NaN on either side of a guarded array.
GUARD = 512

Arrays = tuple[Any, Any, Any]


# ---- arrays --------------------------------------------------------------------------------------


def normal(
    q: Sequence[int], kv: Sequence[int], dtype: str = "float16", seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """N(0, 1) on the host."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(STORAGE[dtype]) for shape in (q, kv, kv))


def on_device(*arrays: np.ndarray) -> tuple[Any, ...]:
    return tuple(cupy.asarray(array) for array in arrays)


def on_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


def bits(array: Any) -> bytes:
    """The elements of an array in C order, as bytes: NaN equals itself, -0 does not equal 0."""
    return np.ascontiguousarray(on_host(array)).tobytes()


def embedded(x: np.ndarray, pad: int = 8) -> Any:
    """Return `x` on the device as a view of a larger buffer that is NaN everywhere else."""
    shape = tuple(n + 2 for n in x.shape[:-1]) + (x.shape[-1] + 2 * pad,)
    buffer = np.full(shape, np.nan, x.dtype)
    inside = tuple(slice(1, n + 1) for n in x.shape[:-1]) + (slice(pad, pad + x.shape[-1]),)
    buffer[inside] = x
    return cupy.asarray(buffer)[inside]


@dataclass(frozen=True)
class Guarded:
    """An array of NaN with `GUARD` elements of NaN before and behind it."""

    buffer: Any
    array: Any

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: str) -> Guarded:
        count = int(np.prod(shape))
        buffer = cupy.asarray(np.full(count + 2 * GUARD, np.nan, STORAGE[dtype]))
        return cls(buffer, buffer[GUARD : GUARD + count].reshape(shape))

    def check(self) -> None:
        """Raise unless both guards are as they were and the array has been written in full."""
        buffer = on_host(self.buffer)
        before = np.full(GUARD, np.nan, buffer.dtype).tobytes()
        assert buffer[:GUARD].tobytes() == before, "written before the array"
        assert buffer[-GUARD:].tobytes() == before, "written behind the array"
        assert not np.isnan(buffer[GUARD:-GUARD].astype(np.float32)).any(), "left unwritten"


# ---- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One call, with all that is needed to judge it."""

    variant: str
    inputs: Arrays
    options: dict[str, Any]
    quantized: QuantizedQKV | None
    o: Any
    lse: Any

    def judge(self, *, host: bool = True) -> testing.Report:
        """J2, and J3 where the operands were quantised; on the host unless told otherwise."""
        move = on_host if host else (lambda array: array)
        z = self.quantized
        if z is not None and host:
            names = ("q_codes", "k_codes", "v", "q_scale", "k_scale", "k_mean")
            moved = {n: on_host(a) for n in names if (a := getattr(z, n)) is not None}
            z = replace(z, **moved)
        q, k, v = map(move, self.inputs)
        return testing.judge(
            move(self.o), q, k, v, variant=self.variant, lse=move(self.lse), quantized=z,
            **self.options,
        )  # fmt: skip

    def check(self) -> testing.Report:
        """Raise unless every judgement holds."""
        report = self.judge()
        assert report.passed, str(report)
        return report


def run(variant: str, inputs: Arrays, **options: Any) -> Run:
    """Call `attention` with CuPy arrays, and keep the quantised operands of the INT8 rung."""
    if lookup(variant).family != "int8":
        o, lse = attention(*inputs, variant=variant, return_lse=True, **options)
        return Run(variant, inputs, options, None, o, lse)
    z = quantize(*inputs)
    o, lse = attention(z, variant=variant, return_lse=True, **options)
    return Run(variant, inputs, options, z, o, lse)


def run_into(variant: str, inputs: Arrays, o: Any, lse: Any, **options: Any) -> Run:
    """Plan and launch by hand, into the buffers given for both results."""
    call = checks.check_attention(*inputs, return_lse=True, **options)
    rung = lookup(variant)
    if rung.family != "int8":
        plan = launch.plan_attention(rung, call, *map(Operand.of, (*inputs, o)))
        launch.run_cuda(plan, {**dict(zip("qkv", inputs, strict=True)), "o": o, "lse": lse})
        return Run(variant, inputs, options, None, o, lse)
    z = quantize(*inputs)
    operands = (z.q_codes, z.k_codes, z.v, o, z.q_scale, z.k_scale)
    plan = launch.plan_int8(
        rung, call, *map(Operand.of, operands),
        group_q=z.group_q, group_kv=z.group_kv, smoothed=z.k_mean is not None,
    )  # fmt: skip
    names = ("q_codes", "k_codes", "v", "o", "q_scale", "k_scale")
    launch.run_cuda(
        plan, {**dict(zip(names, operands, strict=True)), "lse": lse, "k_mean": z.k_mean}
    )
    return Run(variant, inputs, options, z, o, lse)


# ---- compiling beforehand ------------------------------------------------------------------------


def specs_of(
    variant: str, dtype: str, head_dim: int, causal: bool, *, lse: bool = True, pad: int = 0
) -> Iterable[kc.ModuleSpec]:
    """Yield what a call compiles, for operands with `pad` elements on either side of a row."""
    x = cupy.empty((1, 1, 64, head_dim + 2 * pad), STORAGE[dtype])[..., pad : pad + head_dim]
    asked = Options(variant=variant, causal=causal, return_lse=lse)
    for plan in api.plans(resolve(x, x, x, asked)):
        yield from (one.module for one in plan.launches)


def prebuild(specs: Iterable[kc.ModuleSpec]) -> None:
    """Compile for this device, in as many threads as there are cores.

    The tests then find everything in the cache, where compiling one after the other would take
    most of their time. Of several test workers one compiles and the others wait for its files.
    """
    arch = kc.device_architecture(int(cupy.cuda.Device().compute_capability))
    wanted = dict.fromkeys(specs)
    kc.cache_folder().mkdir(parents=True, exist_ok=True)
    with (kc.cache_folder() / "prebuild.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda spec: kc.build(spec, arch), wanted))
