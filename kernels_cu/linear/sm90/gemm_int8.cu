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
//              outliers; G3 bias; G4 activation; G7 times the other half; G6 residual; G5
//              store
//              (docs/MATH_REFERENCE.md)
// Mirror       cupyattn.quant.gemm_mirror, to the bit but for outliers and activation
// Bound        cupyattn.quant.gemm_error
#include "prims/config.cuh"
#include "linear/sm90/gemm_block.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"

constexpr int CHUNK = 64;                                        // columns of a wgmma
constexpr int CHUNKS = BLOCK_N / CHUNK;                          // of a warpgroup
constexpr int OF_CHUNK = CHUNK / 8;                              // fragments of one
constexpr int TILES = TILE_N < CHUNK ? TILE_N / 8 : OF_CHUNK;    // of 16 x 8, stored at once
constexpr int SCALES = GLU ? 2 : ceil_div(BLOCK_N, SCALE_ROWS);  // of B, of a slice
constexpr int SCALE_COLS = GLU ? TILE_N : SCALE_ROWS;            // of the tile, that share one
constexpr int FACTORS = ceil_div(CHUNK, SCALE_COLS);             // of a row and a chunk
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
    // The column of a step's slices, in codes or in outliers.
    auto is_codes = [](const Part& part, int step) { return !OUTLIERS || step < part.codes; };
    auto col_of = [&](const Part& part, int step) {
      return is_codes(part, step) ? (part.first + step) * SLICE
                                  : (step - part.codes) * OUTLIERS_PER_SLICE;
    };
    auto begin = [&](int stage, const Part& part, int step) {  // with the slice of B
      mbarrier_arrive_expect_tx(smem.full[stage], sizeof(smem.A[0]) + sizeof(smem.B[0]));
      copy_B(
          p, smem.B[stage], is_codes(part, step) ? B_map : B_16_map, smem.full[stage],
          col_of(part, step), gemm_tile(p, part.tile).n0);
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
      for (int step = 0; step < part.codes + part.outliers; ++step, at.advance()) {
        if (index != blockIdx.x || step >= early) {
          mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // these slices were read
          begin(at.stage, part, step);
        }
        cp_async_bulk_tensor_4d(
            smem.A[at.stage], is_codes(part, step) ? A_map : A_16_map, smem.full[at.stage],
            col_of(part, step), m0, 0, 0);
      }
    }
    return;
  }

  // ---- the consumers
  griddepcontrol_wait();  // scales of A are there, and C, which others may have read, is free
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
    const int n = scale_row(p, tile.n0, t % SCALES);
    const float* scale =
        part.first +  // [part.codes]
        (t < 2 ? p.A_scale + m * p.A_scale_stride : p.B_scale + n / SCALE_ROWS * p.B_scale_stride);

    float C_acc[CHUNKS][CHUNK / 2] = {};  // [CHUNKS][CHUNK / 8][4]
    float next_scale = *scale;
    // Columns of C from which the second half of B has a new scale, and that scale.
    int straddled;
    const float* other_scale;  // [part.codes]
    float next_other;
    if constexpr (STRADDLES) {
      straddled = straddled_from(p, tile.n0);
      other_scale =
          part.first + p.B_scale + scale_row(p, tile.n0, 2) / SCALE_ROWS * p.B_scale_stride;
      next_other = *other_scale;
    }
    for (int step = 0; step < part.codes; ++step, at.advance()) {
      const float step_scale = next_scale;
      ++scale;
      if (step + 1 < part.codes) next_scale = *scale;
      float step_other;
      if constexpr (STRADDLES) {
        step_other = next_other;
        if (step + 1 < part.codes) next_other = *++other_scale;
      }
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
        float factor[FACTORS][2];
#pragma unroll
        for (int s = 0; s < FACTORS; ++s) {
          const int lane = 2 + (j * CHUNK + s * SCALE_COLS) / SCALE_COLS;
          const float B_scale = __shfl_sync(FULL_WARP, step_scale, lane, 4);
          factor[s][0] = A_scale[0] * B_scale, factor[s][1] = A_scale[1] * B_scale;  // G1
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
          const int col = j * CHUNK + i / 4 * 8;  // of the tile, the first of a fragment's
          float own = factor[col % CHUNK / SCALE_COLS][i / 2 % 2];
          if (STRADDLES && col >= TILE_N && tile.n0 + col - TILE_N + 2 * t + i % 2 >= straddled)
            own = A_scale[i / 2 % 2] * step_other;                     // G1
          C_acc[j][i] = fmaf(float(dot[j % 2][i]), own, C_acc[j][i]);  // G2
        }
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
      constexpr int AT_ONCE = merged_at_once(FRAGMENTS, FRAGMENTS);
      named_barrier_sync(1, COMPUTING);  // all slices were read, the Partial may come
      merge_parts<AT_ONCE>(
          reinterpret_cast<Partial&>(smem.A), part.rank, int(threadIdx.x) - WARPGROUP,
          [&](int f, int i) {
            return fragment_element(f, i, [&](int tile_of_C, int half, int e) {
              const int n = fragment_of(tile_of_C, half);
              return C_acc[n / OF_CHUNK][n % OF_CHUNK * 4 + e];
            });
          },
          [&](int f, const Vec<float, 4>(&sums)[AT_ONCE]) {
            constexpr int MERGED = merged_tiles(AT_ONCE);
            ColumnPairs<MERGED> bias;
            load_bias<MERGED>(p, tile.n0, f / HALVES, bias);
#pragma unroll
            for (int h = 0; h < 2; ++h)
              if (has_rows<AT_ONCE>(f, h))
                store_row<MERGED>(
                    p, tile.m0 + warp_row + g + h * 8, tile.n0, f / HALVES, bias,
                    [&](int n, int j) { return merged_sum(sums, h, n, j); });
          });
      // NOTE: there is no next part, whose slices would arrive where the Partial is. The barrier
      // of a cluster waits for the thread that copies, too, and that has to be through.
      continue;
    }
#pragma unroll
    for (int n = 0; n < TILE_N / 8; n += TILES) {
      ColumnPairs<TILES> bias;
      load_bias<TILES>(p, tile.n0, n, bias);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_row<TILES>(p, tile.m0 + warp_row + g + h * 8, tile.n0, n, bias, [&](int i, int j) {
          const int e = 4 * i + 2 * h + j, up = fragment_of(n, 1);
          const float sum = C_acc[n / OF_CHUNK][n % OF_CHUNK * 4 + e];
          if constexpr (GLU) {
            return Halves<float>{sum, C_acc[up / OF_CHUNK][up % OF_CHUNK * 4 + e]};
          } else {
            return sum;
          }
        });
    }
  }
}
