// gemm_int8_channel_fused -- gemm_int8_channel.cu for few rows, whose codes it makes itself.
//
// Idea         With few rows the bytes of the weight decide, and a pass that makes codes before the
//              product costs as much as half of them. A block makes the codes of its own part of
//              the rows while the first slices of the weight, which do not depend on them, arrive.
// Differs from gemm_int8_channel.cu: A is X [m, k] in 16 or 32 bits, and the codes of a block's
//              part stay in shared memory; only B has a ring. (diff gemm_int8_channel.cu
//              gemm_int8_channel_fused.cu)
// Data flow    X to registers -> largest magnitude of each row's part -> over the cluster, whose
//              blocks read each other's -> scale -> codes to shared memory -> products
// Kept simple  Every tile of columns makes the codes of all its rows, and what a warp has past HELD
//              accesses is read twice: few rows come from the L2 cache.
// Rounding     R1 scale, inverse, code (quant.cuh), as row_quant.cu; then G1 to G7
// Mirror       cupyattn.reference.act_quant.quantize_rows, then cupyattn.quant.gemm_mirror
// Bound        cupyattn.quant.gemm_error, of the same codes
#include "prims/config.cuh"
#include "prims/codes/gemm_channel_mma.cuh"
#include "prims/codes/quant.cuh"

using Access = Words<x_t, X_VEC>;

constexpr int READ = WARP_SIZE * X_VEC;  // numbers of a row that a warp reads at a time
constexpr int READS = ceil_div(CODED_SLICES * SLICE, READ);  // of a block's part of a row
constexpr int READS_OF_WARP = ceil_div(BLOCK_M * READS, NUM_WARPS);
constexpr int AT_ONCE = 4;  // accesses that are looked at together
constexpr int HELD = READS_OF_WARP < 16 ? round_up(READS_OF_WARP, AT_ONCE) : 16;  // a lane keeps

static_assert(X_VEC * sizeof(x_t) <= 16, "X_VEC numbers must fit in one 16-byte access");
static_assert(
    BLOCK_M <= 64, "BLOCK_M must be 16, 32 or 64: each block makes the codes of its rows");
static_assert(!OUTLIERS, "columns in 16 bits go with scales of blocks: OUTLIERS must be 0");

struct SharedStorage {
  alignas(128) int8_t A[CODED_SLICES][BLOCK_M * SLICE];
  alignas(128) int8_t B[NUM_STAGES][BLOCK_N * SLICE];
  alignas(16) int32_t absmax[BLOCK_M / 4][4];  // bits of magnitudes in this block's part of a row
  float scale[BLOCK_M];
  float inverse[BLOCK_M];
  alignas(16) int32_t partial[PARTIAL_TILES][PARTIAL_THREADS][4];  // see store_tile
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

// The rows of X that a block codes, and its part of their channels.
struct Rows {
  const int8_t* X;  // [rows, channels] of x_t, as bytes
  int64_t stride;   // bytes
  int rows;         // of BLOCK_M, the others are zeros
  int channels;     // from the first of the part to the last of X
  int coded;        // of the part, whole slices: those past the last are zeros

  // Row and channel of a lane's access number i, which is one of READS to each of BLOCK_M rows.
  __device__ __forceinline__ int row(int i) const { return (i * NUM_WARPS + warp_id()) / READS; }
  __device__ __forceinline__ int channel(int i) const {
    return (i * NUM_WARPS + warp_id()) % READS * READ + lane_id() * X_VEC;
  }
  __device__ __forceinline__ Access load(int i) const {
    const int row = this->row(i), channel = this->channel(i);
    if (row >= rows || channel >= min(channels, coded)) return {};
    return *reinterpret_cast<const Access*>(X + row * stride + channel * int(sizeof(x_t)));
  }
};

// Raises the largest magnitudes of rows by those of accesses number i to i + AT_ONCE - 1, of(j).
template <typename Of>
__device__ __forceinline__ void raise(SharedStorage& smem, const Rows& from, int i, Of of) {
  uint32_t absmax[AT_ONCE];
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) {
    const Access one[1] = {of(j)};
    absmax[j] = shfl_max<WARP_SIZE>(reach_of(one).bits[0]);
  }
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j)
    if (lane_id() == 0 && from.row(i + j) < from.rows)
      atomicMax(&smem.absmax[0][0] + from.row(i + j), int32_t(absmax[j]));
}

// Codes of access number i, to their slice.
__device__ __forceinline__ void store_codes(
    SharedStorage& smem, const Rows& from, int i, const int (&c)[X_VEC]) {
  const int channel = from.channel(i), byte = channel % SLICE;
  if (channel >= from.coded) return;
  int8_t* A = smem.A[channel / SLICE];  // [BLOCK_M, SLICE], swizzled
  store_s8(swizzled<CHUNKS>(A, from.row(i), byte / 16) + byte % 16, c);
}

