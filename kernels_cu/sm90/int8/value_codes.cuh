// value_codes.cuh -- V as codes in the Hopper forms of fa_int8. A row of shared memory has the keys
// of a channel, as wgmma requires for the right operand of 8-bit products.
#pragma once

#include "prims/codes/quantize_q.cuh"
#include "prims/config.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/wgmma.cuh"
#include "prims/io/varlen.cuh"
#include "prims/params.cuh"
#include "prims/schedule/work_tile.cuh"
#include "sm90/int8/warpgroups.cuh"

constexpr int V_BOXES = ceil_div(BLOCK_KV, BOX_BYTES);  // per channel of V
constexpr int INPUT_BYTES =
    BOX_BYTES * (Q_ROW_BOXES * BLOCK_Q + NUM_STAGES * (CODE_BOXES * BLOCK_KV + V_BOXES * O_COLS));

static_assert(
    BLOCK_KV >= 64 && BLOCK_KV <= 256 && BLOCK_KV % 32 == 0,
    "BLOCK_KV must be a multiple of 32 from 64 to 256: columns of one wgmma, depth of another");

// The first column of a sequence in every channel of V.
__device__ __forceinline__ int first_column(const AttnParams& call, const WorkTile& tile) {
  return first_scale<VALUES_PAD>(call.cu_seqlens_k, tile.batch) * VALUES_PAD;
}

// S2: the codes of a step, from `column` of every channel on.
template <int BYTES>
__device__ __forceinline__ void load_V(
    int8_t (&V)[V_BOXES][BYTES], const TensorMap& V_map, Mbarrier& full, const WorkTile& tile,
    int column) {
  for (int b = 0; b < V_BOXES; ++b)
    cp_async_bulk_tensor_4d(
        V[b], V_map, full, column + b * BOX_BYTES, 0, tile.head_kv, tile.entry());
}

// S5 output: sum [64, columns] = P V of one tile for the columns of ColumnsWgmma, in the
// background.
template <typename ColumnsWgmma, typename Sum, int COUNT>
__device__ __forceinline__ void start_tile_sums(
    Sum (&sum)[COUNT], uint32_t (&P_frag)[BLOCK_KV / 32][4], Descriptor V_rows) {
  wgmma_use(sum);
  wgmma_use(P_frag);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 32; ++k) {  // 32 bytes of a channel, then the next box
    const int box = k / 4, byte = k % 4 * 32;
    ColumnsWgmma::rs(sum, P_frag[k], V_rows + (box * O_COLS * BOX_BYTES + byte), k > 0);
  }
  wgmma_commit_group();
}
