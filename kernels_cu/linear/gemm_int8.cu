// gemm_int8 -- C = A B^T of INT8 codes, scales applied after every 128 codes along k.
//
// Idea         A slice of 128 codes is exact in int32 and has one pair of scales for each element.
//              One fma adds it to the float32 sum: C += float(dot) * (A_scale * B_scale). Each row
//              of A has a scale, and 128 rows of B share one. A slice is 128 bytes of a row, one
//              line of shared memory. So are 64 columns in 16 bits (outliers), which are further
//              steps of the loop without a scale. With few tiles, SPLITS blocks of a cluster share
//              one. Each has a part of the slices. At the end it reads the partial sums of a part
//              of the tile from the shared memory of all.
// Kept simple  One block per tile of C, or cluster. Edges of m, n and k arrive as zeros, which add
//              nothing.
// Rounding     G1 the product of both scales; G2 the fma of a slice, and the tensor core over
//              outliers; G3 bias; G4 activation; G7 times the other half; G6 residual; G5
//              store
//              (docs/MATH_REFERENCE.md)
// Mirror       cupyattn.quant.gemm_mirror, to the bit but for outliers and activation
// Bound        cupyattn.quant.gemm_error
#include "prims/config.cuh"
#include "prims/codes/gemm_mma.cuh"
#include "prims/instructions/griddepcontrol.cuh"

constexpr int B_SCALES = GLU ? 2 + STRADDLES : ceil_div(BLOCK_N, SCALE_ROWS);
constexpr int FACTORS = GLU ? B_SCALES : 1;  // of a row and the columns of a warp

