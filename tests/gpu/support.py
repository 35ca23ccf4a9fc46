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

from cupyattn import api, attention, checks, executor, launch, quantize, testing
from cupyattn import compile as kc
from cupyattn.disk_cache import cache_folder
from cupyattn.launch import Operand
from cupyattn.quant import QuantizedQKV
from cupyattn.registry import VARIANTS, Variant, lookup
from cupyattn.request import Options, resolve
from cupyattn.rounding import STORAGE

cupy = pytest.importorskip("cupy")

#: Every rung in every form: ``"fa_tc"`` is the portable form, ``"fa_tc@sm90"`` the Hopper form.
RUNGS = [
    name if form == "portable" else f"{name}@{form}"
    for name, variant in VARIANTS.items()
    for form in variant.forms
]


def variant_of(rung: str) -> Variant:
    return lookup(rung.partition("@")[0])


#: Every rung with every storage type that it takes.
CELLS = [(rung, dtype) for rung in RUNGS for dtype in variant_of(rung).dtypes]
#: Rungs whose operands are the caller's own.
PLAIN = [rung for rung in RUNGS if variant_of(rung).family != "int8"]
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


def embedded(x: np.ndarray, pad: int = 8, fill: float = np.nan) -> Any:
    """Return `x` on the device as a view of a larger buffer that holds `fill` everywhere else."""
    shape = tuple(n + 2 for n in x.shape[:-1]) + (x.shape[-1] + 2 * pad,)
    buffer = np.full(shape, fill, x.dtype)
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


def arch_of(rung: str) -> str | None:
    """Return what names the form of a rung: on a Hopper device either form runs by ``arch``."""
    hopper = int(cupy.cuda.Device().compute_capability) == 90
    if rung.endswith("@sm90"):
        if not hopper:
            pytest.skip("the Hopper form runs on compute capability 9.0 alone")
        return "sm_90a"
    return "sm_90" if hopper else None


def attend(rung: str, *operands: Any, **options: Any) -> Any:
    """Call `attention` in the form that `rung` names."""
    return attention(*operands, variant=variant_of(rung).name, arch=arch_of(rung), **options)


def form_taken(rung: str, inputs: Arrays, **options: Any) -> str:
    """Return the form that these arrays get: the Hopper form does not take all of them."""
    asked = Options(variant=variant_of(rung).name, arch=arch_of(rung), **options)
    return api.plans(resolve(*inputs, asked))[-1].form


@dataclass(frozen=True)
class Run:
    """One call, with all that is needed to judge it."""

    rung: str
    inputs: Arrays
    options: dict[str, Any]
    quantized: QuantizedQKV | None
    o: Any
    lse: Any

    def judge(self, *, host: bool = True) -> testing.Report:
        """J2, and J3 where the operands were quantised; on the host unless told otherwise."""
        move = on_host if host else (lambda array: array)
        z = self.quantized if self.quantized is None or not host else host_copy(self.quantized)
        form = form_taken(self.rung, self.inputs)
        variant = variant_of(self.rung)
        q, k, v = map(move, self.inputs)
        return testing.judge(
            move(self.o), q, k, v, variant=variant.name, lse=move(self.lse), quantized=z, form=form,
            tiles=variant.default_tiles(q.shape[3], form), **self.options,
        )  # fmt: skip

    def check(self) -> testing.Report:
        """Raise unless every judgement holds."""
        report = self.judge()
        assert report.passed, str(report)
        return report


def host_copy(z: QuantizedQKV) -> QuantizedQKV:
    names = ("q_codes", "k_codes", "v", "q_scale", "k_scale", "k_mean")
    return replace(z, **{n: on_host(a) for n in names if (a := getattr(z, n)) is not None})


def run(rung: str, inputs: Arrays, **options: Any) -> Run:
    """Call `attention` with CuPy arrays, and keep the quantised operands of the INT8 rung."""
    z = quantize(*inputs) if variant_of(rung).family == "int8" else None
    operands = inputs if z is None else (z,)
    o, lse = attend(rung, *operands, return_lse=True, **options)
    return Run(rung, inputs, options, z, o, lse)


def run_into(rung: str, inputs: Arrays, o: Any, lse: Any, **options: Any) -> Run:
    """Plan and launch by hand, into the buffers given for both results."""
    call = checks.check_attention(*inputs, return_lse=True, **options)
    variant, arch = variant_of(rung), arch_of(rung)
    if variant.family != "int8":
        plan = launch.plan_attention(variant, call, *map(Operand.of, (*inputs, o)), arch=arch)
        buffers = {**dict(zip("qkv", inputs, strict=True)), "o": o, "lse": lse}
        executor.run(plan, buffers, arch)
        return Run(rung, inputs, options, None, o, lse)
    z = quantize(*inputs)
    operands = (z.q_codes, z.k_codes, z.v, o, z.q_scale, z.k_scale)
    plan = launch.plan_int8(
        variant, call, *map(Operand.of, operands),
        group_q=z.group_q, group_kv=z.group_kv, smoothed=z.k_mean is not None,
    )  # fmt: skip
    names = ("q_codes", "k_codes", "v", "o", "q_scale", "k_scale")
    buffers = dict(zip(names, operands, strict=True))
    executor.run(plan, {**buffers, "lse": lse, "k_mean": z.k_mean}, arch)
    return Run(rung, inputs, options, z, o, lse)


# ---- compiling beforehand ------------------------------------------------------------------------


def specs_of(
    rung: str, dtype: str, head_dim: int, causal: bool, *, lse: bool = True, pad: int = 0
) -> Iterable[kc.ModuleSpec]:
    """Yield what a call compiles, for operands with `pad` elements on either side of a row."""
    capability = int(cupy.cuda.Device().compute_capability)
    if rung.endswith("@sm90") and capability != 90:
        return
    x = cupy.empty((1, 1, 64, head_dim + 2 * pad), STORAGE[dtype])[..., pad : pad + head_dim]
    variant, arch = variant_of(rung).name, arch_of(rung)
    asked = Options(variant=variant, causal=causal, return_lse=lse, arch=arch)
    for plan in api.plans(resolve(x, x, x, asked)):
        yield from (one.module for one in plan.launches)


def prebuild(specs: Iterable[kc.ModuleSpec]) -> None:
    """Compile for this device, in as many threads as there are cores.

    The tests then find everything in the cache, where compiling one after the other would take
    most of their time. Of several test workers one compiles and the others wait for its files.
    """
    capability = int(cupy.cuda.Device().compute_capability)
    wanted = dict.fromkeys(specs)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "prebuild.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(
                pool.map(
                    lambda s: kc.build(s, kc.device_architecture(capability, s.hopper)), wanted
                )
            )
