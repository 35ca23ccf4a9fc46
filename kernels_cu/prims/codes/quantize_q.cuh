// quantize_q.cuh -- Q in 16 bits to INT8 codes in shared memory, by the warps that multiply them,
// and the layout of both. Scales and codes equal the results of quantize.cu to the bit.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mbarrier.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/codes/quant.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"

constexpr int BOX_BYTES = 128;                             // per row of a box: one swizzle
constexpr int CODE_BOXES = ceil_div(HEAD_DIM, BOX_BYTES);  // per row of codes
constexpr int Q_NUMBER_BOXES = ceil_div(HEAD_DIM, 64);     // per row of numbers of 16 bits

// Q as codes has two stages. Q as numbers has one, which is free once codes are made.
constexpr int Q_STAGES = QUANTIZE_Q ? 1 : 2;
constexpr int Q_BOXES = QUANTIZE_Q ? Q_NUMBER_BOXES : CODE_BOXES;  // per row of Q
constexpr int Q_BOX_COLS = BOX_BYTES / (QUANTIZE_Q ? sizeof(elem_t) : sizeof(int8_t));
constexpr int Q_ROW_BOXES = Q_STAGES * Q_BOXES + (QUANTIZE_Q ? CODE_BOXES : 0);

static_assert(
    !QUANTIZE_Q || (ELEM_IS_16_BIT && !LSE && !ZERO_POINTS && (GROUP_Q == 1 || GROUP_Q == 2)),
    "QUANTIZE_Q needs 16-bit Q, GROUP_Q of 1 or 2, no ZERO_POINTS and no LSE");

// S1 quantise Q: codes of the 16 rows from warp_row on, and the scales of this lane's rows g and g
// + 8. Rows from `rows` on are of another sequence: zeros. Then the place of the numbers is free,
// and every warp arrives at `empty`.
// NOTE: `barrier` is of the four warps whose wgmma reads these codes. They have synchronised since
// they multiplied codes of the tile before: at a turn, or before they scaled O.
template <int BOXES, int BYTES>
__device__ __forceinline__ void quantize_q(
    float (&scale)[2], int8_t (&codes)[CODE_BOXES][BYTES],  // [CODE_BOXES][BLOCK_Q, 128], swizzled
    const int8_t (&numbers)[BOXES][BLOCK_Q * 128], Mbarrier& empty, int warp_row, int rows,
    int barrier) {
  // Two lanes share a row, each with half of every 128 bytes, so eight lanes read from all banks.
  const int row = warp_row + lane_id() / 2, half = lane_id() % 2;
  constexpr int ACCESSES = Q_NUMBER_BOXES * 4;
  Words<elem_t, 8> x[ACCESSES];
#pragma unroll
  for (int i = 0; i < ACCESSES; ++i) {
    const int chunk = (i % 4 + half * 4) ^ row % 8;
    x[i] = *reinterpret_cast<const Words<elem_t, 8>*>(&numbers[i / 4][row * 128 + chunk * 16]);
    if (VARLEN && row >= rows) x[i] = {};
  }
  __syncwarp();  // all lanes have read
  if (lane_id() == 0) mbarrier_arrive(empty);
  Coding coding;
  const float of_row = coding.make(shfl_max<2 * GROUP_Q>(reach_of(x)).bits);  // R1
#pragma unroll
  for (int h = 0; h < 2; ++h)
    scale[h] = __shfl_sync(FULL_WARP, of_row, (lane_id() / 4 + 8 * h) * 2);
#pragma unroll
  for (int i = 0; i < ACCESSES; i += 2) {  // 16 codes
    const int chunk = (i / 4 % 2 * 4 + i % 4 / 2 + half * 2) ^ row % 8;
    float scaled[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) scaled[j] = coding.scaled(x[i + j / 8].element(j % 8));  // R1
    store_rounded_s8(&codes[i / 8][row * 128 + chunk * 16], scaled);
  }
  fence_proxy_async();               // wgmma shall see them,
  named_barrier_sync(barrier, 128);  // codes of all four warps
}
