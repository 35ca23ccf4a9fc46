// gemm_int8 -- Hopper form: wgmma over INT8 codes, slices by the copy engine, blocks that stay.
//
// Idea         Issue slots decide. In a slice an element of C has 128 products, 1/32 clock of an
//              SM's tensor cores, then one conversion and one fma. At full rate the tensor cores
//              take 3/4 of the issue slots. So a slice lasts 0.75/32 + 2/128 clocks an element:
//              1.25 times its products. The loop therefore contains nothing else. A separate
//              warpgroup copies slices. A warpgroup adds one chunk of columns while the next is
//              multiplied. A tile of 256 columns has four chunks of a slice, narrower tiles have
//              chunks of several slices. Scales are multiplied before the first product, because
//              running products leave shuffles no bandwidth of shared memory.
// Differs from the portable form: the tile is 128 x 256, of which a warpgroup holds 64 rows in
//              float32 and two chunks in int32. A block computes one tile after another. With
//              TAIL_SPLITS, clusters share the tiles of the last wave; a shared tile is the last
//              of its blocks.  (diff ../gemm_int8.cu gemm_int8.cu)
// Kept simple  Scales come from global memory, one pass ahead: a line of 128 bytes has the scales
//              of 32 slices. C is stored directly to its rows.
// Rounding     G1 the product of both scales; G2 the fma of a slice, and the tensor core over
//              outliers; G3 bias; G4 activation; G7 times the other half; G6 residual; G5 store
// Mirror       cupyattn.quant.gemm_mirror (exact but for outliers, activation)  Bound  gemm_error
#include "prims/config.cuh"
#include "linear/sm90/gemm_block.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma_8bit.cuh"

constexpr int CHUNK = BLOCK_N == 128 ? 128 : 64;                 // columns, of a wgmma
constexpr int CHUNKS = BLOCK_N / CHUNK;                          // of a warpgroup
constexpr int OF_CHUNK = CHUNK / 8;                              // fragments of one
constexpr int PASS = NUM_STAGES < 6 ? 1 : 256 / BLOCK_N;         // slices of a pass of the loop
constexpr int TILES = TILE_N < CHUNK ? TILE_N / 8 : OF_CHUNK;    // of 16 x 8, stored at once
constexpr int SCALES = GLU ? 2 : ceil_div(BLOCK_N, SCALE_ROWS);  // of B, of a slice
constexpr int SCALE_COLS = GLU ? TILE_N : SCALE_ROWS;            // of the tile, that share one
constexpr int FACTORS = SCALES + STRADDLES;                      // of a row, of a slice
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;

using Partial = float[FRAGMENTS][COMPUTING][4];  // partial sums of a part of k, for others

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
    BLOCK_N == 64 || BLOCK_N == SCALE_ROWS || (BLOCK_N == 2 * SCALE_ROWS && CONSUMERS < 3),
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

// A lane's scales of the slices of a part of k, read a pass ahead. Of a quad, lanes 0 and 1 have
// the scales of rows g and g + 8, lanes 2 and 3 the scales of columns.
struct SliceScales {
  const float* at;   // [slices], not read yet
  int slices;        // negative where the last pass read past the end
  float next[PASS];  // of the next pass
  __device__ __forceinline__ SliceScales(const float* first, int count) : at(first), slices(count) {
    read();
  }
  __device__ __forceinline__ void read() {
#pragma unroll
    for (int i = 0; i < PASS; ++i)
      if (i < slices) next[i] = at[i];
    at += PASS, slices -= PASS;
  }
  // The scales of the next COUNT slices: a whole pass, or one slice of the remainder.
  template <int COUNT>
  __device__ __forceinline__ void take(float (&own)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) own[i] = next[i];
    if constexpr (COUNT == PASS) {
      read();
    } else {
#pragma unroll
      for (int i = 1; i < PASS; ++i) next[i - 1] = next[i];
    }
  }
};

