"""`interpret.launch`: user kernels as CUDA source, PTX or a fatbin."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import interpret
from cupyattn.errors import KernelCompileError, KernelLaunchError, UnsupportedError

SCALE = """
__global__ void scale(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i];
}
"""
PTX = """// made by hand
.version 8.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 x) {
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mad.wide.u32 %rd2, %r1, 4, %rd1;
  ld.global.u32 %r2, [%rd2];
  shl.b32 %r3, %r2, 1;
  st.global.u32 [%rd2], %r3;
  ret;
}
"""


def scale_arguments(n: int = 6) -> dict[str, Any]:
    x = np.arange(6, dtype=np.float32)
    return {"x": x, "y": np.zeros(6, np.float32), "a": np.float32(2), "n": np.int32(n)}


def test_source_as_text_and_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "scale.cu").write_text(SCALE)
    for source in (SCALE, tmp_path / "scale.cu"):
        arguments = scale_arguments()
        interpret.launch(source, "scale", 2, 4, arguments)
        np.testing.assert_array_equal(arguments["y"], 2 * arguments["x"])


def test_a_finding_has_the_arguments_name_and_the_line(tmp_path: Path) -> None:
    (tmp_path / "scale.cu").write_text(SCALE)
    with pytest.raises(interpret.KernelFault, match="outside x, which has 24") as caught:
        interpret.launch(tmp_path / "scale.cu", "scale", 2, 4, scale_arguments(n=7))
    location = caught.value.finding.location
    assert location is not None and location.line == 4


def test_ptx_as_text_file_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "twice.ptx").write_text(PTX)
    for source in (PTX, tmp_path / "twice.ptx", PTX.encode()):
        x = np.arange(4, dtype=np.int32)
        interpret.launch(source, "twice", 1, 4, [x])
        assert x.tolist() == [0, 2, 4, 6]


def fatbin(text: bytes, *, kind: int = 1, flags: int = 0x11) -> bytes:
    """Return a fatbin of one entry, as nvcc lays it out."""
    padded = text + bytes(-len(text) % 8)
    header = struct.pack("<HHIQIIIIIIQQQ", kind, 0x101, 64, len(padded), len(text), 64, 0, 80, 0, 0,
                         flags, 0, len(text))  # fmt: skip
    return struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, 64 + len(padded)) + header + padded


def lz4(text: bytes) -> bytes:
    """Return a block of LZ4 that holds 12 line feeds, by a repetition, and a text."""
    more = len(text) - 15
    return b"\x17\n\x01\x00\xf0" + bytes([255] * (more // 255) + [more % 255]) + text


def test_a_fatbin_with_ptx(tmp_path: Path) -> None:
    (tmp_path / "a.fatbin").write_bytes(fatbin(PTX.encode()))
    for source in (tmp_path / "a.fatbin", fatbin(lz4(PTX.encode()), flags=0x2011)):
        x = np.arange(4, dtype=np.int32)
        interpret.launch(source, "twice", 1, 4, [x])
        assert x.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x7fELF\x02\x01", "a cubin holds machine code, and the interpreter reads PTX"),
        (fatbin(b"\x7fELF", kind=2), "the fatbin holds machine code alone"),
        (fatbin(b"")[:40], "the fatbin is truncated"),
        (b"\xff\xfe\x00", "neither text nor a fatbin"),
    ],
)
def test_binaries_without_ptx_are_one_error_each(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        interpret.launch(data, "twice", 1, 4, [None])


def test_wrong_sources_and_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pass Path\('scale.cu'\) for a file"):
        interpret.launch("scale.cu", "scale", 1, 4, [])
    with pytest.raises(ValueError, match=r"cannot read .*missing.cu"):
        interpret.launch(tmp_path / "missing.cu", "scale", 1, 4, [])
    with pytest.raises(ValueError, match="no entry point 'scael': entry must be one of _Z5scale"):
        interpret.launch(SCALE, "scael", 1, 4, scale_arguments())
    with pytest.raises(ValueError, match="arch is an option of compiling CUDA"):
        interpret.launch(PTX, "twice", 1, 4, [None], arch="sm_90a")
    with pytest.raises(KernelCompileError, match="oops"):
        interpret.launch("__global__ void oops() { oops }\n", "oops", 1, 4, [])
    with pytest.raises(KernelLaunchError, match="200000"):
        interpret.launch(PTX, "twice", 1, 4, [None], shared_bytes=200_000)


def test_templates_are_found_by_name() -> None:
    source = """
