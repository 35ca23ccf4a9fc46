// gemm_int8 -- Hopper form: wgmma over INT8 codes, slices by the copy engine, blocks that stay.
//
// Idea         Issue slots again. An element of C has 128 products in a slice, 1/32 clock of the
//              tensor cores of an SM, and then costs one conversion and one fma. Tensor cores at
//              full rate take 3/4 of the issue slots, so that a slice lasts 0.75/32 + 2/128 clocks
//              an element, 1.25 times its products: nothing else may stand in the loop. Scales are
//              one product for a row and a chunk of columns; slices arrive by a warpgroup of its
//              own; and a warpgroup adds up a chunk of 64 columns while its next one is multiplied.
// Differs from the portable form: the tile is 128 x 256, of which a warpgroup holds 64 rows in
//              float32 and two chunks in int32; a block takes one tile after the other. With
//              TAIL_SPLITS it is the tiles of the last wave that clusters share. A tile that is
//              shared is the last of its blocks.
//              (diff ../gemm_int8.cu gemm_int8.cu)
// Tried        Chunks of 128 columns, at which two warpgroups took turns: 0.90 to 0.92 (0.97 at
//              16,384), since nobody adds up while the last products of a chunk are waited for.
//              Without a conversion and a sum at all 1.4, without B's slices 1.01: no bandwidth
//              binds. Slices of B for both blocks of a pair at once (multicast): 0.7 to 0.9, a pair
//              runs in step. (experiments/results/NOTES.md)
// Kept simple  Scales are read from global memory, one slice ahead: a line of 128 bytes has those
//              of 32 slices. C goes to its rows at once.
// Rounding     G1 the product of both scales; G2 the fma of a slice, and the tensor core over
//              outliers; G3 bias; G4 activation; G6 residual; G5 store
//              (docs/MATH_REFERENCE.md)
// Mirror       cupyattn.quant.gemm_mirror, to the bit but for outliers and activation
// Bound        cupyattn.quant.gemm_error
#include "prims/config.cuh"
#include "linear/sm90/gemm_block.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"

constexpr int CHUNK = 64;                              // columns of a wgmma
constexpr int CHUNKS = BLOCK_N / CHUNK;                // of a warpgroup
constexpr int SCALES = ceil_div(BLOCK_N, SCALE_ROWS);  // of B, of a slice
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;

using Partial = float[FRAGMENTS][COMPUTING][4];  // what a part of k comes to, for the other blocks

struct SharedStorage {
  alignas(1024) int8_t A[NUM_STAGES][BLOCK_M * SLICE];  // in the end the Partial, where one is made
  alignas(1024) int8_t B[NUM_STAGES][BLOCK_N * SLICE];
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base

static_assert(
    CONSUMERS >= 1 && CONSUMERS <= 3 && CONSUMERS * 64 == BLOCK_M,
    "BLOCK_M must be 64, 128 or 192: one to three warpgroups of 64 rows");
static_assert(
    BLOCK_N == CHUNK || BLOCK_N == SCALE_ROWS || (BLOCK_N == 2 * SCALE_ROWS && CONSUMERS < 3),
    "BLOCK_N must be 64, 128 or, up to BLOCK_M 128, 256: what the registers hold");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP,
    "NUM_WARPS must be 4 for every 64 rows of BLOCK_M and 4 that copy");
static_assert(
    CLUSTER == 1 || sizeof(Partial) <= NUM_STAGES * (BLOCK_M + BLOCK_N) * SLICE,
    "NUM_STAGES of slices must have room for a tile in float32, where blocks share one");

// dot [64, CHUNK] = A B^T of a slice of codes, exact, in the background.
__device__ __forceinline__ void start_dot(
    int32_t (&dot)[CHUNK / 2], Descriptor A_rows, Descriptor B_rows) {
  wgmma_use(dot);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < SLICE; k += 32) WgmmaS8<CHUNK>::ss(dot, A_rows + k, B_rows + k, k > 0);
  wgmma_commit_group();
}

