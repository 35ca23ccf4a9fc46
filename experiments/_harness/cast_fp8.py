"""Q, K and V as e4m3 with a scale each, as fast as separate passes can be: two launches, each once
over the data.

The libraries with FP8 attention leave the casting to their caller. Behind torch's operators, which
make five passes over memory for each tensor, they lose to 16 bits. This is what they are raced
with.
"""

from __future__ import annotations

from functools import cache
from typing import Any

#: Blocks for each of Q, K and V, and threads in a block.
BLOCKS, THREADS = 264, 512

SOURCE = r"""
#include <cuda_fp16.h>
#include <cuda_fp8.h>

struct Operands {
  const uint4* x[3];  // [n[i]] of eight float16
  uint2* codes[3];    // [n[i]] of eight e4m3
  long long n[3];
};

__device__ __forceinline__ float block_max(float x) {
  __shared__ float of_warp[32];
  for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();  // every warp's maximum is there
  x = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.0f;
  for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

// The largest magnitude that each block sees: of_block[3][gridDim.x].
extern "C" __global__ void amax(Operands all, float* of_block) {
  const int which = blockIdx.y;
  const long long step = (long long)gridDim.x * blockDim.x;
  __half2 most = __float2half2_rn(0.0f);
#pragma unroll 4
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < all.n[which]; i += step) {
    const uint4 x = all.x[which][i];
    const __half2* pair = reinterpret_cast<const __half2*>(&x);
    for (int j = 0; j < 4; ++j) most = __hmax2(most, __habs2(pair[j]));
  }
  const float found = block_max(fmaxf(__low2float(most), __high2float(most)));
  if (threadIdx.x == 0) of_block[which * gridDim.x + blockIdx.x] = found;
}

// codes = x / scale, scale[which] = amax / 448; scale[3] is the inverse of V's.
extern "C" __global__ void cast(Operands all, const float* of_block, float* scale) {
  const int which = blockIdx.y;
  float most = 0.0f;
  for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x)
    most = fmaxf(most, of_block[which * gridDim.x + i]);
  most = fmaxf(block_max(most), 1e-30f);
  const float inverse = 448.0f / most;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    scale[which] = most / 448.0f;
    if (which == 2) scale[3] = inverse;
  }
  const long long step = (long long)gridDim.x * blockDim.x;
#pragma unroll 4
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < all.n[which]; i += step) {
    const uint4 x = all.x[which][i];
    const __half2* pair = reinterpret_cast<const __half2*>(&x);
    uint2 codes;
    __nv_fp8x2_storage_t* out = reinterpret_cast<__nv_fp8x2_storage_t*>(&codes);
    for (int j = 0; j < 4; ++j) {
      const float2 y = __half22float2(pair[j]);
      out[j] = __nv_cvt_float2_to_fp8x2(
          make_float2(y.x * inverse, y.y * inverse), __NV_SATFINITE, __NV_E4M3);
    }
    all.codes[which][i] = codes;
  }
}
"""


@cache
def _kernels() -> tuple[Any, Any]:
    import cupy

    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
    return module.get_function("amax"), module.get_function("cast")


def cast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, Any]:
    """Return codes of Q, K and V and their scales.

    Parameters
    ----------
    q, k, v : cupy.ndarray of float16
        Contiguous, of a multiple of eight elements.

    Returns
    -------
    q_codes, k_codes, v_codes : cupy.ndarray of uint8
        The bits of e4m3, of the shapes of `q`, `k` and `v`.
    scales : (4,) cupy.ndarray of float32
        What a code of 1 stands for, in q, k and v; and the inverse of the last.
    """
    import cupy
    import numpy as np

    amax, cast_codes = _kernels()
    codes = tuple(cupy.empty(x.shape, np.uint8) for x in (q, k, v))
    of_block, scales = cupy.empty((3, BLOCKS), np.float32), cupy.empty(4, np.float32)
    operands = np.array(
        [x.data.ptr for x in (q, k, v, *codes)] + [x.size // 8 for x in (q, k, v)], np.int64
    ).view("V72")
    amax((BLOCKS, 3), (THREADS,), (operands, of_block))
    cast_codes((BLOCKS, 3), (THREADS,), (operands, of_block, scales))
    return (*codes, scales)