template <typename T> __global__ void fill(T* x, T value) { x[threadIdx.x] = value; }
template __global__ void fill<int>(int*, int);
"""
    x = np.zeros(4, np.int32)
    interpret.launch(source, "fill", 1, 4, [x, np.int32(7)])
    assert x.tolist() == [7] * 4
    source += "template __global__ void fill<float>(float*, float);\n"
    with pytest.raises(ValueError, match="several kernels of the name 'fill'"):
        interpret.launch(source, "fill", 1, 4, [x, np.int32(7)])


def test_grids_and_blocks_of_three_axes() -> None:
    source = """
__global__ void where(int* y) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  int at = block * blockDim.x * blockDim.y * blockDim.z + thread;
  y[at] = threadIdx.z + 10 * (threadIdx.y + 10 * (threadIdx.x + 10 * (blockIdx.z
      + 10 * (blockIdx.y + 10 * blockIdx.x))));
}
"""
    y = np.zeros((4, 3, 2, 2, 5, 3), np.int32)  # blocks z, y, x, threads z, y, x
    interpret.launch(source, "where", (2, 3, 4), (3, 5, 2), [y])
    bz, by, bx, z, ty, x = np.indices(y.shape)
    np.testing.assert_array_equal(y, z + 10 * (ty + 10 * (x + 10 * (bz + 10 * (by + 10 * bx)))))
    with pytest.raises(ValueError, match="1 to 3 extents"):
        interpret.launch(source, "where", (1, 1, 1, 1), 4, [y])
    with pytest.raises(KernelLaunchError, match="1 block or more"):
        interpret.launch(source, "where", (-1, -1), 4, [y])


def test_clusters_and_dynamic_shared_memory() -> None:
    source = """
__global__ void rank(int* y) {
  extern __shared__ int s[];
  int rank, blocks;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  s[threadIdx.x] = 10 * rank + blocks;
  y[blockIdx.x * blockDim.x + threadIdx.x] = s[threadIdx.x];
}
"""
    y = np.zeros(8, np.int32)
    interpret.launch(source, "rank", 4, 2, [y], cluster=2, shared_bytes=8, arch="sm_90")
    assert y.tolist() == [2, 2, 12, 12, 2, 2, 12, 12]
    with pytest.raises(interpret.KernelFault, match="outside shared memory, which has 4"):
        interpret.launch(source, "rank", 4, 2, [y], cluster=2, shared_bytes=4, arch="sm_90")
    with pytest.raises(KernelLaunchError, match="clusters of 3 blocks, got a grid of 4"):
        interpret.launch(source, "rank", 4, 2, [y], cluster=3, shared_bytes=8, arch="sm_90")


LOAD_BOX = """
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void load_box(
    const __grid_constant__ Map map, float* y, int row, int column) {
  alignas(128) __shared__ float tile[4 * 8];
  __shared__ unsigned long long bar;
  unsigned t = __cvta_generic_to_shared(tile), b = __cvta_generic_to_shared(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(b) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" :: "r"(b) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];"
        :: "r"(t), "l"(&map), "r"(column), "r"(row), "r"(b) : "memory");
  }
  __syncthreads();
  int done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
        " selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(b) : "memory");
  y[threadIdx.x] = tile[threadIdx.x];
}
"""


def test_tensor_maps_without_swizzle() -> None:
    x, y = np.arange(60, dtype=np.float32).reshape(5, 12), np.zeros((4, 8), np.float32)
    tensor = interpret.TensorMap(x, (4, 8), swizzle=0)
    args = {"x": tensor, "y": y, "row": np.int32(2), "column": np.int32(4)}
    interpret.launch(LOAD_BOX, "load_box", 1, 32, args, arch="sm_90a")
    expected = np.zeros((4, 8), np.float32)
    expected[:3] = x[2:, 4:]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("box", "swizzle", "says"),
    [
        ((4,), 0, "box must have one extent for each axis"),
        ((4, 300), 0, "extents of box must be 1 to 256"),
        ((4, 8), 16, "swizzle must be 0, 32, 64 or 128"),
        ((4, 3), 0, "multiple of 16 bytes, got 12 bytes"),
        ((4, 16), 32, "multiple of 16 bytes and at most the swizzle, 32, got 64 bytes"),
    ],
)
def test_wrong_tensor_maps(box: tuple[int, ...], swizzle: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        interpret.TensorMap(np.zeros((8, 32), np.float32), box, swizzle)


def test_one_array_for_two_pointers_is_one_memory() -> None:
    arguments = scale_arguments()
    arguments["y"] = arguments["x"]
    interpret.launch(SCALE, "scale", 2, 4, arguments)
    assert arguments["x"].tolist() == [0, 2, 4, 6, 8, 10]
    whole = np.zeros(8, np.float32)
    arguments |= {"x": whole[:6], "y": whole[2:]}
    with pytest.raises(ValueError, match="x and y overlap"):
        interpret.launch(SCALE, "scale", 2, 4, arguments)


def test_counts_and_stops_as_for_a_rung(tmp_path: Path) -> None:
    source = tmp_path / "turn.cu"
    source.write_text("""
