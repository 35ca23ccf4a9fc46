// gemm_int8_channel -- C = A B^T of INT8 codes with one scale for each row of A and each row of B.
//
// Idea         C[m, n] = A_scale[m] B_scale[n] sum over k of A[m, k] B[n, k]. The sum is int32 to
//              the end, so the loop holds nothing but copies and mma: no conversion, no fma.
// Differs from gemm_int8.cu, which converts the sum of every 128 codes to float32 by two scales.
//              Here only the store applies scales. If SPLITS blocks share a tile, they add int32
//              sums, which are the same in any order. (diff gemm_int8.cu gemm_int8_channel.cu)
// Kept simple  One block per tile of C, or cluster. Edges of m, n and k arrive as zeros, which add
//              nothing. At most 131,071 codes along k, for which int32 holds every sum of products.
// Rounding     G1 the product of both scales; G2 the sum to float32, and times G1; G3 bias; G4
//              activation; G7 times the other half; G6 residual; G5 store (docs/MATH_REFERENCE.md)
// Mirror       cupyattn.quant.gemm_mirror, to the bit but for activation
// Bound        cupyattn.quant.gemm_error
#include "prims/config.cuh"
#include "prims/codes/gemm_channel.cuh"
#include "prims/codes/gemm_mma.cuh"
#include "prims/instructions/griddepcontrol.cuh"

struct SharedStorage {
  alignas(128) int8_t A[NUM_STAGES][BLOCK_M * SLICE];
  alignas(128) int8_t B[NUM_STAGES][BLOCK_N * SLICE];
  // partial sums of this block's part of k, for the others
  alignas(16) int32_t partial[SPLITS > 1 ? FRAGMENTS : 1][SPLITS > 1 ? NUM_THREADS : 1][4];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

static_assert(!OUTLIERS, "columns in 16 bits go with scales of blocks: OUTLIERS must be 0");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) CLUSTER_OF_SPLITS
    void gemm_int8_channel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const Part part = part_of(p, blockIdx.x);
  const GemmTile tile = gemm_tile(p, part.tile);
  const int m0 = tile.m0, n0 = tile.n0;
  const int row0 = warp_id() % WARPS_M * WARP_M;  // first row and column of this warp in the block
  const int col0 = warp_id() / WARPS_M * WARP_N;
  const int g = lane_id() / 4;  // fragment coordinate, see mma.cuh
  // Where this lane points the first ldmatrix of each operand, as in attn_fa_tc.cu.
  const uint32_t A_lane =
      shared_address(swizzled<CHUNKS>(smem.A[0], row0 + lane_id() % 16, lane_id() / 16));
  const uint32_t B_lane = shared_address(
      swizzled<CHUNKS>(smem.B[0], col0 + lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2));

  // Slices come into the stage of their step; one group per step, empty past the end.
  auto load_B = [&](int step) {
    if (step >= part.codes) return;
    const int byte = (part.first + step) * SLICE;
    load_slice<BLOCK_N, GLU>(
        smem.B[step % NUM_STAGES], p.B + n0 * p.B_stride + byte, p.B_stride, p.n - n0, p.k - byte,
        p.n * p.B_stride);
  };
  auto load_A = [&](int step) {
    if (step < part.codes) {
      const int byte = (part.first + step) * SLICE;
      load_slice<BLOCK_M>(
          smem.A[step % NUM_STAGES], p.A + m0 * p.A_stride + byte, p.A_stride, p.m - m0,
          p.k - byte);
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_B(i);
  griddepcontrol_wait();  // A, which the launch before makes, is there
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_A(i);

  int32_t dot[MMA_ROWS][MMA_COLS][4] = {};
  for (int step = 0; step < part.codes; ++step) {
    const int stage = step % NUM_STAGES;
    cp_async_wait_group<NUM_STAGES - 2>();
    __syncthreads();  // this step's slices are visible, the stage filled next is no longer read
    load_B(step + NUM_STAGES - 1);
    load_A(step + NUM_STAGES - 1);
    multiply_slice(
        A_lane + stage * sizeof(smem.A[0]), B_lane + stage * sizeof(smem.B[0]),
        [&](int r, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
          mma_m16n8k32_s8(dot[r][n], a, b0, b1);
        });
  }

  const int warp_n0 = n0 + col0 / HALVES;  // first column of C of this warp
  if constexpr (SPLITS > 1) {
    constexpr int AT_ONCE = merged_at_once(MMA_COLS, FRAGMENTS);
    merge_parts<AT_ONCE>(
        smem.partial, part.rank, thread_id(),
        [&](int f, int i) {
          return fragment_element(f, i, [&](int tile, int half, int e) {
            const int n = tile * HALVES + half;
            return dot[n / MMA_COLS][n % MMA_COLS][e];
          });
        },
        [&](int f, const Vec<int32_t, 4>(&sums)[AT_ONCE]) {
          const int row = m0 + row0 + f / MMA_COLS * 16 + g;
          const int tile0 = f % MMA_COLS / HALVES;
          constexpr int TILES = merged_tiles(AT_ONCE);
          ColumnPairs<TILES> B_scale, bias;
          load_column_scales<TILES>(p, warp_n0, tile0, B_scale);
          load_bias<TILES>(p, warp_n0, tile0, bias);
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (has_rows<AT_ONCE>(f, h))
              store_sums<TILES>(
                  p, row + h * 8, warp_n0, tile0, row_scale(p, row + h * 8), B_scale, bias,
                  [&](int n, int j) { return merged_sum(sums, h, n, j); });
        });
    return;
  }
  constexpr int TILES = MMA_COLS / HALVES;
  ColumnPairs<TILES> B_scale, bias;
  load_column_scales<TILES>(p, warp_n0, 0, B_scale), load_bias<TILES>(p, warp_n0, 0, bias);
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m0 + row0 + r * 16 + g + h * 8;
      store_sums<TILES>(p, row, warp_n0, 0, row_scale(p, row), B_scale, bias, [&](int n, int j) {
        return of_column(dot[r], n, 2 * h + j);
      });
    }
}
