// gemm_int8_channel -- Hopper form: INT8 codes by wgmma, slices by the copy engine, blocks stay.
//
// Idea         C[m, n] = A_scale[m] B_scale[n] sum over k of A[m, k] B[n, k]. The sum stays int32
//              to the end, so the loop has only wgmma: no conversion, no fma, no shuffle.
// Differs from the portable form: the tile is 128 x 256, of which a warpgroup holds 64 rows in
//              int32. A block computes one tile after another, and slices of the next tile arrive
//              during the store. With TAIL_SPLITS, clusters share the tiles of the last wave; a
//              shared tile is the last of its blocks. With LAYERS, tiles belong to several B.
//              (diff ../gemm_int8_channel.cu gemm_int8_channel.cu)
// Counts       A slice of 128 x 256, in clocks of an SM: products 1024, shared memory 1024, of
//              which wgmma reads 5/8. L2 cache: 48 bytes a clock. A store takes as long as three
//              slices.
// Kept simple  C is stored directly to its rows; no product runs meanwhile.
// Rounding     G1 the product of both scales; G2 the sum to float32, and times G1; G3 bias; G4
//              activation; G7 times the other half; G6 residual; G5 store (docs/MATH_REFERENCE.md)
// Mirror       cupyattn.quant.gemm_mirror, to the bit but for activation
// Bound        cupyattn.quant.gemm_error
#include "prims/config.cuh"
#include "prims/codes/gemm_channel.cuh"
#include "linear/sm90/gemm_block.cuh"
#include "linear/sm90/gemm_layers.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma_8bit.cuh"

constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;

using Partial = int32_t[FRAGMENTS][COMPUTING][4];  // partial sums of a part of k, for other blocks

struct SharedStorage {
  alignas(1024) int8_t A[NUM_STAGES][BLOCK_M * SLICE];  // in the end the Partial, where one is made
  alignas(1024) int8_t B[NUM_STAGES][BLOCK_N * SLICE];
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base

static_assert(!OUTLIERS, "columns in 16 bits go with scales of blocks: OUTLIERS must be 0");
static_assert(
    (CONSUMERS == 1 || CONSUMERS == 2) && CONSUMERS * 64 == BLOCK_M,
    "BLOCK_M must be 64 or 128: one or two warpgroups of 64 rows");
static_assert(
    BLOCK_N == 64 || BLOCK_N == 128 || BLOCK_N == 256,
    "BLOCK_N must be 64, 128 or 256: columns of a wgmma");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP,
    "NUM_WARPS must be 4 for every 64 rows of BLOCK_M and 4 that copy");
static_assert(
    !LAYERS || !(GLU || RESIDUAL), "LAYERS of a launch have neither a gated linear unit nor a sum");