// R1: the same of numbers.
__device__ __forceinline__ void code(
    SharedStorage& smem, const Rows& from, int i, const Access& x) {
  if (from.row(i) >= from.rows) return;
  const float inverse = smem.inverse[from.row(i)];
  int c[X_VEC];
#pragma unroll
  for (int j = 0; j < X_VEC; ++j) c[j] = code_s8(x.element(j), inverse);
  store_codes(smem, from, i, c);
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) CLUSTER_OF_SPLITS
    void gemm_int8_channel_fused(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const Part part = part_of(p, blockIdx.x);
  const GemmTile tile = gemm_tile(p, part.tile);
  const int m0 = tile.m0, n0 = tile.n0;
  const int col0 = warp_id() * WARP_N;  // first column of this warp in the block
  const int channel0 = part.first * SLICE;
  const Rows from = {
      p.A + m0 * p.A_stride + channel0 * int(sizeof(x_t)), p.A_stride, min(p.m - m0, BLOCK_M),
      p.k - channel0, part.codes * SLICE};
  // Where this lane points the first ldmatrix of each operand, as in attn_fa_tc.cu.
  const uint32_t A_lane =
      shared_address(swizzled<CHUNKS>(smem.A[0], lane_id() % 16, lane_id() / 16));
  const uint32_t B_lane = shared_address(
      swizzled<CHUNKS>(smem.B[0], col0 + lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2));

  // X before the weight, which takes longer: neither waits for the other.
  Access x[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) x[i] = from.load(i);

  auto load = [&](int step) {  // B into its stage; one group per step, empty past the end
    if (step < part.codes) {
      const int byte = (part.first + step) * SLICE;
      load_slice<BLOCK_N, GLU>(
          smem.B[step % NUM_STAGES], p.B + n0 * p.B_stride + byte, p.B_stride, p.n - n0, p.k - byte,
          p.n * p.B_stride);
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load(i);

  if (thread_id() < BLOCK_M) (&smem.absmax[0][0])[thread_id()] = 0;
  __syncthreads();  // zeros are visible before a maximum is raised
#pragma unroll 1
  for (int i = 0; i < READS_OF_WARP; ++i)  // zeros of the rows past the last
    if (from.row(i) >= from.rows && from.row(i) < BLOCK_M) store_codes(smem, from, i, {});
#pragma unroll
  for (int i = 0; i < HELD; ++i) x[i].use_from_here();
#pragma unroll
  for (int i = 0; i < HELD; i += AT_ONCE) {
    if (from.row(i) >= from.rows) break;  // as are those of all accesses that follow
    raise(smem, from, i, [&](int j) { return x[i + j]; });
  }
  for (int i = HELD; i < READS_OF_WARP && from.row(i) < from.rows; i += AT_ONCE) {
    Access y[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) y[j] = from.load(i + j);
    raise(smem, from, i, [&](int j) { return y[j]; });
  }

  if constexpr (SPLITS > 1)
    cluster_sync();  // the maxima of all parts are visible
  else
    __syncthreads();  // all maxima are visible
  if (thread_id() < BLOCK_M / 4) {
    Vec<int32_t, 4> absmax = *reinterpret_cast<Vec<int32_t, 4>*>(smem.absmax[thread_id()]);
    if constexpr (SPLITS > 1) {
#pragma unroll
      for (int other = 0; other < SPLITS; ++other) {
        const auto found = load_from_block(smem.absmax[thread_id()], other);
#pragma unroll
        for (int j = 0; j < 4; ++j) absmax.v[j] = max(absmax.v[j], found.v[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Scale scale = scale_of_absmax(absmax.v[j]);  // R1
      smem.scale[thread_id() * 4 + j] = scale.scale;
      smem.inverse[thread_id() * 4 + j] = scale.inverse;
    }
  }
  __syncthreads();  // scales are visible
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (from.row(i) >= from.rows) break;
    code(smem, from, i, x[i]);
  }
  for (int i = HELD; i < READS_OF_WARP && from.row(i) < from.rows; i += AT_ONCE) {
    Access y[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) y[j] = from.load(i + j);
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) code(smem, from, i + j, y[j]);
  }

  int32_t dot[MMA_ROWS][MMA_COLS][4] = {};
  for (int step = 0; step < part.codes; ++step) {
    cp_async_wait_group<NUM_STAGES - 2>();
    // This step's slice of B is visible, and before the first all codes are; the stage filled next
    // is no longer read.
    __syncthreads();
    load(step + NUM_STAGES - 1);
    multiply_slice(
        A_lane + step * sizeof(smem.A[0]), B_lane + step % NUM_STAGES * sizeof(smem.B[0]),
        [&](int r, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
          mma_m16n8k32_s8(dot[r][n], a, b0, b1);
        });
  }

  store_tile(p, dot, smem.partial, part.rank, m0, n0 + col0 / HALVES, [&](int row) {
    return smem.scale[row - m0];
  });
}
