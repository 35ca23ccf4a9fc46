// score.cuh -- features that change a score: masks of keys, softcap and bias. A kernel without
// features compiles all of this to one comparison with len_kv.
#pragma once

#include "prims/config.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/instructions/warp.cuh"

// ---- by place: causal mask and window --------------------------------------------------------
//
// STACKED: query rows belong to several heads, one head behind the other. Any row may count as the
// first and the last row of its head.

// Keys [kv_begin, kv_end) are all keys to which any of the query rows [q0, q0 + rows) may attend by
// place. Steps over keys start at kv_begin rounded down.
__device__ __forceinline__ int kv_begin(const AttnParams& p, int q0) {
  if constexpr (WINDOW) return max(0, q0 + p.window_shift);
  return 0;
}
__device__ __forceinline__ int kv_end(const AttnParams& p, int q0, int rows) {
  if constexpr (STACKED) q0 = 0, rows = p.stack;
  if constexpr (CAUSAL) return max(0, min(p.len_kv, q0 + rows + p.causal_shift));
  return p.len_kv;
}

// Query rows [q_begin, q_end) are all rows that may attend to any of the keys [kv0, kv0 + keys).
__device__ __forceinline__ int q_begin(const AttnParams& p, int kv0) {
  if constexpr (CAUSAL) return max(0, kv0 - p.causal_shift);
  return 0;
}
__device__ __forceinline__ int q_end(const AttnParams& p, int kv0, int keys) {
  if constexpr (WINDOW) return max(0, min(p.len_q, kv0 + keys - p.window_shift));
  return p.len_q;
}

// All query rows q0 to q0 + rows may attend by place to the keys [kv_unmasked_begin,
// kv_unmasked_end).
__device__ __forceinline__ int kv_unmasked_begin(const AttnParams& p, int q0, int rows) {
  if constexpr (WINDOW) return q0 + rows - 1 + p.window_shift;
  return 0;
}
__device__ __forceinline__ int kv_unmasked_end(const AttnParams& p, int q0) {
  if constexpr (STACKED) q0 = 0;
  if constexpr (CAUSAL) return max(0, min(p.len_kv, q0 + 1 + p.causal_shift));
  return p.len_kv;
}

// Whether query row `row` may attend to a key in the place `key`.
// NOTE: two comparisons and not one with the lesser bound, which lives in a register for every row.
__device__ __forceinline__ bool admitted(const AttnParams& p, int row, int key) {
  if constexpr (STACKED && CAUSAL) row %= p.stack;
  if constexpr (WINDOW)
    if (key < row + p.window_shift) return false;
  if constexpr (CAUSAL) return key < p.len_kv && key <= row + p.causal_shift;
  return key < p.len_kv;
}

// Which scores of a step are unmasked, in the layout of wgmma. Score i of a lane belongs to row q,
// or q + 8. Its key is kv0 + i / 4 * 8 + lane % 4 * 2 + i % 2. Terms of i alone are constants. The
// rest is computed once: the condition `admitted`, as both ends of a row's range of keys.
struct ScoreMask {
  int begin[2], end[2];  // of constants, by row

  __device__ __forceinline__ ScoreMask(const AttnParams& p, int q, int kv0) {
    const int first = kv0 + lane_id() % 4 * 2;  // key of this lane's score 0
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = STACKED && CAUSAL ? (q + h * 8) % p.stack : q + h * 8;
      if (WINDOW) begin[h] = row + p.window_shift - first;
      end[h] = (CAUSAL ? min(p.len_kv, row + p.causal_shift + 1) : p.len_kv) - first;
    }
  }
  // Whether every score of the step at kv0 is admitted, for all of the warp's 16 rows. The first of
  // this lane's two rows is q, and `unmasked` is the kv_unmasked_end of these or of earlier rows.
  // NOTE: for all rows, not for this lane's alone: lanes of a warp vote on weights and branch
  // together.
  __device__ __forceinline__ static bool admits_all(
      const AttnParams& p, int q, int kv0, int unmasked) {
    return kv0 + BLOCK_KV <= unmasked &&
           !(WINDOW && kv0 < kv_unmasked_begin(p, q - lane_id() / 4, 16));
  }
  __device__ __forceinline__ bool admits(int i) const { return admits_any(i, i); }
  // Whether it admits any score from `first` to `last`, two scores of one row.
  __device__ __forceinline__ bool admits_any(int first, int last) const {
    const int h = first / 2 % 2;
    return (!WINDOW || key_of(last) >= begin[h]) && key_of(first) < end[h];
  }
  __device__ __forceinline__ static int key_of(int i) { return i / 4 * 8 + i % 2; }
};

// ---- by block: which steps over keys are taken -----------------------------------------------

