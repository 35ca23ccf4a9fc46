// gradient.cuh -- what the kernels of the backward pass have in common: numbers of the query rows
// that a first kernel works out once, and the weight of a key from the log-sum-exp of its row.
#pragma once

#include "prims/config.cuh"
#include "prims/exp2.cuh"
#include "prims/params.cuh"
#include "prims/score.cuh"
#include "prims/tile_io.cuh"
#include "prims/varlen.cuh"

// Rows of a head are padded to a multiple of this: steps read them without asking how many there
// are. A row past the end, or without keys, has M = +inf, so that every key weighs nothing.
constexpr int ROW_PAD = 128;

// The first row of a head among the padded rows of all.
__device__ __forceinline__ int64_t
padded_row(const AttnParams& call, const BackwardParams& grad, int64_t batch, int64_t head) {
  if constexpr (VARLEN)
    return head * grad.rows + first_scale<ROW_PAD>(call.cu_seqlens_q, batch) * ROW_PAD;
  return (batch * call.heads + head) * grad.rows;
}

// M of a row: its log-sum-exp in the units of exponent(), where that is a number.
__device__ __forceinline__ float row_maximum_from(float lse) {
  const float M = NATURAL_SCORES ? lse : lse * LOG2E;  // R9
  return lse == NEG_INF ? -NEG_INF : M;
}

// exp(score - lse): P of a score, `to_log2` being what brings it to log2 units.
__device__ __forceinline__ float probability(float S, float to_log2, float M) {
  return ex2_approx_ftz(exponent(S, to_log2, -M));  // R9
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

// Steps over the rows of the query heads [first, last), those of one head after the other.
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

  // Goes on to the first head that has a step left; `last` where none has.
  __device__ __forceinline__ void skip(
      const AttnParams& p, const BackwardParams& grad, int64_t batch, int last, int kv0) {
    while (number >= rows.end && ++head < last) {
      if constexpr (BLOCK_MASK) rows = KeptRows(p, grad, batch, head, kv0);
      number = round_down(rows.begin, BLOCK_Q);
    }
  }
};
