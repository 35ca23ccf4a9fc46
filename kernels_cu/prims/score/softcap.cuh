// softcap.cuh -- softcap of a lane's scores with a relative error of at most 2^-16.
//
// For small y, tanh(y) is y * (c0 + c1 y^2 + ... + c4 y^8), minimax in relative error
// (cupyattn/kernels/softcap.py). For others it is 1 - 2 / (1 + 2^(2 |y| log2 e)). If all scores of
// a step are small, the usual case, only the polynomial is evaluated. Its instructions use the FMA
// pipe, while ex2 and rcp would share the unit of the softmax's ex2.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/instructions/rcp.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/params.cuh"

constexpr int TANH_TERMS = sizeof(ScoreParams::tanh_factor) / sizeof(float);

// Softcap of a small S.
__device__ __forceinline__ float small_softcap(const ScoreParams& p, float S) {
  const float square = S * S;
  float sum = p.tanh_factor[TANH_TERMS - 1];
#pragma unroll
  for (int k = TANH_TERMS - 2; k >= 0; --k) sum = fmaf(sum, square, p.tanh_factor[k]);
  return S * sum;
}

// The same for an S of any size.
__device__ __forceinline__ float any_softcap(const ScoreParams& p, float S) {
  const float power = ex2_approx_ftz(fabsf(S) * p.tanh_exponent);
  const float large = fmaf(-2.0f * p.softcap_unit, rcp_approx_ftz(power + 1.0f), p.softcap_unit);
  return S * S <= p.largest_square ? small_softcap(p, S) : copysignf(large, S);
}

// R3: softcap of all N scores of a lane, in place. The maximum ignores a NaN, which stays NaN
// either way.
template <int N>
__device__ __forceinline__ void softcap(const ScoreParams& p, float (&S)[N]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(S[i]));
  if (__all_sync(FULL_WARP, largest * largest <= p.largest_square)) {
#pragma unroll
    for (int i = 0; i < N; ++i) S[i] = small_softcap(p, S[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) S[i] = any_softcap(p, S[i]);
  }
}