// C [64, CHUNK] += A B^T of a slice of outliers, in the background.
__device__ __forceinline__ void start_outliers(
    float (&C_acc)[CHUNK / 2], Descriptor A_rows, Descriptor B_rows) {
  wgmma_use(C_acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < SLICE; k += 32)
    Wgmma<outlier_t, CHUNK>::ss(C_acc, A_rows + k, B_rows + k, true);  // G2
  wgmma_commit_group();
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) CLUSTER_OF_SPLITS void gemm_int8(
    const __grid_constant__ GemmParams p, const __grid_constant__ TensorMap A_map,
    const __grid_constant__ TensorMap B_map, const __grid_constant__ TensorMap A_16_map,
    const __grid_constant__ TensorMap B_16_map) {
  extern __shared__ unsigned char shared_bytes[];
  auto& smem = aligned_storage<SharedStorage>(shared_bytes);
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);

  init_ring(smem.full, smem.empty);
  RingPosition<NUM_STAGES> at;
  if (warpgroup == 0) {  // ---- the producer, one thread
    if constexpr (CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    for (int index = blockIdx.x; index < num_parts(p); index += gridDim.x) {
      const Part part = part_of(p, index);
      const GemmTile tile = gemm_tile(p, part.tile);
      for (int step = 0; step < part.codes + part.outliers; ++step, at.advance()) {
        mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // these slices were read
        Mbarrier& full = smem.full[at.stage];
        mbarrier_arrive_expect_tx(full, sizeof(smem.A[0]) + sizeof(smem.B[0]));
        const bool codes = !OUTLIERS || step < part.codes;
        const int col =
            codes ? (part.first + step) * SLICE : (step - part.codes) * OUTLIERS_PER_SLICE;
        cp_async_bulk_tensor_4d(
            smem.A[at.stage], codes ? A_map : A_16_map, full, col, tile.m0, 0, 0);
        cp_async_bulk_tensor_4d(
            smem.B[at.stage], codes ? B_map : B_16_map, full, col, tile.n0, 0, 0);
      }
    }
    return;
  }

  // ---- the consumers
  if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int warp_row = (warpgroup - 1) * 64 + warp_id() % 4 * 16;  // this warp's first in the tile
  const int g = lane_id() / 4, t = lane_id() % 4;                  // fragment coordinates
  const Descriptor A_ring = uniform(descriptor_k_major(&smem.A[0][(warpgroup - 1) * 64 * SLICE]));
  const Descriptor B_ring = uniform(descriptor_k_major(smem.B[0]));

  for (int index = blockIdx.x; index < num_parts(p); index += gridDim.x) {
    const Part part = part_of(p, index);
    const GemmTile tile = gemm_tile(p, part.tile);
    // Of a quad two lanes read the scales of its rows g and g + 8, and two those of columns. What
    // lies past the end multiplies zeros.
    const int m = min(tile.m0 + warp_row + g + t % 2 * 8, p.m - 1);
    const int n = min(tile.n0 + t % SCALES * SCALE_ROWS, p.n - 1);
    const float* scale =
        part.first +  // [part.codes]
        (t < 2 ? p.A_scale + m * p.A_scale_stride : p.B_scale + n / SCALE_ROWS * p.B_scale_stride);

    float C_acc[CHUNKS][CHUNK / 2] = {};  // [CHUNKS][CHUNK / 8][4]
    float next_scale = *scale;
    for (int step = 0; step < part.codes; ++step, at.advance()) {
      const float step_scale = next_scale;
      ++scale;
      if (step + 1 < part.codes) next_scale = *scale;
      float A_scale[2];  // of rows g and g + 8
#pragma unroll
      for (int h = 0; h < 2; ++h) A_scale[h] = __shfl_sync(FULL_WARP, step_scale, h, 4);
      const Descriptor A_rows = A_ring + at.stage * int(sizeof(smem.A[0]));
      const Descriptor B_rows = B_ring + at.stage * int(sizeof(smem.B[0]));
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // both slices have arrived
      int32_t dot[2][CHUNK / 2];  // of a chunk and the next: [CHUNK / 8][4]
      start_dot(dot[0], A_rows, B_rows);
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        if (j + 1 < CHUNKS) {
          start_dot(dot[(j + 1) % 2], A_rows, B_rows + (j + 1) * CHUNK * SLICE);
          wgmma_wait_group<1>();  // this chunk's products are there
        } else {
          wgmma_wait_group<0>();
        }
        wgmma_use(dot[j % 2]);
        if (j == CHUNKS - 1 && lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
        const float B_scale = __shfl_sync(FULL_WARP, step_scale, 2 + j * CHUNK / SCALE_ROWS, 4);
        const float factor[2] = {A_scale[0] * B_scale, A_scale[1] * B_scale};  // G1
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i)
          C_acc[j][i] = fmaf(float(dot[j % 2][i]), factor[i / 2 % 2], C_acc[j][i]);  // G2
      }
    }
    if constexpr (OUTLIERS)
      for (int step = 0; step < part.outliers; ++step, at.advance()) {
        const Descriptor A_rows = A_ring + at.stage * int(sizeof(smem.A[0]));
        const Descriptor B_rows = B_ring + at.stage * int(sizeof(smem.B[0]));
        mbarrier_wait_parity(smem.full[at.stage], at.parity);  // both slices have arrived
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j)
          start_outliers(C_acc[j], A_rows, B_rows + j * CHUNK * SLICE);
        wgmma_wait_group<0>();
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) wgmma_use(C_acc[j]);
        if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
      }

    if (is_shared(p, index)) {
      constexpr int OF_CHUNK = CHUNK / 8, AT_ONCE = merged_at_once(FRAGMENTS, FRAGMENTS);
      named_barrier_sync(1, COMPUTING);  // all slices were read, the Partial may come
      merge_parts<AT_ONCE>(
          reinterpret_cast<Partial&>(smem.A), part.rank, int(threadIdx.x) - WARPGROUP,
          [&](int f, int i) { return C_acc[f / OF_CHUNK][f % OF_CHUNK * 4 + i]; },
          [&](int f, const Vec<float, 4>(&sums)[AT_ONCE]) {
            const int row = tile.m0 + warp_row + g, col = tile.n0 + f * 8;
#pragma unroll
            for (int h = 0; h < 2; ++h)
              store_row<AT_ONCE>(
                  p, row + h * 8, col, [&](int n, int j) { return sums[n].v[2 * h + j]; });
          });
      // NOTE: there is no next part, whose slices would arrive where the Partial is. The barrier
      // of a cluster waits for the thread that copies, too, and that has to be through.
      continue;
    }
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_row<CHUNK / 8>(
            p, tile.m0 + warp_row + g + h * 8, tile.n0 + j * CHUNK,
            [&](int n, int i) { return C_acc[j][4 * n + 2 * h + i]; });
  }
}
