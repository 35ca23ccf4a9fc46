// merge_pieces -- merges the partial results of pieces of tiles (pieces.cuh).
//
// Each piece has a maximum M, a sum l and an output O. Times 2^(M - the largest M), these may be
// added. A warp merges one query row. First each lane reads one piece; there are at most as many as
// lanes (cupyattn/kernels/tile_pieces.py). Then lanes share the columns. Pieces are added in the
// order of their keys, so the result is the same on every run.
#include "prims/config.cuh"
#include "prims/io/finite.cuh"
#include "prims/codes/mean_dot.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/schedule/pieces.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/codes/zero_points.cuh"

constexpr int LANE_COLS = ceil_div(HEAD_DIM, WARP_SIZE);  // columns of O per lane

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void merge_pieces(
    const __grid_constant__ AttnParams p, const __grid_constant__ QuantParams quant,
    const __grid_constant__ PieceParams pieces) {
  // S0 locate: tiles of a head come one after the other, its last rows first
  const int rows = blockIdx.x * NUM_WARPS + warp_id();  // of all tiles that are cut
  const int cut_tile = rows / BLOCK_Q, row = rows % BLOCK_Q;
  const int q_blocks = ceil_div(p.len_q, BLOCK_Q), tile = pieces.whole + cut_tile;
  const int batch_head = tile / q_blocks, batch = batch_head / p.heads, head = batch_head % p.heads;
  const int q = (q_blocks - 1 - tile % q_blocks) * BLOCK_Q + row;
  if (cut_tile >= pieces.cut || q >= p.len_q) return;
  const int first = cut_tile * pieces.steps;     // step of the tile, counted along all
  const int first_block = first / pieces.share;  // that took a piece of it
  const int last_block = (first + pieces.steps - 1) / pieces.share;
  const int64_t place = int64_t(first_block + cut_tile) * BLOCK_Q + row;  // of the first piece
  const PieceRow* of_row = reinterpret_cast<const PieceRow*>(pieces.rows) + place;  // [1]
  const float* O_piece = pieces.O + place * HEAD_DIM;                               // [HEAD_DIM]
  const int number = last_block - first_block + 1;                                  // of pieces

  PieceRow part = {NEG_INF, 0.0f, 0.0f};  // of this lane
  if (lane_id() < number) part = of_row[lane_id() * BLOCK_Q];
  RowState state;
  state.M = shfl_max<WARP_SIZE>(part.M);
  const float own_weight = ex2_approx_ftz(part.M - state.M_finite());  // R4
  float l_of_O = 0.0f, O_acc[LANE_COLS] = {};                          // columns lane_id() + 32 c
#pragma unroll 8
  for (int i = 0; i < number; ++i) {
    const float weight = __shfl_sync(FULL_WARP, own_weight, i);
    state.l = fmaf(weight, __shfl_sync(FULL_WARP, part.l, i), state.l);     // R6
    l_of_O = fmaf(weight, __shfl_sync(FULL_WARP, part.l_of_O, i), l_of_O);  // R6
#pragma unroll
    for (int c = 0; c < LANE_COLS; ++c) {
      const int d = min(lane_id() + c * WARP_SIZE, HEAD_DIM - 1);
      O_acc[c] = fmaf(weight, O_piece[int64_t(i) * BLOCK_Q * HEAD_DIM + d], O_acc[c]);  // R6
    }
  }

  // S6 store
  RowState whole = state;  // with the l that O is divided by
  whole.l = l_of_O;
  const float inverse_l = whole.inverse_l();
  elem_t* O = static_cast<elem_t*>(p.O)  // [HEAD_DIM]
              + batch * p.O_stride.batch + head * p.O_stride.head + q * p.O_stride.len;
#pragma unroll
  for (int c = 0; c < LANE_COLS; ++c) {
    const int d = lane_id() + c * WARP_SIZE;
    if (d < HEAD_DIM) O[d] = from_sum<elem_t>(O_acc[c] * inverse_l);  // R7
  }
  if constexpr (LSE) {
    // Smoothing took the same part from every score of a row: O is as it was, lse gets it back.
    if (quant.K_mean) {                     // there is none without codes
      const float* Q_scale = quant.Q_scale  // [ceil(len_q / GROUP_Q)]
                             + batch * quant.Q_scale_stride_batch +
                             head * quant.Q_scale_stride_head;
      int zero = 0;
      if constexpr (ZERO_POINTS) zero = zero_of(quant.Q_zero, quant.Q_scale, Q_scale + q / GROUP_Q);
      const float* K_mean =
          quant.K_mean  // [HEAD_DIM]
          + (int64_t(batch) * p.heads_kv + head / (p.heads / p.heads_kv)) * HEAD_DIM;
      const int8_t* Q_row = static_cast<const int8_t*>(p.Q)  // [HEAD_DIM]
                            + batch * p.Q_stride.batch + head * p.Q_stride.head +
                            q * p.Q_stride.len;
      const float dot = mean_dot<WARP_SIZE>(Q_row, K_mean, zero);
      if (state.M > NEG_INF) state.M += p.scale_log2 * Q_scale[q / max(GROUP_Q, 1)] * dot;  // R3
    }
    if (lane_id() == 0) p.lse[int64_t(batch_head) * p.len_q + q] = state.lse();
  }
}
