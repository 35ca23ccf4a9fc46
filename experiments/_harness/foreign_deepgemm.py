"""DeepGEMM's products for Hopper, from a checkout: NVRTC compiles them as its own JIT does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.interpret import TensorMap
from experiments._harness.foreign import BF16, CUT, SINGLE, Case, Launcher, Missing, share
from experiments._harness.foreign_cuda import compiled

REPOSITORY = "DeepGEMM"
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
#: Rows, columns and depth of a tile; stages; threads that copy, and that multiply; blocks.
TILE_M, TILE_N, STAGES, THREADS, BLOCKS = 64, 64, 4, 128, 2
SHARED = 160 << 10
#: Largest relative error of a sum in Hopper's 22-bit accumulators of 8-bit floats.
FP22 = 2.0**-13
#: The last copies out of shared memory are not waited for before the block ends.
WAIT = [
    (
        "still reads its shared memory",
        r"cp\.async\.bulk\.commit_group;",
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;",
    )
]


def _ptx(run: Launcher, header: str, function: str, arguments: str) -> str:
    """Return the PTX of an instance of a template."""
    include = run.sources.path(REPOSITORY, "deep_gemm", "include")
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        raise Missing("the headers of CUTLASS: install nvidia-cutlass")
    cutlass = Path(spec.origin).parent / "source" / "include"
    source = (
        f"#include <cuda_device_runtime_api.h>\n#include <deep_gemm/impls/{header}>\n"
        "using namespace deep_gemm;\n"
        f"static void instance() {{ auto p = (void*)&{function}<{arguments}>; }}\n"
    )
    options = [f"-I{include}", f"-I{cutlass}", "--device-int128"]
    return compiled(source, f"{function}.cu", "sm_90a", *options)


def _map(x: Any, rows: int, columns: int, swizzle: int = 128) -> TensorMap:
    return TensorMap(x, (rows, columns), swizzle)


def _run(run: Launcher, ptx: str, function: str, args: dict[str, Any]) -> None:
    run.mends = WAIT
    run(ptx, function, BLOCKS, 2 * THREADS, args, SHARED)


def bf16_product(run: Launcher, rng: np.random.Generator) -> float:
    """Six tiles for two blocks that stay, rows that end within a tile."""
    m, n, k = 100, 192, 200
    a, b = (rng.standard_normal(shape).astype(BFLOAT16) for shape in ((m, k), (n, k)))
    d = np.full((m, n), np.nan, BFLOAT16)
    arguments = (
        "cute::UMMA::Major::K, cute::UMMA::Major::K, 0, 0, 0, 1, "
        f"{TILE_M}, {TILE_N}, 64, 128, 128, 128, {STAGES}, {THREADS}, {THREADS}, 1, false, "
        f"{BLOCKS}, GemmType::Normal, false, cutlass::bfloat16_t"
    )
    ptx = _ptx(run, "sm90_bf16_gemm.cuh", "sm90_bf16_gemm_impl", arguments)
    args = {
        "groups": None, "m": np.uint32(m), "n": np.uint32(n), "k": np.uint32(k),
        "a": _map(a, TILE_M, 64), "b": _map(b, TILE_N, 64), "d": _map(d, TILE_M, 64),
    }  # fmt: skip
    _run(run, ptx, "sm90_bf16_gemm_impl", args)
    left, right = a.astype(np.float64), b.astype(np.float64).T
    exact = left @ right
    return share(d, exact, k * CUT * np.abs(left) @ np.abs(right) + BF16 * np.abs(exact))


def fp8_product(run: Launcher, rng: np.random.Generator) -> float:
    """E4M3, scales of 1 x 128 and 128 x 128, sums that are promoted every 128."""
    m, n, k = 100, 128, 256
    a, b = (rng.standard_normal(shape).astype(E4M3) for shape in ((m, k), (n, k)))
    scale_a = rng.uniform(0.5, 2, (k // 128, m)).astype(np.float32)
    scale_b = rng.uniform(0.5, 2, (n // 128, k // 128)).astype(np.float32)
    d = np.full((m, n), np.nan, BFLOAT16)
    arguments = (
        f"cute::UMMA::Major::K, 0, 0, 0, 1, {TILE_M}, {TILE_N}, 128, 128, 128, 128, {STAGES}, "
        f"{THREADS}, {THREADS}, 1, false, {BLOCKS}, GemmType::Normal, cutlass::bfloat16_t, "
        "epilogue::transform::EpilogueIdentity"
    )
    ptx = _ptx(run, "sm90_fp8_gemm_1d2d.cuh", "sm90_fp8_gemm_1d2d_impl", arguments)
    args = {
        "scales of b": scale_b, "groups": None, "m": np.uint32(m), "n": np.uint32(n),
        "k": np.uint32(k), "a": _map(a.view(np.uint8), TILE_M, 128),
        "b": _map(b.view(np.uint8), TILE_N, 128), "d": _map(d, TILE_M, 64),
        "scales of a": _map(scale_a, 1, TILE_M, 0),
    }  # fmt: skip
    _run(run, ptx, "sm90_fp8_gemm_1d2d_impl", args)
    left, right = a.astype(np.float64), b.astype(np.float64).T
    exact, largest = np.zeros((m, n)), np.zeros((m, n))
    for index in range(k // 128):
        part = slice(128 * index, 128 * (index + 1))
        scale = np.outer(scale_a[index], np.repeat(scale_b[:, index], 128))
        exact += scale * (left[:, part] @ right[part])
        largest += scale * (np.abs(left[:, part]) @ np.abs(right[part]))
    sums = 128 // 32 * FP22 + (k // 128 + 3) * SINGLE
    return share(d, exact, sums * largest + BF16 * np.abs(exact))


CASES = (
    Case("BF16 product, sm_90", REPOSITORY, bf16_product),
    Case("FP8 product with scales, sm_90", REPOSITORY, fp8_product),
)
