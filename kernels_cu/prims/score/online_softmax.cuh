// online_softmax.cuh -- running softmax of one query row, in log2 units.
//   M = largest score seen so far,   l = sum of 2^(score - M)
// The same rounded M appears in every exponent, in alpha and in the log-sum-exp, so its rounding
// cancels (docs/MATH_REFERENCE.md [L26]). NATURAL_SCORES have M in natural units, not rounded.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"

constexpr float M_TO_LOG2 = NATURAL_SCORES ? LOG2E : 1.0f;

struct RowState {
  float M, l;

  // NOTE: a constructor, not `float M = NEG_INF`. In an array RowState[2][2] NVRTC 13.0 uses member
  // initialisers only for the first row. M = 0 in the other rows fails only if all scores of a row
  // are far below zero.
  __device__ __forceinline__ RowState() : M(NEG_INF), l(0.0f) {}

  // Whether a key has been admitted.
  __device__ __forceinline__ bool has_keys() const { return M > NEG_INF; }

  // M as a finite number for subtraction. A row without an admitted key has M = -inf, and -inf -
  // (-inf) would give NaN instead of 2^-inf = 0.
  __device__ __forceinline__ float M_finite() const { return M == NEG_INF ? 0.0f : M; }

  // Admit scores whose largest is M_new. Returns alpha, which rescales l and the accumulated output
  // to the new maximum.
  __device__ __forceinline__ float advance(float M_new) {
    const float M_old = M;
    M = fmaxf(M_old, M_new);
    const float alpha = ex2_approx_ftz((M_old - M_finite()) * M_TO_LOG2);  // R4
    l *= alpha;                                                            // R6
    return alpha;
  }

  // 1 / l; a row that attended to nothing has l = 0 and gets O = 0.
  __device__ __forceinline__ float inverse_l() const { return l == 0.0f ? 0.0f : 1.0f / l; }

  // Natural log of the sum of exponentials; -inf for a row that attended to nothing.
  __device__ __forceinline__ float lse() const {
    if constexpr (NATURAL_SCORES) return fmaf(log2f(l), LN2, M);
    return (M + log2f(l)) * LN2;
  }
};
