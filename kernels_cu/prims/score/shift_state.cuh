// shift_state.cuh -- running softmax of one query row whose sum O is an integer. Weights are in
// units of 2^M. M is an integer that follows the largest score of each step. O and l are shifted
// from one M to the next.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/instructions/warp.cuh"

constexpr int CODE_BITS = 8;   // of P: the largest weight of a tile is 2^7 to 2^8
constexpr int LOWER_BITS = 4;  // how far M may lie below the highest that a row had
constexpr int SUM_BITS = 23;   // l stays below 2^23, and so O below 2^31

// State of a row from step to step.
struct ShiftState {
  float M, highest;  // M now, and the highest so far
  float l;           // this lane's part of the sum of codes of P, in units of 2^M
  float exact_l;     // of the weights that they round; for lse alone

  // Lower than any score, and still finite for subtraction.
  __device__ __forceinline__ ShiftState()
      : M(-0x1p127f), highest(-0x1p127f), l(0.0f), exact_l(0.0f) {}

  // Whether a key with a positive weight has been admitted.
  __device__ __forceinline__ bool has_keys() const { return l > 0.0f; }

  // From now on M is so high that the current l is below a quarter of its range. Weights until the
  // next check sum to less than the rest.
  __device__ __forceinline__ void keep_in_range() {
    const int least_rise = exponent_of(shfl_sum<4>(l)) + 3 - SUM_BITS;
    highest = fmaxf(highest, M + float(least_rise + LOWER_BITS));
  }

  // Choose M for scores whose largest is m, so that they weigh less than 2^CODE_BITS. Returns the
  // number of bits to shift O to the left, or to the right if it is negative.
  __device__ __forceinline__ int advance(float m) {
    const float M_old = M;
    M = floor_to_whole(m) + (1 - CODE_BITS);
    highest = fmaxf(highest, M);
    M = fmaxf(M, highest - LOWER_BITS);
    const int shift = whole_to_int(fmaxf(M_old - M, -126.0f));
    l *= power_of_two(shift), exact_l *= power_of_two(shift);  // exact
    return shift;
  }

  // 1 / l; a row that attended to nothing has l = 0 and gets O = 0.
  __device__ __forceinline__ float inverse_l() const { return l == 0.0f ? 0.0f : 1.0f / l; }

  // The sum of weights, or of codes if saturating weights are too large to be summed.
  __device__ __forceinline__ float weights() const { return finite_or(exact_l, l); }

  // Natural log of the sum of exponentials; -inf for a row that attended to nothing.
  __device__ __forceinline__ float lse() const { return (M + log2f(weights())) * LN2; }
};

// Shifts an element of O to another M, by the result of ShiftState::advance. A shift to a higher M
// drops less than one unit.
// NOTE: both directions are one instruction: half of a right shift of 64 bits with lower bits 0.
__device__ __forceinline__ int right_shift(int shift) { return min(32 - shift, 63); }
__device__ __forceinline__ int32_t shifted(int32_t x, int right) {
  return int32_t((int64_t(x) << 32) >> right);  // R6
}
