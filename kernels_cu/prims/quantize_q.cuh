// quantize_q.cuh -- rows of Q to INT8 codes where wgmma reads them, by warps of a Hopper kernel that
// would have nothing to do: the copying warpgroup has four, and one copies. Scales and codes are
// those of quantize.cu, to the bit.
#pragma once

#include "prims/config.cuh"
#include "prims/mbarrier.cuh"
#include "prims/params.cuh"
#include "prims/quant.cuh"
#include "prims/tma.cuh"
#include "prims/varlen.cuh"
#include "prims/warp.cuh"
#include "prims/work_tile.cuh"

constexpr int QUANTIZING_WARPS = 3;  // all of the copying warpgroup but its first

// Columns that products read, and lanes that share a row: as few as have registers for it, 16 each.
constexpr int Q_COLS = round_up(HEAD_DIM, 32);
constexpr int Q_LANES = power_of_two_from(ceil_div(Q_COLS * int(sizeof(elem_t)), 64));
constexpr int Q_ACCESSES = ceil_div(Q_COLS, VEC* Q_LANES);  // of each
constexpr int Q_PASS_ROWS = WARP_SIZE / Q_LANES;            // of a warp

static_assert(
    !QUANTIZE_Q || (!LSE && !ZERO_POINTS && Q_PASS_ROWS % GROUP_Q == 0),
    "QUANTIZE_Q needs GROUP_Q 1 or 2, no LSE, which reads codes of Q, and no ZERO_POINTS");

// S1 quantise Q: the rows of one tile, codes to shared memory and scales to the workspace.
template <int BOXES>
__device__ __forceinline__ void quantize_q(
    int8_t (&codes)[BOXES][BLOCK_Q * 128],  // [BOXES][BLOCK_Q, 128], swizzled by 128 bytes
    const AttnParams& call, const QuantParams& quant, const WorkTile& tile) {
  constexpr int STEP = QUANTIZING_WARPS * Q_PASS_ROWS;
  const int lane = lane_id() % Q_LANES;
  const int first = (warp_id() - 1) * Q_PASS_ROWS + lane_id() / Q_LANES;  // row of the tile
  const int rows = of_sequences(call, tile).len_q - tile.q0;              // that exist from q0 on
  const elem_t* x = static_cast<const elem_t*>(call.Q)  // this lane's part of a row
                    + tile.entry() * call.Q_stride.batch + tile.head * call.Q_stride.head +
                    (tile.first_row() + tile.q0 + first) * call.Q_stride.len + lane * VEC;
  float* scale = quant.Q_scale  // [ceil(rows / GROUP_Q)]
                 + tile.batch * quant.Q_scale_stride_batch + tile.head * quant.Q_scale_stride_head +
                 first_scale<GROUP_Q>(call.cu_seqlens_q, tile.batch) + tile.q0 / GROUP_Q;
  const int64_t step = STEP * call.Q_stride.len;
  for (int row = first; row < min(rows, BLOCK_Q); row += STEP)
    prefetch_l2(x + (row - first) / STEP * step);
#pragma unroll 1
  for (int row = first; row < BLOCK_Q; row += STEP, x += step) {
    Words<elem_t, VEC> words[Q_ACCESSES] = {};  // past the last row and the last column are zeros
#pragma unroll
    for (int a = 0; a < Q_ACCESSES; ++a)
      if (row < rows && (a * Q_LANES + lane) * VEC < HEAD_DIM)
        words[a] = *reinterpret_cast<const Words<elem_t, VEC>*>(x + a * Q_LANES * VEC);
#pragma unroll
    for (int a = 0; a < Q_ACCESSES; ++a) words[a].use_from_here();
    const Reach reach = shfl_max<Q_LANES * GROUP_Q>(reach_of(words));
    Coding coding;
    const float of_group = coding.make(reach.bits);  // R1
    if (row < rows && lane_id() % (Q_LANES * GROUP_Q) == 0) scale[row / GROUP_Q] = of_group;
#pragma unroll
    for (int a = 0; a < Q_ACCESSES; ++a) {
      const int col = (a * Q_LANES + lane) * VEC;
      if (col >= Q_COLS) continue;
      float scaled[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) scaled[j] = coding.scaled(words[a].element(j));  // R1
      const int chunk = col / 16 % 8 ^ row % 8;
      store_rounded_s8(&codes[col / 128][row * 128 + chunk * 16 + col % 16], scaled);
    }
  }
}

// The same of tile after tile, each as soon as the thread that copies has said which it is, until
// there are no more.
template <int STAGES, int BOXES>
__device__ __forceinline__ void quantize_tiles(
    int8_t (&codes)[STAGES][BOXES][BLOCK_Q * 128], const WorkTile (&tile)[STAGES],
    Mbarrier (&wanted)[STAGES], Mbarrier (&full)[STAGES], const AttnParams& call,
    const QuantParams& quant) {
  for (RingPosition<STAGES> at; true; at.advance()) {
    mbarrier_wait_parity(wanted[at.stage], at.parity);  // a tile is known, its place was read
    const WorkTile now = tile[at.stage];
    if (now.q0 >= 0) quantize_q(codes[at.stage], call, quant, now);
    fence_proxy_async();  // wgmma shall see the codes
    __syncwarp();         // of all lanes
    if (lane_id() == 0) mbarrier_arrive(full[at.stage]);
    if (now.q0 < 0) return;
  }
}
