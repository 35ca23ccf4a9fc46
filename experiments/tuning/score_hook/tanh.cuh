// tanh.cuh -- softcap of a lane's scores with a relative error of 2^-16.
//
// tanh(y) = y * (c0 + c1 y^2 + ...) up to SMALL, minimax in relative error (hook_plans.py has c); past
// SMALL 1 - 2 / (1 + 2^(2 |y| log2 e)). A step whose scores are all small, which is the usual case,
// takes the polynomial alone: its instructions go to the FMA pipe, while ex2 and rcp would share
// the unit of the softmax's ex2.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/instructions/warp.cuh"

// 1 / x; at most 1 ulp from it, subnormal numbers are flushed to zero, 1 / inf = +0.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr int TANH_TERMS = HOOK_TANH_TERMS;
constexpr int MOST_TANH_TERMS = 8;

// What softcap needs of its call, in units of the products q.k: S becomes tanh(S / unit) * unit,
// with unit = softcap / scale.
struct SoftcapParams {
  float coefficient[MOST_TANH_TERMS];  // of S^(2 k + 1): c_k / unit^(2 k)
  float largest_square;                // of S where that polynomial holds
  float exponent;                      // 2 log2(e) / unit
  float unit;
};

__device__ __forceinline__ float tanh_polynomial(const SoftcapParams& cap, float S, float square) {
  float sum = cap.coefficient[TANH_TERMS - 1];
#pragma unroll
  for (int k = TANH_TERMS - 2; k >= 0; --k) sum = fmaf(sum, square, cap.coefficient[k]);
  return S * sum;
}

// The same for an S of any size.
__device__ __forceinline__ float tanh_of_any_size(const SoftcapParams& cap, float S) {
  const float square = S * S, power = ex2_approx_ftz(fabsf(S) * cap.exponent);
  const float large = fmaf(-2.0f * cap.unit, rcp_approx_ftz(power + 1.0f), cap.unit);
  const float small = tanh_polynomial(cap, S, square);
  return square <= cap.largest_square ? small : copysignf(large, S);
}

// R3: softcap of all N scores of a lane, in place.
template <int N>
__device__ __forceinline__ void softcap(const SoftcapParams& cap, float (&S)[N]) {
  float largest = 0.0f;  // a NaN is left out, and remains one either way
#pragma unroll
  for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(S[i]));
  if (__all_sync(FULL_WARP, largest * largest <= cap.largest_square)) {
#pragma unroll
    for (int i = 0; i < N; ++i) S[i] = tanh_polynomial(cap, S[i], S[i] * S[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) S[i] = tanh_of_any_size(cap, S[i]);
  }
}
