// key_importance -- how much attention each key gets from some query rows: the mean of their
//                   probabilities, for every key head.
//
// Idea         Scores on tensor cores as in attn_fa_tc.cu, nothing of which reaches memory. A
//              probability needs the maximum and the sum of its row, so keys are read twice. First
//              row_statistics keeps a RowState for each row, then key_importance computes the
//              scores again and adds them up over the rows. Keys of a head are divided among
//              `splits` blocks, so that few heads fill a device, too. All rows meet each key tile.
//              A warp has separate keys, and adds up over rows in its registers. The second kernel
//              begins with the keys that the first read last, which may still lie in the L2 cache.
// Kept simple  Rows of one query head at a time: query heads of a group share no tile.
// Rounding     scores as R2 and R4 of attn_fa_tc.cu, times scale_log2 in float32; sums in float32
// Mirror       cupyattn.diffusion.pruning.key_importance on NumPy arrays, which rounds the scaled
//              rows to 16 bits
// Bound        docs/MATH_REFERENCE.md [L52]
#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct ImportanceParams {
  const void* Q;      // [batch, heads_kv * group, len_q, HEAD_DIM]
  const void* K;      // [batch, heads_kv, len_kv, HEAD_DIM]
  float* row_M;       // [batch * heads_kv, splits, chunks, BLOCK_Q], a chunk is rows of one head
  float* row_l;       // [batch * heads_kv, splits, chunks, BLOCK_Q]
  float* importance;  // [batch, heads_kv, len_kv]
  Strides Q_stride;
  Strides K_stride;
  int32_t heads_kv;
  int32_t group;      // query heads of a key head
  int32_t first_row;  // of Q; then every row_step-th
  int32_t row_step;
  int32_t rows;  // so many, of every query head
  int32_t len_kv;
  int32_t splits;      // blocks that share the keys of a head
  int32_t split_keys;  // a multiple of BLOCK_KV
  float scale_log2;    // softmax scale times log2(e)
  float share;         // 1 / (group * rows)
};

constexpr int HEAD_DIM_PAD = round_up(HEAD_DIM, 16);
constexpr int CHUNKS = HEAD_DIM_PAD / 8;       // 16-byte chunks per row
constexpr int MMA_ROWS = BLOCK_Q / 16;         // row tiles of 16, all of them to each warp
constexpr int WARP_KV = BLOCK_KV / NUM_WARPS;  // keys per warp
constexpr int MMA_KEYS = WARP_KV / 8;          // key tiles of 8 of a warp
using Scores = float[MMA_ROWS][MMA_KEYS][4];