// The rows [first, last) of an operand, STEP of them at a time, of which a block mask keeps whole
// blocks of BLOCK. Steps are counted in rows. Step number n is a multiple of STEP with begin < n +
// STEP and n < end, and starts at row key(n). With a block mask only kept blocks are counted.
// Without one, key(n) is n.
template <int BLOCK, int STEP>
struct KeptBlocks {
  int begin, end;
  const int32_t* blocks;  // [count], rising

  __device__ __forceinline__ KeptBlocks(int first, int last) : begin(first), end(last) {}

  // The same for listed blocks, with their count before them: [1 + count].
  __device__ __forceinline__ void keep(const int32_t* listed, int first, int last) {
    blocks = listed;
    end = *blocks++ * BLOCK;
    begin = count_before(first - STEP + 1);
    end = count_before(last);
  }

  // The first row of a step; for steps past the end, an arbitrary number.
  __device__ __forceinline__ int key(int number) const {
    if constexpr (BLOCK_MASK) {
      if (number >= end) return number;
      return blocks[number / BLOCK] * BLOCK + number % BLOCK;
    }
    return number;
  }

  // The number of the first step that starts at row `limit` or later, or `end` if none does.
  __device__ __forceinline__ int count_before(int limit) const {
    int low = 0, high = end / STEP;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (key(middle * STEP) < limit)
        low = middle + 1;
      else
        high = middle;
    }
    return low * STEP;
  }

  // Whether a step starts at row `row`.
  __device__ __forceinline__ bool include(int row) const {
    if constexpr (BLOCK_MASK) {
      const int number = count_before(row);
      return number < end && key(number) == row;
    }
    return true;
  }
};

// The keys over which query rows [q0, q0 + BLOCK_Q) of one head step, among the keys [first, last)
// that are admitted by place.
struct KeptKeys : KeptBlocks<BLOCK_MASK_KV, BLOCK_KV> {
  __device__ __forceinline__
  KeptKeys(const AttnParams& p, int64_t batch, int64_t head, int q0, int first, int last)
      : KeptBlocks(first, last) {
    if constexpr (BLOCK_MASK)
      keep(
          p.kept_blocks + batch * p.kept_stride.batch + head * p.kept_stride.head +
              q0 / BLOCK_MASK_Q * p.kept_stride.len,
          first, last);
  }
};

// ---- scores ----------------------------------------------------------------------------------

// The factor of products that are scaled before S4 by the scale of a row: to log2 units, or
// natural.
__device__ __forceinline__ float softmax_scale(const AttnParams& p) {
  return NATURAL_SCORES ? p.scale : p.scale_log2;
}

// This factor times the scale of a row's codes. It is never 0, so -inf (masked) stays -inf.
__device__ __forceinline__ float row_factor(float factor, float scale) {
  const float product = factor * scale;
  return product == 0.0f ? __int_as_float(1) : product;
}

// The same of a row of Q whose masked scores stay -inf even if its scale is NaN. The factor is then
// NAN_ROW, which no other row has, and S6 makes l NaN unless the row has no keys.
constexpr float NAN_ROW = 0x1p-148f;
__device__ __forceinline__ float factor_of_Q_row(const AttnParams& p, float scale) {
  return fmaxf(softmax_scale(p) * scale, scale == scale ? 2 * NAN_ROW : NAN_ROW);
}
__device__ __forceinline__ float l_of_Q_row(const RowState& state, float row_factor) {
  return row_factor == NAN_ROW && state.has_keys() ? __int_as_float(0x7fc00000) : state.l;
}

// M and the exponent of 2 of a score. `to_log2` is the factor from a product q.k to log2 units.
// Natural scores are subtracted before they are multiplied, so a bias may have any size.
__device__ __forceinline__ float row_maximum(float m, float to_log2) {
  return NATURAL_SCORES ? m : m * to_log2;
}
__device__ __forceinline__ float exponent(float S, float to_log2, float minus_M) {
  return NATURAL_SCORES ? (S + minus_M) * LOG2E : fmaf(S, to_log2, minus_M);
}

// The same for scores of any size. Below LARGEST_SCORE, M to nearest leaves no exponent past
// LARGEST_EXPONENT. From there on M is rounded down, so that the largest score weighs at least 1.
// Scores that M cannot distinguish from it weigh the same, within the range of P in 16 bits and of
// its sums.
constexpr float LARGEST_SCORE = 0x1p27f, LARGEST_EXPONENT = 8.0f;
__device__ __forceinline__ float row_maximum_of_any_size(float m, float to_log2) {
  const float M = row_maximum(m, to_log2);
  return NATURAL_SCORES || fabsf(M) < LARGEST_SCORE ? M : __fmul_rd(m, to_log2);
}
__device__ __forceinline__ float exponent(float S, float to_log2, float minus_M, bool capped) {
  const float x = exponent(S, to_log2, minus_M);
  return capped && !NATURAL_SCORES ? min_nan(x, LARGEST_EXPONENT) : x;
}

