// gradient.cuh -- shared by the kernels of the backward pass: numbers of the query rows from the
// first kernel, and the weight of a key. The weight comes from the log-sum-exp of its row, or from
// the row's maximum and sum if the log-sum-exp is coarse.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

// backward_delta.cu takes it: DeltaParams, with PART_SUMS followed by numbers of coarse rows.
template <bool>
struct SummedDeltaParams : DeltaParams<D_LSE> {};
template <>
struct SummedDeltaParams<true> : DeltaParams<true> {
  const float* given_M;       // [batch, heads, rows], over all keys of a row
  const float* given_factor;  // [batch, heads, rows]
};

// Rows of a head are padded to a multiple of this: steps read them without asking how many there
// are. A row past the end, or without keys, has M = +inf, so that every key weighs nothing.
constexpr int ROW_PAD = 128;

// A row is coarse if its log-sum-exp is at least this far from zero. Rounding lse and M then
// changes P by a relative error up to 2.2 * 2^-24 * |lse|. Below the limit this is less than 2^-12,
// half of the error of rounding P to float16.
constexpr float COARSE_LSE = 1024.0f;
// Rows that share a flag. Four flags are 16 bytes, which the bulk copy engine needs.
constexpr int COARSE_ROWS = 16;

// The first row of a head among the padded rows of all.
__device__ __forceinline__ int64_t
padded_row(const AttnParams& call, const BackwardParams& grad, int64_t batch, int64_t head) {
  if constexpr (VARLEN)
    return head * grad.rows + first_scale<ROW_PAD>(call.cu_seqlens_q, batch) * ROW_PAD;
  return (batch * call.heads + head) * grad.rows;
}

// M of a row: its log-sum-exp in the units of exponent(), or +inf if that is -inf.
__device__ __forceinline__ float row_maximum_from(float lse) {
  const float M = NATURAL_SCORES ? lse : lse * LOG2E;  // R9
  return lse == NEG_INF ? -NEG_INF : M;
}

// exp(score - lse): P of a score. `to_log2` is the factor from the score to log2 units.
__device__ __forceinline__ float probability(float S, float to_log2, float M) {
  return ex2_approx_ftz(exponent(S, to_log2, -M));  // R9
}

// Whether the row must be normalised again. Neither -inf, a row without keys, nor NaN is coarse.
__device__ __forceinline__ bool is_coarse(const BackwardParams& grad, float lse) {
  const float size = fabsf(lse);
  return grad.all_keys && size >= COARSE_LSE && size < -NEG_INF;
}

// The exponential of a score less M of its row, capped to the range of 16 bits. As in the forward
// pass, M may be rounded down.
__device__ __forceinline__ float capped(float exponential) {
  constexpr float LARGEST = 1 << int(LARGEST_EXPONENT);
  return min_nan(exponential, LARGEST);
}

// P of a coarse row, from that exponential.
__device__ __forceinline__ float normalised(float exponential, float factor) {
  return capped(exponential) * factor;  // R9
}

// The score of a product q.k, with a softcap in natural units. Past a mask -inf.
__device__ __forceinline__ float changed_score(const AttnParams& p, float S, bool admitted) {
  if constexpr (SOFTCAP)
    return admitted ? p.softcap * tanhf(S * p.scale * p.softcap_inverse) : NEG_INF;  // R9
  return admitted ? S : NEG_INF;
}

struct Weight {
  float P, dS;
};
// P and dS of a changed score, and of the same with a bias. The slope of a softcap comes from the
// score itself, so that no register holds both; it is 0 past a mask. `above` is dP less Delta, and
// `factor` that of the row, 1 unless coarse.
template <bool ANY_COARSE>
__device__ __forceinline__ Weight
weight_of_changed(const AttnParams& p, float S, float biased, float above, float M, float factor) {
  float P = probability(biased, p.scale_log2, M);  // R9
  if constexpr (ANY_COARSE) P = normalised(P, factor);
  const float dS = P * above;  // R11
  if constexpr (!SOFTCAP) return {P, dS};
  const float t = fmaxf(S * p.softcap_inverse, -1.0f);
  return {P, dS * fmaf(-t, t, 1.0f)};  // R11
}

// Whether any of ROWS rows is coarse, by their flags in global or shared memory.
template <int ROWS>
__device__ __forceinline__ bool any_coarse(const int32_t* flags) {
  int32_t found = 0;
#pragma unroll
  for (int i = 0; i < ceil_div(ROWS, COARSE_ROWS); ++i) found |= flags[i];
  return found != 0;
}

// COUNT numbers of the rows [row0, row0 + COUNT) to shared memory, in the background.
template <int COUNT>
__device__ __forceinline__ void load_rows_async(float* shared, const float* global, int thread) {
  static_assert(COUNT % 4 == 0 && COUNT / 4 <= NUM_THREADS, "rows come 16 bytes to a thread");
  if (thread < COUNT / 4) cp_async<16>(shared + thread * 4, global + thread * 4, true);
}

// The query rows of one head that keys [kv0, kv0 + BLOCK_KV) step over, BLOCK_Q at a time.
struct KeptRows : KeptBlocks<BLOCK_MASK_Q, BLOCK_Q> {
  __device__ __forceinline__
  KeptRows(const AttnParams& p, const BackwardParams& grad, int64_t batch, int64_t head, int kv0)
      : KeptBlocks(q_begin(p, kv0), q_end(p, kv0, BLOCK_KV)) {
    if constexpr (BLOCK_MASK)
      keep(
          grad.kept_rows + batch * grad.kept_rows_stride.batch + head * grad.kept_rows_stride.head +
              kv0 / BLOCK_MASK_KV * grad.kept_rows_stride.len,
          begin, end);
  }
};

// Steps over the rows of the query heads [first, last), head by head.
struct RowSteps {
  int head, number;
  KeptRows rows;

  __device__ __forceinline__ RowSteps(
      const AttnParams& p, const BackwardParams& grad, int64_t batch, int first, int last, int kv0)
      : head(first), rows(p, grad, batch, first, kv0) {
    number = round_down(rows.begin, BLOCK_Q);
    skip(p, grad, batch, last, kv0);
  }

  // The first row of this step.
  __device__ __forceinline__ int q0() const { return rows.key(number); }

  __device__ __forceinline__ void advance(
      const AttnParams& p, const BackwardParams& grad, int64_t batch, int last, int kv0) {
    number += BLOCK_Q;
    skip(p, grad, batch, last, kv0);
  }

  // Moves to the first head that has a step left, or to `last` if none has.
  __device__ __forceinline__ void skip(
      const AttnParams& p, const BackwardParams& grad, int64_t batch, int last, int kv0) {
    while (number >= rows.end && ++head < last) {
      if constexpr (BLOCK_MASK) rows = KeptRows(p, grad, batch, head, kv0);
      number = round_down(rows.begin, BLOCK_Q);
    }
  }
};
