// config.cuh -- the only place where a CFG_* macro is read. cupyattn/tiles.py and
// cupyattn/features.py write them; every kernel sees typed constants.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "prims/base.cuh"

// Defaults let an editor parse a kernel on its own.
#ifndef CFG_BLOCK_Q
#define CFG_BLOCK_Q 64
#define CFG_BLOCK_KV 64
#define CFG_NUM_WARPS 4
#define CFG_NUM_STAGES 2
#define CFG_DTYPE 0
#define CFG_HEAD_DIM 64
#define CFG_CAUSAL 0
#define CFG_LSE 1
#define CFG_VEC 8
#define CFG_GROUP_Q 1
#define CFG_GROUP_KV 1
#endif

// tiles
constexpr int BLOCK_Q = CFG_BLOCK_Q;    // query rows per thread block
constexpr int BLOCK_KV = CFG_BLOCK_KV;  // key rows per step of the loop
constexpr int NUM_WARPS = CFG_NUM_WARPS;
constexpr int NUM_STAGES = CFG_NUM_STAGES;  // K, V tiles in flight
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_Q = BLOCK_Q / NUM_WARPS;  // query rows per warp

// features
constexpr int HEAD_DIM = CFG_HEAD_DIM;  // true head size
constexpr bool CAUSAL = CFG_CAUSAL;
constexpr bool LSE = CFG_LSE;           // store the log-sum-exp
constexpr int VEC = CFG_VEC;            // elements per global access
constexpr int GROUP_Q = CFG_GROUP_Q;    // query rows per scale, 0: not quantised
constexpr int GROUP_KV = CFG_GROUP_KV;  // key rows per scale, 0: not quantised

// storage types
template <int CODE>
struct DType;
template <>
struct DType<0> {
  using type = __half;
};
template <>
struct DType<1> {
  using type = __nv_bfloat16;
};
template <>
struct DType<2> {
  using type = float;
};
using elem_t = DType<CFG_DTYPE>::type;                         // the caller's Q, K, V and O
using elem16_t = DType<CFG_DTYPE == 2 ? 0 : CFG_DTYPE>::type;  // 16-bit operand: float takes half
constexpr bool ELEM_IS_16_BIT = CFG_DTYPE != 2;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);  // round to nearest even
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

static_assert(HEAD_DIM >= 1 && HEAD_DIM <= 256, "HEAD_DIM must be 1 to 256");
static_assert(NUM_WARPS >= 1 && NUM_WARPS <= 32, "NUM_WARPS must be 1 to 32");
static_assert(
    HEAD_DIM % VEC == 0, "HEAD_DIM must be a multiple of VEC, or a load would cross a row");
static_assert(VEC * sizeof(elem_t) <= 16, "VEC elements must fit in one 16-byte access");