// C_acc [64, BLOCK_N] += A B^T of the next COUNT slices, chunk by chunk: one is added up while the
// next is multiplied. From column `straddled` of the tile on, the second half of B has
// other_scales.
// NOTE: if a chunk is in flight from one pass of a loop to the next, or across a branch, ptxas
// serialises all products (C7514).
template <int COUNT>
__device__ __forceinline__ void add_slices(
    float (&C_acc)[CHUNKS][CHUNK / 2], SharedStorage& smem, RingPosition<NUM_STAGES>& at,
    Descriptor A_ring, Descriptor B_ring, SliceScales& scales, SliceScales& other_scales,
    int straddled) {
  float own[COUNT], other[COUNT];
  scales.take(own);
  if constexpr (STRADDLES) other_scales.take(other);
  float factor[COUNT][FACTORS][2];  // of columns that share a scale, and of rows g and g + 8
#pragma unroll
  for (int s = 0; s < COUNT; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float A_scale = __shfl_sync(FULL_WARP, own[s], h, 4);
#pragma unroll
      for (int f = 0; f < SCALES; ++f)
        factor[s][f][h] = A_scale * __shfl_sync(FULL_WARP, own[s], 2 + f, 4);  // G1
      if constexpr (STRADDLES) factor[s][SCALES][h] = A_scale * other[s];      // G1
    }
  int32_t dot[2][CHUNK / 2];  // of a chunk and the next: [CHUNK / 8][4]
  Descriptor A_rows, B_rows;  // of the slice that is multiplied
  int stage, read_stage;      // its stage, and that of the slice that is added up
  auto wait_for_slice = [&] {
    stage = at.stage;
    A_rows = A_ring + stage * int(sizeof(smem.A[0]));
    B_rows = B_ring + stage * int(sizeof(smem.B[0]));
    mbarrier_wait_parity(smem.full[stage], at.parity);  // both slices have arrived
    at.advance();
  };
  wait_for_slice();
  start_dot(dot[0], A_rows, B_rows);
#pragma unroll
  for (int c = 0; c < COUNT * CHUNKS; ++c) {
    const int s = c / CHUNKS, j = c % CHUNKS;
    if (j == 0) read_stage = stage;
    if (c + 1 < COUNT * CHUNKS) {
      if (j + 1 == CHUNKS) wait_for_slice();
      start_dot(dot[(c + 1) % 2], A_rows, B_rows + (j + 1) % CHUNKS * CHUNK * SLICE);
      wgmma_wait_group<1>();  // this chunk's products are there
    } else {
      wgmma_wait_group<0>();
    }
    wgmma_use(dot[c % 2]);
    if (j == CHUNKS - 1 && lane_id() == 0) mbarrier_arrive(smem.empty[read_stage]);
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) {
      const int col = j * CHUNK + i / 4 * 8;  // of the tile, the first of a fragment's
      float scale = factor[s][col / SCALE_COLS][i / 2 % 2];
      if (STRADDLES && col >= TILE_N && col - TILE_N + lane_id() % 4 * 2 + i % 2 >= straddled)
        scale = factor[s][FACTORS - 1][i / 2 % 2];
      C_acc[j][i] = fmaf(float(dot[c % 2][i]), scale, C_acc[j][i]);  // G2
    }
  }
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
    // Two lanes of a quad read the scales of its rows g and g + 8, and two the scales of columns.
    // What lies past the end multiplies zeros.
    const int m = min(tile.m0 + warp_row + g + t % 2 * 8, p.m - 1);
    const int n = scale_row(p, tile.n0, t % SCALES);
    const float* scale =
        part.first +  // [part.codes]
        (t < 2 ? p.A_scale + m * p.A_scale_stride : p.B_scale + n / SCALE_ROWS * p.B_scale_stride);
    SliceScales scales(scale, part.codes);
    SliceScales other_scales(scale, 0);
    int straddled = 0;  // column of the tile from which the second half of B has another scale
    if constexpr (STRADDLES) {
      straddled = straddled_from(p, tile.n0) - tile.n0;
      const int row = scale_row(p, tile.n0, 2) / SCALE_ROWS;
      other_scales = {part.first + p.B_scale + row * p.B_scale_stride, part.codes};
    }

    float C_acc[CHUNKS][CHUNK / 2] = {};  // [CHUNKS][CHUNK / 8][4]
    for (int left = part.codes / PASS; left > 0; --left)
      add_slices<PASS>(C_acc, smem, at, A_ring, B_ring, scales, other_scales, straddled);
    if constexpr (PASS > 1)
#pragma unroll 1
      for (int left = part.codes % PASS; left > 0; --left)
        add_slices<1>(C_acc, smem, at, A_ring, B_ring, scales, other_scales, straddled);
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
