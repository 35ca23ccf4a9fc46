"""Kernels of NVIDIA's cuda-samples, from a checkout: NVRTC compiles their device code."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cupyattn.compiler import nvrtc
from experiments._harness.foreign import (
    CUT,
    SINGLE,
    Case,
    Launcher,
    Missing,
    equal,
    share,
)
from experiments._harness.foreign_triton import normal, unset

REPOSITORY = "cuda-samples"
#: Headers that are left out: of the host, and of the samples' own helpers.
_HOST = re.compile(r"#\s*include\s*<(?!cooperative_groups|cuda_fp16|cuda_pipeline|mma\.h|cuda/).*>")
_DEVICE = re.compile(
    r"[^{]*__(?:device|global)__|(?:typedef|using|enum|namespace|struct|const int)\b|"
    r"template\s*<[^>]*>\s*struct\b"
)
#: Stand-ins for headers of the host: of what the samples include and do not need, nothing.
_STANDING_IN = dict.fromkeys(("assert.h", "stdio.h", "stdlib.h", "string.h"), "") | {
    "utility": "#include <cuda/std/utility>\nnamespace std { using namespace cuda::std; }\n"
}
_FOLDER = tempfile.TemporaryDirectory()


#: The last block reads what others wrote after a relaxed atomic operation, with no fence behind it.
ACQUIRE = [("g_odata is read", r"atom\.global\.inc", "atom.acq_rel.gpu.global.inc")]


def headers() -> list[str]:
    """Return options that name the headers of CUDA and of its C++ library."""
    folder = nvrtc.headers(nvrtc.load())
    spec = importlib.util.find_spec("nvidia")
    places = [Path(x) for x in (spec.submodule_search_locations or [])] if spec else []
    found = [place / "cu13" / "include" / "cccl" for place in places]
    library = [path for one in found for path in (one, one.parent) if path.exists()]
    for name, text in _STANDING_IN.items():
        Path(_FOLDER.name, name).write_text(text)
    if folder is None or not library:
        raise Missing("the headers of CUDA: install nvidia-cuda-runtime and nvidia-cuda-cccl")
    return [f"-I{path}" for path in (folder, *library, _FOLDER.name)]


def compiled(source: str, name: str, arch: str, *options: str) -> str:
    """Return the PTX of CUDA C++."""
    known = ["-std=c++20", f"-arch={arch}", "-default-device", *headers(), *options]
    try:
        return nvrtc.load().compile(source, name, known).ptx
    except nvrtc.NvrtcError as error:
        raise RuntimeError(f"{name}: {error}: {_errors(error.log)}") from None


def _errors(log: str) -> str:
    found = [line for line in log.splitlines() if "error" in line and "warning" not in line]
    return " ".join(found[:3]) or log[-300:]


def device_code(text: str) -> str:
    """Return the parts of a CUDA source that NVRTC compiles: no host functions and headers.

    Examples
    --------
    >>> device_code("#include <stdio.h>\\nint main() { return 0; }\\n__global__ void f() {}")
    '__global__ void f() {}'
    """
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    kept = []
    for item in _items(text):
        if item.startswith("#"):
            if not _HOST.match(item):
                kept.append(item)
        elif _DEVICE.match(item):
            kept.append(item)
    return "\n".join(kept)


def _items(text: str) -> Iterator[str]:
    """Yield the declarations, definitions and directives of a source without comments."""
    depth = start = index = 0
    while index < len(text):
        letter = text[index]
        if letter == "#" and not text[start:index].strip():
            match = re.compile(r"(?:\\\n|[^\n])*").match(text, index)
            index = match.end() if match else len(text)
            yield text[start:index].strip()
            start = index
            continue
        depth += (letter == "{") - (letter == "}")
        index += 1
        ends = letter == ";" or (letter == "}" and not re.match(r"\s*;", text[index:]))
        if depth == 0 and ends:
            yield text[start:index].strip()
            start = index


def _sample(
    run: Launcher, folder: str, file: str, *instances: str, arch: str = "sm_80"
) -> str:
    """Return the PTX of a sample, with instances of its templates."""
    path = run.sources.path(REPOSITORY, "Samples", folder, file)
    source = "\n".join(["typedef unsigned int uint;", device_code(path.read_text()), *instances])
    return compiled(source, str(path), arch, f"-I{path.parent}")


def _product(run: Launcher, rng: np.random.Generator, ptx: str, entry: str, tile: int) -> float:
    """Multiply two matrices in float32, one thread for an element."""
    m, n, k = 2 * tile, 3 * tile, 2 * tile
    a, b = (normal(rng, *shape, dtype=np.float32) for shape in ((m, k), (k, n)))
    c = unset(m, n, dtype=np.float32)
    args = {"C": c, "A": a, "B": b, "wA": np.int32(k), "wB": np.int32(n)}
    run(ptx, entry, (n // tile, m // tile), (tile, tile), args)
    left, right = a.astype(np.float64), b.astype(np.float64)
    return share(c, left @ right, (k + 1) * SINGLE * np.abs(left) @ np.abs(right))


def matrix_mul(run: Launcher, rng: np.random.Generator) -> float:
    """Tiles of 16 in shared memory."""
    instance = "template __global__ void MatrixMulCUDA<16>(float*, float*, float*, int, int);"
    ptx = _sample(run, "0_Introduction/matrixMul", "matrixMul.cu", instance)
    return _product(run, rng, ptx, "MatrixMulCUDA", 16)


def async_copy(run: Launcher, rng: np.random.Generator) -> float:
    """Tiles of 16 that cp.async brings in several stages."""
    instance = (
        "template __global__ void MatrixMulAsyncCopyMultiStage<16>"
        "(float* __restrict__, const float* __restrict__, const float* __restrict__, int, int);"
    )
    folder, file = "3_CUDA_Features/globalToShmemAsyncCopy", "globalToShmemAsyncCopy.cu"
    return _product(run, rng, _sample(run, folder, file, instance), "AsyncCopyMultiStage", 16)


def transpose(run: Launcher, rng: np.random.Generator) -> float:
    """Tiles along diagonals."""
    side = 64
    x, y = normal(rng, side, side, dtype=np.float32), unset(side, side, dtype=np.float32)
    ptx = _sample(run, "6_Performance/transpose", "transpose.cu")
    args = {"odata": y, "idata": x, "width": np.int32(side), "height": np.int32(side)}
    run(ptx, "transposeDiagonal", (2, 2), (32, 16), args)
    return equal(y, x.T)


def reduction(run: Launcher, rng: np.random.Generator) -> float:
    """Sums of whole numbers: redux.sync in each warp, then over warps."""
    instance = "template __global__ void reduce7<int, 128, false>(const int*, int*, unsigned);"
    folder = "2_Concepts_and_Techniques/reduction"
    x, y = rng.integers(-1000, 1000, 600).astype(np.int32), np.zeros(2, np.int32)
    args = {"g_idata": x, "g_odata": y, "n": np.uint32(x.size)}
    ptx = _sample(run, folder, "reduction_kernel.cu", instance)
    run(ptx, "reduce7", 2, 128, args, 4 * 128)
    blocks = np.arange(x.size) // 128 % 2
    return equal(y, np.array([x[blocks == block].sum() for block in range(2)]))


def last_block(run: Launcher, rng: np.random.Generator) -> float:
    """Sums of blocks, which the last block adds up after it took the last ticket."""
    instance = (
        "template __global__ void reduceSinglePass<128, false>(const float*, float*, unsigned);"
    )
    folder = "2_Concepts_and_Techniques/threadFenceReduction"
    ptx = _sample(run, folder, "threadFenceReduction_kernel.cuh", instance)
    x, y = normal(rng, 1000, dtype=np.float32), np.zeros(3, np.float32)
    args = {"g_idata": x, "g_odata": y, "n": np.uint32(x.size)}
    run.mends = ACQUIRE
    run(ptx, "reduceSinglePass", 3, 128, args, 4 * 128)
    exact = x.astype(np.float64)
    return share(y[:1], exact.sum(), 32 * SINGLE * np.abs(exact).sum())


def scan(run: Launcher, rng: np.random.Generator) -> float:
    """Exclusive sums of two blocks of 1024, in three kernels."""
    ptx = _sample(run, "2_Concepts_and_Techniques/scan", "scan.cu")
    x = rng.integers(0, 1 << 20, 2048).astype(np.uint32)
    y, tops = np.zeros_like(x), np.zeros(2, np.uint32)
    size = np.uint32(1024)
    run(ptx, "19scanExclusiveShared", 2, 256, {"d_Dst": y, "d_Src": x, "size": size})
    two = {"N": np.uint32(2), "arrayLength": np.uint32(2)}
    run(ptx, "scanExclusiveShared2", 1, 256, {"d_Buf": tops, "d_Dst": y, "d_Src": x, **two})
    run(ptx, "uniformUpdate", 2, 256, {"d_Data": y, "d_Buffer": tops})
    return equal(y, np.cumsum(x, dtype=np.uint32) - x)


def histogram(run: Launcher, rng: np.random.Generator) -> float:
    """Counts of bytes in shared memory, by warp, and their sums."""
    ptx = _sample(run, "2_Concepts_and_Techniques/histogram", "histogram256.cu")
    words, blocks = rng.integers(0, 1 << 32, 700).astype(np.uint32), 2
    parts, counts = np.zeros((blocks, 256), np.uint32), np.zeros(256, np.uint32)
    args = {"d_PartialHistograms": parts, "d_Data": words, "dataCount": np.uint32(words.size)}
    run(ptx, "18histogram256Kernel", blocks, 192, args)
    merged = {"d_Histogram": counts, "d_PartialHistograms": parts}
    run(ptx, "mergeHistogram256Kernel", 256, 256, {**merged, "histogramCount": np.uint32(blocks)})
    return equal(counts, np.bincount(words.view(np.uint8), minlength=256))


def bitonic_sort(run: Launcher, rng: np.random.Generator) -> float:
    """1024 keys with values, in one block."""
    ptx = _sample(run, "2_Concepts_and_Techniques/sortingNetworks", "bitonicSort.cu")
    keys, values = rng.permutation(1024).astype(np.uint32), np.arange(1024, dtype=np.uint32)
    sorted_keys, sorted_values = np.zeros_like(keys), np.zeros_like(keys)
    args = {
        "d_DstKey": sorted_keys, "d_DstVal": sorted_values, "d_SrcKey": keys, "d_SrcVal": values,
        "arrayLength": np.uint32(1024), "dir": np.uint32(1),
    }  # fmt: skip
    run(ptx, "17bitonicSortShared", 1, 512, args)
    return max(equal(sorted_keys, np.sort(keys)), equal(keys[sorted_values], sorted_keys))


def shuffle_scan(run: Launcher, rng: np.random.Generator) -> float:
    """Inclusive sums by shuffles, of each block."""
    ptx = _sample(run, "2_Concepts_and_Techniques/shfl_scan", "shfl_scan.cu")
    x = rng.integers(-1000, 1000, 512).astype(np.int32)
    y, sums = x.copy(), np.zeros(2, np.int32)
    args = {"data": y, "width": np.int32(32), "partial_sums": sums}
    run(ptx, "shfl_scan_test", 2, 256, args, 4 * 8)
    exact = np.cumsum(x.reshape(2, 256), axis=1)
    return max(equal(y.reshape(2, 256), exact), equal(sums, exact[:, -1]))


def wmma(run: Launcher, rng: np.random.Generator) -> float:
    """A product of half precision by the API of mma.h."""
    folder, file = "3_CUDA_Features/cudaTensorCoreGemm", "cudaTensorCoreGemm.cu"
    m, n, k = 32, 32, 32
    a, b, c = normal(rng, m, k), normal(rng, n, k), normal(rng, m, n, dtype=np.float32)
    d = unset(m, n, dtype=np.float32)
    sizes = {name: np.int32(size) for name, size in (("m", m), ("n", n), ("k", k))}
    args = {"a": a, "b": b, "c": c, "d": d, **sizes}
    args |= {"alpha": np.float32(1), "beta": np.float32(1)}
    run(_sample(run, folder, file), "simple_wmma_gemm", (1, 1), (64, 2), args)
    left, right = a.astype(np.float64), b.astype(np.float64).T
    bound = (k + 4) * CUT * (np.abs(left) @ np.abs(right) + np.abs(c))
    return share(d, left @ right + c, bound)


def _cases(named: Sequence[tuple[str, object]]) -> tuple[Case, ...]:
    return tuple(Case(name, REPOSITORY, run) for name, run in named)  # type: ignore[arg-type]


CASES = _cases(
    (
        ("matrixMul", matrix_mul),
        ("transpose, diagonal", transpose),
        ("reduction, redux", reduction),
        ("threadFenceReduction", last_block),
        ("scan", scan),
        ("histogram256", histogram),
        ("bitonicSort", bitonic_sort),
        ("shfl_scan", shuffle_scan),
        ("globalToShmemAsyncCopy", async_copy),
        ("cudaTensorCoreGemm, wmma", wmma),
    )
)