// The same for a lane's scores of two rows. No exponent is capped if M neither rises nor is large.
// Whether M rises to m, or is not below LARGEST_SCORE. -inf, before the first key, is not below it.
__device__ __forceinline__ bool rises_or_large(
    const RowState (&state)[2], const float (&m)[2], float to_log2) {
  return row_maximum(m[0], to_log2) > state[0].M || row_maximum(m[1], to_log2) > state[1].M ||
         fmaxf(fabsf(state[0].M), fabsf(state[1].M)) >= LARGEST_SCORE;
}
// If so, M as a finite number for subtraction. If an M is large, capped exponents replace all N
// scores, with score i in row i / 2 % 2. Then 1 replaces the factor, and 0 replaces M.
template <int N>
__device__ __forceinline__ void subtract_large(
    const RowState (&state)[2], float* S, float& to_log2, float (&M)[2]) {
  M[0] = state[0].M_finite(), M[1] = state[1].M_finite();
  if (NATURAL_SCORES || fmaxf(fabsf(M[0]), fabsf(M[1])) < LARGEST_SCORE) return;
#pragma unroll
  for (int i = 0; i < N; ++i) S[i] = exponent(S[i], to_log2, -M[i / 2 % 2], true);
  to_log2 = 1.0f, M[0] = M[1] = 0.0f;
}

// The scores of one head: conversion of its products q.k, and masks.
struct Scores {
  const AttnParams& p;
  const bool* mask;    // [len_q, len_kv], strided
  const bias_t* bias;  // [len_q, len_kv], strided

  __device__ __forceinline__ Scores(const AttnParams& p, int64_t batch, int64_t head) : p(p) {
    if constexpr (MASK) mask = p.mask + batch * p.mask_stride.batch + head * p.mask_stride.head;
    if constexpr (BIAS)
      bias = static_cast<const bias_t*>(p.bias) + batch * p.bias_stride.batch +
             head * p.bias_stride.head;
  }

  // The score of query row `row` and key `key` with the scaled product x, before masks. Here and
  // below, rows and keys may be past the end.
  __device__ __forceinline__ float of(float x, int row, int key) const {
    if constexpr (SOFTCAP) x = p.softcap * tanhf(x * p.softcap_inverse);  // R3
    if constexpr (BIAS) {
      row = min(row, p.len_q - 1), key = min(key, p.len_kv - 1);
      const float b = to_float(bias[row * p.bias_stride.row + key * p.bias_stride.key]);
      // NOTE: __fadd_rn is not contracted with the product before it: R3 rounds here. A bias of
      // -inf masks the key, even if its score is NaN.
      x = b == NEG_INF ? NEG_INF : __fadd_rn(x, b);  // R3
    }
    return x;
  }

  // The derivative of this score by x.
  __device__ __forceinline__ float slope(float x) const {
    if constexpr (SOFTCAP) {
      const float t = tanhf(x * p.softcap_inverse);
      return fmaf(-t, t, 1.0f);
    }
    return 1.0f;
  }

  // Whether the row may attend to the key.
  __device__ __forceinline__ bool admit(int row, int key) const {
    if constexpr (MASK)
      return admitted(p, row, key) && row < p.len_q &&
             mask[row * p.mask_stride.row + key * p.mask_stride.key];
    return admitted(p, row, key);
  }

  // The scores of fragments in the layout of mma (mma.cuh), for row tiles from query row q0 on and
  // key tiles from key kv0 on. The scaled product of S[r][n][i] is scaled(r, n, i).
  template <int R, int N, typename Scaled>
  __device__ __forceinline__ void settle(
      float (&S)[R][N][4], int q0, int kv0, Scaled scaled) const {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = q0 + r * 16 + g + i / 2 * 8, key = kv0 + n * 8 + t * 2 + i % 2;
          S[r][n][i] = of(scaled(r, n, i), row, key);
          if (!admit(row, key)) S[r][n][i] = NEG_INF;
        }
  }

  // Whether the scores of query rows [q0, q0 + rows) and keys [kv0, kv0 + keys) are their products
  // unchanged.
  __device__ __forceinline__ bool are_products(int q0, int rows, int kv0, int keys) const {
    if constexpr (NATURAL_SCORES || MASK) return false;
    return are_placed(q0, rows, kv0, keys);
  }

  // May these rows attend to all of these keys by their place?
  __device__ __forceinline__ bool are_placed(int q0, int rows, int kv0, int keys) const {
    if constexpr (WINDOW)
      if (kv0 < kv_unmasked_begin(p, q0, rows)) return false;
    return kv0 + keys <= kv_unmasked_end(p, q0);
  }
};