static_assert(
    CLUSTER == 1 || sizeof(Partial) <= NUM_STAGES * (BLOCK_M + BLOCK_N) * SLICE,
    "NUM_STAGES of slices must have room for a tile in int32, where blocks share one");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) CLUSTER_OF_SPLITS void gemm_int8_channel(
    const __grid_constant__ GemmParams p, const __grid_constant__ TensorMap A_map,
    const __grid_constant__ TensorMap B_map WEIGHT_PARAMETERS) {
  extern __shared__ unsigned char shared_bytes[];
  auto& smem = aligned_storage<SharedStorage>(shared_bytes);
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const Weights<LAYERS> weights WEIGHT_ARGUMENTS;

  init_ring(smem.full, smem.empty);
  RingPosition<NUM_STAGES> at;
  if (warpgroup == 0) {  // ---- the producer, one thread
    if constexpr (CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    auto begin = [&](int stage, const Part& part, int step) {  // with the slice of B
      mbarrier_arrive_expect_tx(smem.full[stage], sizeof(smem.A[0]) + sizeof(smem.B[0]));
      weights.copy_B(
          p, smem.B[stage], smem.full[stage], (part.first + step) * SLICE,
          gemm_tile(p, part.tile).n0);
    };
    const Part first = part_of(p, blockIdx.x);
    const int early = min(first.codes, NUM_STAGES);  // slices of B that come before A is there
#pragma unroll 1
    for (int step = 0; step < early; ++step) begin(step, first, step);
    griddepcontrol_wait();  // A, which the launch before makes, is there
    for (int index = blockIdx.x; index < num_parts(p); index += gridDim.x) {
      const Part part = part_of(p, index);
      const int m0 = gemm_tile(p, part.tile).m0;
#pragma unroll 1
      for (int step = 0; step < part.codes; ++step, at.advance()) {
        if (index != blockIdx.x || step >= early) {
          mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // these slices were read
          begin(at.stage, part, step);
        }
        cp_async_bulk_tensor_4d(
            smem.A[at.stage], A_map, smem.full[at.stage], (part.first + step) * SLICE, m0, 0, 0);
      }
    }
    return;
  }

  // ---- the consumers
  griddepcontrol_wait();  // scales of A are there, and C, which others may have read, is free
  if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int number = uniform(thread_id_anew() / WARPGROUP) - 1;
  const int warp_row = number * 64 + warp_id() % 4 * 16;  // this warp's first in the tile
  const int g = lane_id() / 4;                            // fragment coordinate
  const Descriptor A_ring = uniform(descriptor_k_major(&smem.A[0][number * 64 * SLICE]));
  const Descriptor B_ring = uniform(descriptor_k_major(smem.B[0]));

  for (int index = blockIdx.x; index < num_parts(p); index += gridDim.x) {
    const Part part = part_of(p, index);
    GemmTile tile = gemm_tile(p, part.tile);
    const int row0 = tile.m0 + warp_row + g;
    int32_t dot[BLOCK_N / 2];  // [BLOCK_N / 8][4]
    RingPosition<NUM_STAGES> last;
#pragma unroll 1
    for (int step = 0; step < part.codes; ++step, at.advance()) {
      const Descriptor A_rows = A_ring.stage(at.stage, sizeof(smem.A[0]));
      const Descriptor B_rows = B_ring.stage(at.stage, sizeof(smem.B[0]));
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // both slices have arrived
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < SLICE; k += 32)
        WgmmaS8<BLOCK_N>::ss(dot, A_rows + k, B_rows + k, k > 0 || step > 0);
      wgmma_commit_group();
      wgmma_wait_group<1>();  // the products of the slice before have read their stage
      if (step > 0 && lane_id() == 0) mbarrier_arrive(smem.empty[last.stage]);
      last = at;
    }
    const auto& own = weights.params(p, tile.n0);  // of this tile's layer
    // Scales and bias come before they are needed: these while the last products are made.
    constexpr int TILES = 4;  // of 16 x 8, that store_sums stores at once
    const float A_scale[2] = {row_scale(own, row0), row_scale(own, row0 + 8)};
    ColumnPairs<TILES> B_scale[2], bias[2];  // of the tiles that are stored, and of the next
    auto load_columns = [&](int n) {
      load_column_scales<TILES>(own, tile.n0, n, B_scale[n / TILES % 2]);
      load_bias<TILES>(own, tile.n0, n, bias[n / TILES % 2]);
    };
    load_columns(0);
    wgmma_wait_group<0>();
    wgmma_use(dot);
    if (lane_id() == 0) mbarrier_arrive(smem.empty[last.stage]);

    if (is_shared(p, index)) {
      constexpr int AT_ONCE = merged_at_once(FRAGMENTS, FRAGMENTS);
      named_barrier_sync(1, COMPUTING);  // all slices were read, the Partial may come
      merge_parts<AT_ONCE>(
          reinterpret_cast<Partial&>(smem.A), part.rank, int(threadIdx.x) - WARPGROUP,
          [&](int f, int i) {
            return fragment_element(f, i, [&](int tile_of_C, int half, int e) {
              return dot[fragment_of(tile_of_C, half) * 4 + e];
            });
          },
          [&](int f, const Vec<int32_t, 4>(&sums)[AT_ONCE]) {
            constexpr int MERGED = merged_tiles(AT_ONCE);
            ColumnPairs<MERGED> B_scale, bias;
            load_column_scales<MERGED>(own, tile.n0, f / HALVES, B_scale);
            load_bias<MERGED>(own, tile.n0, f / HALVES, bias);
#pragma unroll
            for (int h = 0; h < 2; ++h)
              if (has_rows<AT_ONCE>(f, h))
                store_sums<MERGED>(
                    own, row0 + h * 8, tile.n0, f / HALVES, A_scale[h], B_scale, bias,
                    [&](int n, int j) { return merged_sum(sums, h, n, j); });
          });
      // NOTE: there is no next part, whose slices would arrive where the Partial is. The barrier
      // of a cluster waits for the thread that copies, too, and that has to be through.
      continue;
    }
#pragma unroll
    for (int n = 0; n < FRAGMENTS / HALVES; n += TILES) {
      if (n + TILES < FRAGMENTS / HALVES) load_columns(n + TILES);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_sums<TILES>(
            own, row0 + h * 8, tile.n0, n, A_scale[h], B_scale[n / TILES % 2], bias[n / TILES % 2],
            [&](int i, int j) {
              const int e = 2 * h + j;
              if constexpr (GLU) {
                return Halves<int32_t>{
                    dot[fragment_of(n + i, 0) * 4 + e], dot[fragment_of(n + i, 1) * 4 + e]};
              } else {
                return dot[(n + i) * 4 + e];
              }
            });
    }
  }
}