__global__ void turn(const float* x, float* y) {
  __shared__ float tile[32][32];
  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
  __syncthreads();
  y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}
""")
    x = np.arange(1024, dtype=np.float32).reshape(32, 32)
    y, stops = np.zeros_like(x), []
    profile = interpret.Profile()
    stop = interpret.Break("turn.cu", 6, lambda s: stops.append(s.shared["tile"].copy()))
    with interpret.observe(profile, stop):
        interpret.launch(source, "turn", 1, (32, 32), [x, y])
    np.testing.assert_array_equal(y, x.T)
    assert profile.excess == 32 * 31
    np.testing.assert_array_equal(stops[0][0].view(np.float32).reshape(32, 32), x)


def test_what_is_not_modelled_is_named_with_its_line() -> None:
    text = PTX.replace("shl.b32 %r3, %r2, 1;", "vadd4.u32.u32.u32 %r3, %r2, %r2, %r2;")
    with pytest.raises(UnsupportedError, match=r"vadd4.u32.u32.u32 \(PTX line 12"):
        interpret.launch(text, "twice", 1, 4, [np.zeros(4, np.int32)])


#: Names that nvcc defines without an include, and NVRTC does not.
STANDARD = """#include <cuda_runtime.h>
#include <stdint.h>
#include <math.h>
#include <cassert>
__global__ void largest(const float* x, float* y, int n) {
  assert(n > 0);
  float m = -INFINITY;
  for (uint32_t i = 0; i < n; ++i) m = fmaxf(m, x[i]);
  *y = m == -INFINITY ? FLT_MAX : m;
}
#ifndef __CUDACC_RTC__
int main() {}
#endif
"""


def test_a_source_for_nvcc_compiles_and_lines_keep_their_numbers() -> None:
    x, y = np.float32([3, 7, 5]), np.zeros(1, np.float32)
    stops: list[interpret.Stop] = []
    with interpret.observe(interpret.Break("source.cu", 8, stops.append)):
        interpret.launch(STANDARD, "largest", 1, 1, (x, y, np.int32(3)))
    assert y[0] == 7 and stops
    with pytest.raises(interpret.KernelFault) as caught:
        interpret.launch(STANDARD, "largest", 1, 1, (x, y, np.int32(0)))
    location = caught.value.finding.location
    assert caught.value.finding.kind == "trap" and location is not None and location.line == 6
    with pytest.raises(KernelCompileError, match=r'\(7\): error: identifier "nothing"'):
        interpret.launch(STANDARD.replace("-INFINITY;", "nothing;"), "largest", 1, 1, (x, y))


def test_host_code_and_templates_get_a_sentence_each() -> None:
    host = "__global__ void k(int* x) {}\nvoid run(int* x) { k<<<1, 1>>>(x); }\n"
    with pytest.raises(KernelCompileError, match=r"source.cu\(2\): NVRTC compiles device code al"):
        interpret.launch(host, "k", 1, 1, [np.zeros(1, np.int32)])
    template = "template <int N> __global__ void k(int* x) { x[0] = N; }\n"
    with pytest.raises(ValueError, match="no kernel at all, so none of the name 'k': a template"):
        interpret.launch(template, "k", 1, 1, [np.zeros(1, np.int32)])
    x = np.zeros(1, np.int32)
    interpret.launch(template + "template __global__ void k<7>(int*);\n", "k", 1, 1, [x])
    assert x[0] == 7
