// rows.cuh -- query rows in the Hopper forms of fa_int8: the factor of their scores, and S6, which
// stores lse and O to global memory.
#pragma once

#include "prims/codes/mean_dot.cuh"
#include "prims/config.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/io/output.cuh"
#include "prims/io/varlen.cuh"
#include "prims/params.cuh"
#include "prims/schedule/work_tile.cuh"

// The scales of the rows of a head: [ceil(len_q / GROUP_Q)].
__device__ __forceinline__ const float* scales_of_rows(
    const AttnParams& call, const QuantParams& quant, const WorkTile& tile) {
  return quant.Q_scale + tile.batch * quant.Q_scale_stride_batch +
         tile.head * quant.Q_scale_stride_head +
         first_scale<GROUP_Q>(call.cu_seqlens_q, tile.batch);
}

// Scale and softmax scale of rows q and q + 8. QUANTIZE_Q: their scales are there already.
__device__ __forceinline__ void make_row_factors(
    float (&Q_factor)[2], const AttnParams& p, const float* Q_scale, int q) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (!QUANTIZE_Q) Q_factor[h] = Q_scale[min(q + h * 8, p.len_q - 1) / GROUP_Q];
    Q_factor[h] *= p.scale_log2;  // R3
  }
}

// Smoothing subtracted one number from every score of row q. O does not change, and lse gets the
// number back through M. `zero`: the zero point of the row.
template <typename State>
__device__ __forceinline__ void give_mean_back(
    State& state, const AttnParams& p, const QuantParams& quant, const WorkTile& tile, int q,
    float Q_factor, int zero = 0) {
  if (!quant.K_mean) return;
  const float* K_mean = quant.K_mean  // [HEAD_DIM]
                        + (int64_t(tile.batch) * p.heads_kv + tile.head_kv) * HEAD_DIM;
  const int8_t* Q_row = static_cast<const int8_t*>(p.Q)  // [HEAD_DIM]
                        + tile.batch * p.Q_stride.batch + tile.head * p.Q_stride.head +
                        min(q, p.len_q - 1) * p.Q_stride.len;
  const float dot = mean_dot<4>(Q_row, K_mean, zero);
  if (state.has_keys()) state.M += Q_factor * dot;  // R3
}

// The log-sum-exp of row q, by one of the four lanes that have it.
template <typename State>
__device__ __forceinline__ void store_lse(
    const AttnParams& p, const WorkTile& tile, int q, const State& state) {
  if (lane_id() % 4 == 0 && q < p.len_q)
    lse_of(p, int64_t(tile.batch) * p.heads + tile.head, tile.head)[q] = state.lse();
}

// O of the 16 rows of a warp, by way of its boxes in shared memory if STAGED.
template <bool STAGED, typename SharedStorage, int COUNT>
__device__ __forceinline__ void store_tile(
    SharedStorage& smem, const AttnParams& p, const TensorMap& O_map, const WorkTile& tile,
    int warp_row, const float (&O_value)[COUNT]) {
  const int q = tile.q0 + warp_row;
  elem_t* O = static_cast<elem_t*>(p.O)  // [len_q - q, HEAD_DIM]
              + tile.batch * p.O_stride.batch + tile.head * p.O_stride.head + q * p.O_stride.len;
  elem_t* O_rows = smem.O + uniform(warp_row) / STORE_ROWS * OWN_BOXES;  // [OWN_BOXES]
  store_output<STAGED>(
      O, p.O_stride.len, p.len_q - q, O_value, O_rows, O_map, tile.first_row() + q, tile.head,
      tile.entry());
}