struct SharedStorage {
  alignas(128) elem_t Q[BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t K[NUM_STAGES][BLOCK_KV * HEAD_DIM_PAD];
  float M[NUM_WARPS][BLOCK_Q];  // of a row, over the keys of a warp; [0]: over all keys
  float l[NUM_WARPS][BLOCK_Q];  // likewise; [0]: what the row's exponentials are multiplied by
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

static_assert(ELEM_IS_16_BIT, "key_importance multiplies float16 or bfloat16");
static_assert(BLOCK_Q % 16 == 0, "BLOCK_Q must be a multiple of 16: all warps have all rows");
static_assert(
    BLOCK_KV % (16 * NUM_WARPS) == 0,
    "BLOCK_KV / NUM_WARPS must be a multiple of 16, the keys of an ldmatrix");
static_assert(NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next keys arrive during these");

// The keys and the head of a block.
struct Place {
  int64_t head;         // of batch * heads_kv
  int begin, end;       // keys
  int64_t first_state;  // of row_M and row_l: of chunk 0, of this split
  __device__ __forceinline__ Place(const ImportanceParams& p, uint32_t block)
      : head(block / p.splits),
        begin(block % p.splits * p.split_keys),
        end(min(p.len_kv, begin + p.split_keys)),
        first_state(int64_t(block) * num_chunks(p) * BLOCK_Q) {}
  static __device__ __forceinline__ int head_chunks(const ImportanceParams& p) {
    return ceil_div(p.rows, BLOCK_Q);
  }
  static __device__ __forceinline__ int num_chunks(const ImportanceParams& p) {
    return p.group * head_chunks(p);
  }
  // Rows of a chunk, and its first row.
  static __device__ __forceinline__ int first_row(const ImportanceParams& p, int chunk) {
    return chunk % head_chunks(p) * BLOCK_Q;
  }
  static __device__ __forceinline__ int rows(const ImportanceParams& p, int chunk) {
    return min(BLOCK_Q, p.rows - first_row(p, chunk));
  }
};

// Products of a chunk's rows with the keys of a block, tile after tile: use(S, key). This lane has
// rows g, g + 8 of each row tile. Its keys of key tile n are key + 8 n + 2 t, + 1. The caller
// ensures that no thread reads rows and keys any more.
template <typename Use>
__device__ __forceinline__ void each_tile(
    SharedStorage& smem, const ImportanceParams& p, const Place& at, int chunk, Use use) {
  const int64_t batch = at.head / p.heads_kv, head_kv = at.head % p.heads_kv;
  const int64_t head = head_kv * p.group + chunk / Place::head_chunks(p);
  const int64_t row0 = p.first_row + int64_t(Place::first_row(p, chunk)) * p.row_step;
  const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [rows, HEAD_DIM]
                    + batch * p.Q_stride.batch + head * p.Q_stride.head + row0 * p.Q_stride.len;
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM]
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const int own_key = warp_id() * WARP_KV;
  const uint32_t Q_lane = shared_address(swizzled<CHUNKS>(smem.Q, lane_id() % 16, lane_id() / 16));
  const uint32_t K_lane = shared_address(
      swizzled<CHUNKS>(smem.K[0], own_key + lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2));

  load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
      smem.Q, Q, p.row_step * p.Q_stride.len, Place::rows(p, chunk), thread_id());
  const int num_steps = ceil_div(at.end - at.begin, BLOCK_KV);
  auto load_k = [&](int step) {  // into its stage; one group per step, empty past the end
    const int kv0 = at.begin + step * BLOCK_KV;
    if (step < num_steps)
      load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.K[step % NUM_STAGES], K + kv0 * p.K_stride.len, p.K_stride.len, p.len_kv - kv0,
          thread_id());
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_k(i);

  for (int step = 0; step < num_steps; ++step) {
    const uint32_t K_tile = K_lane + step % NUM_STAGES * sizeof(smem.K[0]);
    cp_async_wait_group<NUM_STAGES - 2>();
    __syncthreads();  // this step's keys are visible, the stage filled next is no longer read
    load_k(step + NUM_STAGES - 1);
    Scores S = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM_PAD / 16; ++k) {
      uint32_t Q_frag[MMA_ROWS][4];
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
        ldmatrix_x4(Q_frag[r], swizzled_from<CHUNKS>(Q_lane, r * 16, 2 * k));
#pragma unroll
      for (int n = 0; n < MMA_KEYS; n += 2) {
        uint32_t K_frag[4];  // two key tiles, two halves of k
        ldmatrix_x4(K_frag, swizzled_from<CHUNKS>(K_tile, n * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_m16n8k16<elem_t>(S[r][n], Q_frag[r], K_frag[0], K_frag[1]);      // R2
          mma_m16n8k16<elem_t>(S[r][n + 1], Q_frag[r], K_frag[2], K_frag[3]);  // R2
        }
      }
    }
    use(S, at.begin + step * BLOCK_KV + own_key);
  }
}

// Maximum and sum of a row from the results for parts of its keys: at(part), in their order.
template <typename At>
__device__ __forceinline__ RowState merged(int parts, At at) {
  RowState all;
  for (int i = 0; i < parts; ++i) {
    const RowState part = at(i);
    all.advance(part.M);
    all.l += part.l * ex2_approx_ftz(part.M - all.M_finite());
  }
  return all;
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void row_statistics(
    const __grid_constant__ ImportanceParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  // NOTE: chunks that read the same keys follow each other.
  const uint32_t chunks = Place::num_chunks(p);
  const int chunk = blockIdx.x % chunks;
  const Place at(p, blockIdx.x / chunks);
  const int g = lane_id() / 4, t = lane_id() % 4;

  RowState state[MMA_ROWS][2];  // rows g and g + 8 of each row tile, over keys of this warp
  each_tile(smem, p, at, chunk, [&](Scores& S, int key) {
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = NEG_INF;
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& s = S[r][n][2 * h + j];
            // NOTE: a separate rounding in both kernels, or some score would exceed its maximum.
            s = key + n * 8 + t * 2 + j < at.end ? __fmul_rn(s, p.scale_log2) : NEG_INF;
            m = fmaxf(m, s);
          }
        state[r][h].advance(shfl_max<4>(m));
        const float M = state[r][h].M_finite();
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            state[r][h].l += ex2_approx_ftz(S[r][n][2 * h + j] - M);  // R4: this lane's part of l
      }
  });
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float l = shfl_sum<4>(state[r][h].l);
      if (t == 0) {
        smem.M[warp_id()][r * 16 + h * 8 + g] = state[r][h].M;
        smem.l[warp_id()][r * 16 + h * 8 + g] = l;
      }
    }
  __syncthreads();  // every warp's maxima and sums are there before they are merged
  for (int row = thread_id(); row < BLOCK_Q; row += NUM_THREADS) {
    const RowState all = merged(NUM_WARPS, [&](int warp) {
      RowState part;
      part.M = smem.M[warp][row], part.l = smem.l[warp][row];
      return part;
    });
    const int64_t own = at.first_state + chunk * BLOCK_Q + row;
    p.row_M[own] = all.M, p.row_l[own] = all.l;
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void key_importance(
    const __grid_constant__ ImportanceParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const Place at(p, gridDim.x - 1 - blockIdx.x);
  const int chunks = Place::num_chunks(p);
  const int g = lane_id() / 4, t = lane_id() % 4;
  float* importance = p.importance + at.head * p.len_kv;              // [len_kv]
  const int64_t first_state = at.head * p.splits * chunks * BLOCK_Q;  // of the first split
  for (int chunk = 0; chunk < chunks; ++chunk) {
    __syncthreads();  // no thread works on the chunk before any more
    for (int row = thread_id(); row < BLOCK_Q; row += NUM_THREADS) {
      const RowState all = merged(p.splits, [&](int split) {
        const int64_t i = first_state + (int64_t(split) * chunks + chunk) * BLOCK_Q + row;
        RowState part;
        part.M = p.row_M[i], part.l = p.row_l[i];
        return part;
      });
      smem.M[0][row] = all.M_finite();
      smem.l[0][row] = row < Place::rows(p, chunk) ? p.share / all.l : 0.0f;
    }
    each_tile(smem, p, at, chunk, [&](Scores& S, int key) {
      float sum[MMA_KEYS][2] = {};
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float M = smem.M[0][r * 16 + h * 8 + g], factor = smem.l[0][r * 16 + h * 8 + g];
#pragma unroll
          for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float s = __fmul_rn(S[r][n][2 * h + j], p.scale_log2);
              sum[n][j] = fmaf(factor, ex2_approx_ftz(s - M), sum[n][j]);  // R4
            }
        }
#pragma unroll
      for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x = sum[n][j];
#pragma unroll
          for (int offset = 4; offset < WARP_SIZE; offset *= 2)  // over g
            x += __shfl_xor_sync(FULL_WARP, x, offset);
          const int own = key + n * 8 + t * 2 + j;
          if (g == 0 && own < at.end) importance[own] = (chunk == 0 ? 0.0f : importance[own]) + x;
        }
    });
  }
}