struct SharedStorage {
  alignas(128) int8_t A[NUM_STAGES][BLOCK_M * SLICE];
  alignas(128) int8_t B[NUM_STAGES][BLOCK_N * SLICE];
  float A_scale[NUM_STAGES][BLOCK_M];
  float B_scale[NUM_STAGES][B_SCALES];
  // partial sums of this block, for the others
  alignas(16) float partial[SPLITS > 1 ? FRAGMENTS : 1][SPLITS > 1 ? NUM_THREADS : 1][4];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

static_assert(
    SCALE_ROWS % BLOCK_N == 0 || BLOCK_N % SCALE_ROWS == 0,
    "BLOCK_N must divide 128, or be a multiple of it");
static_assert(
    SCALE_ROWS % WARP_N == 0, "the columns of a warp must share a scale: at most 128 of them");
static_assert(!GLU || TILE_N <= SCALE_ROWS, "BLOCK_N must be at most 256 with a gated linear unit");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) CLUSTER_OF_SPLITS
    void gemm_int8(const __grid_constant__ GemmParams p) {
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

  const int first_col = n0 + col0 / HALVES + lane_id() % 4 * 2;  // of C, of this lane
  const int straddled = straddled_from(p, n0);  // column from which the second half has a new scale

  const int num_codes = part.codes, num_steps = num_codes + part.outliers;
  auto load = [&](int step) {  // into its stage; one group per step, empty past the end
    const int stage = step % NUM_STAGES;
    if (step < num_codes) {
      const int slice = part.first + step, byte = slice * SLICE;
      load_slice<BLOCK_M>(
          smem.A[stage], p.A + m0 * p.A_stride + byte, p.A_stride, p.m - m0, p.k - byte);
      load_slice<BLOCK_N, GLU>(
          smem.B[stage], p.B + n0 * p.B_stride + byte, p.B_stride, p.n - n0, p.k - byte,
          p.n * p.B_stride);
      // Scales past the end multiply zeros.
      gather_async<BLOCK_M>(smem.A_scale[stage], [&](int i) {
        return p.A_scale + min(m0 + i, p.m - 1) * p.A_scale_stride + slice;
      });
      gather_async<B_SCALES>(smem.B_scale[stage], [&](int i) {
        const int row = scale_row(p, n0, i) / SCALE_ROWS;
        return p.B_scale + row * p.B_scale_stride + slice;
      });
    } else if (OUTLIERS && step < num_steps) {
      const int byte = (step - num_codes) * SLICE, bytes = p.outliers * int(sizeof(outlier_t));
      load_slice<BLOCK_M>(
          smem.A[stage], p.A_16 + m0 * p.A_16_stride + byte, p.A_16_stride, p.m - m0, bytes - byte);
      load_slice<BLOCK_N, GLU>(
          smem.B[stage], p.B_16 + n0 * p.B_16_stride + byte, p.B_16_stride, p.n - n0, bytes - byte,
          p.n * p.B_16_stride);
    }
    cp_async_commit_group();
  };
  griddepcontrol_wait();  // A, which the launch before makes, is there
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load(i);

  float C_acc[MMA_ROWS][MMA_COLS][4] = {};
  for (int step = 0; step < num_steps; ++step) {
    const int stage = step % NUM_STAGES;
    const uint32_t A_slice = A_lane + stage * sizeof(smem.A[0]);
    const uint32_t B_slice = B_lane + stage * sizeof(smem.B[0]);
    cp_async_wait_group<NUM_STAGES - 2>();
    __syncthreads();  // this step's slices are visible, the stage filled next is no longer read
    load(step + NUM_STAGES - 1);

    if (OUTLIERS && step >= num_codes) {
      if constexpr (OUTLIERS)
        multiply_slice(
            A_slice, B_slice, [&](int r, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
              mma_m16n8k16<outlier_t>(C_acc[r][n], a, b0, b1);  // G2
            });
      continue;
    }
    int32_t dot[MMA_ROWS][MMA_COLS][4] = {};
    multiply_slice(
        A_slice, B_slice, [&](int r, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
          mma_m16n8k32_s8(dot[r][n], a, b0, b1);
        });
    const float B_scale = smem.B_scale[stage][GLU ? 0 : col0 / SCALE_ROWS];
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float A_scale = smem.A_scale[stage][row0 + r * 16 + g + h * 8];
        float factor[FACTORS] = {A_scale * B_scale};  // G1
#pragma unroll
        for (int s = 1; s < FACTORS; ++s) factor[s] = A_scale * smem.B_scale[stage][s];  // G1
#pragma unroll
        for (int n = 0; n < MMA_COLS; ++n)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            float own = factor[n % HALVES];
            if (STRADDLES && n % 2 == 1 && first_col + n / 2 * 8 + i % 2 >= straddled)
              own = factor[FACTORS - 1];
            C_acc[r][n][i] = fmaf(float(dot[r][n][i]), own, C_acc[r][n][i]);  // G2
          }
      }
  }

  const int warp_n0 = n0 + col0 / HALVES;  // first column of C of this warp
  if constexpr (SPLITS > 1) {
    constexpr int AT_ONCE = merged_at_once(MMA_COLS, FRAGMENTS);
    merge_parts<AT_ONCE>(
        smem.partial, part.rank, thread_id(),
        [&](int f, int i) {
          return fragment_element(f, i, [&](int tile, int half, int e) {
            const int n = tile * HALVES + half;
            return C_acc[n / MMA_COLS][n % MMA_COLS][e];
          });
        },
        [&](int f, const Vec<float, 4>(&sums)[AT_ONCE]) {
          const int row = m0 + row0 + f / MMA_COLS * 16 + g;
          const int tile0 = f % MMA_COLS / HALVES;
          constexpr int TILES = merged_tiles(AT_ONCE);
          ColumnPairs<TILES> bias;
          load_bias<TILES>(p, warp_n0, tile0, bias);
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (has_rows<AT_ONCE>(f, h))
              store_row<TILES>(p, row + h * 8, warp_n0, tile0, bias, [&](int n, int j) {
                return merged_sum(sums, h, n, j);
              });
        });
    return;
  }
  constexpr int TILES = MMA_COLS / HALVES;
  ColumnPairs<TILES> bias;
  load_bias<TILES>(p, warp_n0, 0, bias);
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      store_row<TILES>(p, m0 + row0 + r * 16 + g + h * 8, warp_n0, 0, bias, [&](int n, int j) {
        return of_column(C_acc[r], n, 2 * h + j);
      });
}
