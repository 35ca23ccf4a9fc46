// attn_fa_tc -- the split form of fa_tc: a few query rows against many keys.
//
// Idea         Few query rows mean little computation and many reads. A slice of the keys belongs
//              to as few warps as can hold the rows, one for up to 32 rows. They keep its maximum,
//              sum and output. A block merges its slices in shared memory. If several blocks share
//              the keys, a second kernel, merge_splits, merges their results.
// Differs from ../attn_fa_tc.cu: a tile has the rows of all query heads that share a key head. So K
//              and V are read once for all. Q stays in registers. Only warps that share a slice
//              synchronise; a single warp synchronises its lanes. M is the largest score so far.
// Kept simple  Slices depend only on sizes: the same call gives the same bits on every run. Rows
//              past the end are computed with the others, and not stored.
// Rounding     R2 tensor core over HEAD_DIM, R4 exp2, R5 P to 16 bits, R6 alpha, l and the tensor
//              core over keys, then the sums over slices and over blocks, R7 times 1/l, store
//              (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/instructions/warp.cuh"

constexpr int HEAD_DIM_PAD = round_up(HEAD_DIM, 16);
constexpr int CHUNKS = HEAD_DIM_PAD / 8;  // 16-byte chunks per row
// Of Q and O, 64 columns of 16 rows take 48 registers of every lane. cupyattn/kernels/splits.py
// knows, too.
constexpr int MOST_WARP_ROWS = HEAD_DIM_PAD <= 128 ? 32 : 16;
constexpr int WARP_ROWS = BLOCK_Q < MOST_WARP_ROWS ? BLOCK_Q : MOST_WARP_ROWS;
constexpr int ROW_TILES = WARP_ROWS / 16;       // of a warp, each the rows of an mma
constexpr int ROW_WARPS = BLOCK_Q / WARP_ROWS;  // that share a slice
constexpr int BLOCK_SLICES = NUM_WARPS / ROW_WARPS;
constexpr int SLICE_THREADS = ROW_WARPS * WARP_SIZE;
constexpr int MMA_KEYS = BLOCK_KV / 8;      // key tiles of 8 per step
constexpr int MMA_COLS = HEAD_DIM_PAD / 8;  // column tiles of 8 of O

constexpr int PART_LD = HEAD_DIM_PAD + 8;  // rows of a fragment are stored to different banks

union SharedStorage {  // one, then the other
  struct {             // of each slice: its own
    alignas(128) elem_t K[BLOCK_SLICES][NUM_STAGES][BLOCK_KV * HEAD_DIM_PAD];
    alignas(128) elem_t V[BLOCK_SLICES][NUM_STAGES][BLOCK_KV * HEAD_DIM_PAD];
  } stages;
  struct {  // result of each slice
    alignas(128) float O[BLOCK_SLICES][BLOCK_Q * PART_LD];
    float M[BLOCK_SLICES][BLOCK_Q];
    float l[BLOCK_SLICES][BLOCK_Q];
  } parts;
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

static_assert(ELEM_IS_16_BIT, "fa_tc multiplies float16 or bfloat16");
static_assert(
    !NATURAL_SCORES && !MASK && !BLOCK_MASK && !VARLEN,
    "the split form takes no softcap, mask, bias, block mask or packed sequences");
static_assert(WARP_ROWS % 16 == 0, "BLOCK_Q must be a multiple of 16, the rows of an mma");
static_assert(
    BLOCK_Q % WARP_ROWS == 0,
    "BLOCK_Q past the rows of a warp (32, beyond HEAD_DIM 128 16) must be a multiple of them");
static_assert(
    NUM_WARPS % ROW_WARPS == 0, "NUM_WARPS must be a multiple of the warps that BLOCK_Q rows take");
static_assert(
    ROW_WARPS == 1 || BLOCK_SLICES <= 15, "slices of several warps take one of 15 barriers each");
static_assert(BLOCK_KV % 16 == 0, "BLOCK_KV must be a multiple of 16, the depth of an mma");
static_assert(
    NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next tile arrives during this one");

// thread_id() for the loop and the code after it. With 32 rows per warp it is read again, because
// no registers are left for values that depend on it.
__device__ __forceinline__ int thread_in_loop() {
  return WARP_ROWS > 16 ? thread_id_anew() : thread_id();
}

// The first row of a tile in a thread's fragment; its other rows are multiples of 8 further.
__device__ __forceinline__ int own_row(uint32_t thread) {
  return thread % SLICE_THREADS / WARP_SIZE * WARP_ROWS + thread % WARP_SIZE / 4;
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_tc(
    const __grid_constant__ AttnParams p, const __grid_constant__ SplitParams split) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int group = p.heads / p.heads_kv;               // query heads that share a key head
  const int row_tiles = ceil_div(split.rows, BLOCK_Q);  // of their rows, one head behind the other
  const int part = blockIdx.x / row_tiles % split.parts;
  const int own_slice = warp_id() / ROW_WARPS;  // of this block's, which may have no keys
  const int row0 = blockIdx.x % row_tiles * BLOCK_Q;
  const int batch_head_kv = blockIdx.x / row_tiles / split.parts;
  const int batch = batch_head_kv / p.heads_kv, head_kv = batch_head_kv % p.heads_kv;
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM]
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM]
                    + batch * p.V_stride.batch + head_kv * p.V_stride.head;
  const int64_t slice_begin =
      split.first_key + int64_t(part * BLOCK_SLICES + own_slice) * split.slice_keys;
  const int first_key = min(int64_t(split.end_key), slice_begin);
  const int end_key = min(int64_t(split.end_key), slice_begin + split.slice_keys);
  const int t = lane_id() % 4;  // fragment coordinate, see mma.cuh
  // Addresses of a lane's rows for ldmatrix in a tile of K, and in a tile of V.
  auto K_lane = [](elem_t* tile) {
    const uint32_t lane = uint32_t(thread_in_loop()) % WARP_SIZE;
    return shared_address(swizzled<CHUNKS>(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2));
  };
  auto V_lane = [](elem_t* tile) {
    const uint32_t lane = uint32_t(thread_in_loop()) % WARP_SIZE;
    return shared_address(swizzled<CHUNKS>(tile, lane % 16, lane / 16));
  };

  // S1 load Q: into fragments, straight from memory; rows past the end are the last one again
  uint32_t Q_frag[ROW_TILES][HEAD_DIM_PAD / 16][4];
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(row0 + own_row(thread_id()) + r * 16 + h * 8, split.rows - 1);
      const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [HEAD_DIM]
                        + batch * p.Q_stride.batch +
                        (head_kv * group + row / p.len_q) * p.Q_stride.head +
                        row % p.len_q * p.Q_stride.len;
#pragma unroll
      for (int k = 0; k < HEAD_DIM_PAD / 16; ++k) {
        Q_frag[r][k][h] = load_pair(Q, k * 16 + t * 2);
        Q_frag[r][k][h + 2] = load_pair(Q, k * 16 + 8 + t * 2);
      }
    }
  auto load_kv = [&](int step, int left) {  // into its stage; one group per step
    const int kv0 = end_key - left, stage = step % NUM_STAGES;
    if (left > 0) {  // the group is empty past the end
      load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC, SLICE_THREADS>(
          smem.stages.K[own_slice][stage], K + kv0 * p.K_stride.len, p.K_stride.len, left,
          uint32_t(thread_in_loop()) % SLICE_THREADS);
      load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC, SLICE_THREADS>(
          smem.stages.V[own_slice][stage], V + kv0 * p.V_stride.len, p.V_stride.len, left,
          uint32_t(thread_in_loop()) % SLICE_THREADS);
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_kv(i, end_key - first_key - i * BLOCK_KV);

  RowState state[ROW_TILES][2];  // rows g and g + 8 of each tile
  float O_acc[ROW_TILES][MMA_COLS][4] = {};
  int step = 0;
  for (int left = end_key - first_key; left > 0; left -= BLOCK_KV, ++step) {
    const int kv0 = end_key - left;
    cp_async_wait_group<NUM_STAGES - 2>();
    // This step's tiles are visible, the stage filled next is no longer read.
    if constexpr (ROW_WARPS == 1)
      __syncwarp();
    else
      named_barrier_sync(1 + own_slice, SLICE_THREADS);
    // S2 load K, V
    load_kv(step + NUM_STAGES - 1, left - (NUM_STAGES - 1) * BLOCK_KV);

    // S3 scores
    const uint32_t K_tile = K_lane(smem.stages.K[own_slice][step % NUM_STAGES]);
    float S_acc[ROW_TILES][MMA_KEYS][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM_PAD / 16; ++k)
#pragma unroll
      for (int n = 0; n < MMA_KEYS; n += 2) {
        uint32_t K_frag[4];  // two key tiles, two halves of k
        ldmatrix_x4(K_frag, swizzled_from<CHUNKS>(K_tile, n * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          mma_m16n8k16<elem_t>(S_acc[r][n], Q_frag[r][k], K_frag[0], K_frag[1]);      // R2
          mma_m16n8k16<elem_t>(S_acc[r][n + 1], Q_frag[r][k], K_frag[2], K_frag[3]);  // R2
        }
      }

    // S4 softmax
    const bool cut = kv0 < kv_unmasked_begin(p, 0, p.len_q) ||
                     kv0 + BLOCK_KV > min(end_key, kv_unmasked_end(p, 0));
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if (cut) {
        const uint32_t thread = thread_in_loop();
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = kv0 + n * 8 + thread % 4 * 2 + i % 2;
            const int row = (row0 + own_row(thread) + r * 16 + i / 2 * 8) % p.len_q;
            if (key >= end_key || !admitted(p, row, key)) S_acc[r][n][i] = NEG_INF;
          }
      }
      float to_log2 = p.scale_log2, M[2] = {state[r][0].M, state[r][1].M};
      float m[2];  // the largest score that this lane holds of row g, then of row g + 8
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        m[h] = NEG_INF;
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
          m[h] = fmaxf(m[h], fmaxf(S_acc[r][n][2 * h], S_acc[r][n][2 * h + 1]));
      }
      if (__any_sync(FULL_WARP, rises_or_large(state[r], m, to_log2))) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float alpha =
              state[r][h].advance(row_maximum_of_any_size(shfl_max<4>(m[h]), to_log2));
#pragma unroll
          for (int c = 0; c < MMA_COLS; ++c) {
            O_acc[r][c][2 * h] *= alpha;      // R6
            O_acc[r][c][2 * h + 1] *= alpha;  // R6
          }
        }
        subtract_large<4 * MMA_KEYS>(state[r], S_acc[r][0], to_log2, M);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            S_acc[r][n][i] = ex2_approx_ftz(exponent(S_acc[r][n][i], to_log2, -M[h]));  // R4
            state[r][h].l += S_acc[r][n][i];  // R6: this lane's part of l
          }
      }
    }

    // S5 output
    const uint32_t V_tile = V_lane(smem.stages.V[own_slice][step % NUM_STAGES]);
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; ++k) {
      uint32_t P_frag[ROW_TILES][4];  // two key tiles of S are one k step of P
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          P_frag[r][i] = pack_rn<elem_t>(
              S_acc[r][2 * k + i / 2][i % 2 * 2], S_acc[r][2 * k + i / 2][i % 2 * 2 + 1]);  // R5
#pragma unroll
      for (int c = 0; c < MMA_COLS; c += 2) {
        uint32_t V_frag[4];  // two column tiles, two halves of k
        ldmatrix_x4_trans(V_frag, swizzled_from<CHUNKS>(V_tile, k * 16, c));
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          mma_m16n8k16<elem_t>(O_acc[r][c], P_frag[r], V_frag[0], V_frag[1]);      // R6
          mma_m16n8k16<elem_t>(O_acc[r][c + 1], P_frag[r], V_frag[2], V_frag[3]);  // R6
        }
      }
    }
  }

  // S6 merge: the slices of this block
  cp_async_wait_group<0>();
  __syncthreads();  // stages are neither written nor read any more
  const uint32_t thread = thread_in_loop();
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state[r][h].l = shfl_sum<4>(state[r][h].l);  // R6
      const int row = own_row(thread) + r * 16 + h * 8;
      if (thread % 4 == 0) {
        smem.parts.M[own_slice][row] = state[r][h].M;
        smem.parts.l[own_slice][row] = state[r][h].l;
      }
      float* O_row = smem.parts.O[own_slice] + row * PART_LD;  // [HEAD_DIM_PAD]
#pragma unroll
      for (int c = 0; c < MMA_COLS; ++c)
        *reinterpret_cast<float2*>(O_row + c * 8 + thread % 4 * 2) =
            make_float2(O_acc[r][c][2 * h], O_acc[r][c][2 * h + 1]);
    }
  __syncthreads();  // the results of all slices are visible

  // S7 store: the result, or a part of it for merge_splits
  for (int r = warp_id(); r < min(BLOCK_Q, split.rows - row0); r += NUM_WARPS) {
    RowState whole;
#pragma unroll
    for (int s = 0; s < BLOCK_SLICES; ++s) whole.M = fmaxf(whole.M, smem.parts.M[s][r]);
    float weight[BLOCK_SLICES];
#pragma unroll
    for (int s = 0; s < BLOCK_SLICES; ++s) {
      weight[s] = ex2_approx_ftz(smem.parts.M[s][r] - whole.M_finite());  // R4
      whole.l = fmaf(weight[s], smem.parts.l[s][r], whole.l);             // R6
    }
    const float inverse_l = whole.inverse_l();
    // Rows of batch, heads, len_q in one count. The rows of a part follow the rows of the part
    // before.
    const int64_t row = int64_t(batch_head_kv) * split.rows + row0 + r;
    const int64_t at = part * (int64_t(p.batch) * p.heads * p.len_q) + row;
    elem_t* O = static_cast<elem_t*>(p.O) + output_row(p, row);  // [HEAD_DIM]
    for (int d = lane_id(); d < HEAD_DIM; d += WARP_SIZE) {
      float o = 0.0f;
#pragma unroll
      for (int s = 0; s < BLOCK_SLICES; ++s)
        o = fmaf(weight[s], smem.parts.O[s][r * PART_LD + d], o);  // R6
      if (split.parts > 1)
        split.O[at * HEAD_DIM + d] = o;
      else
        O[d] = from_sum<elem_t>(o * inverse_l);  // R7
    }
    if (lane_id() > 0) continue;
    if (split.parts > 1)
      split.M[at] = whole.M, split.l[at] = whole.l;
    else if (LSE)
      p.lse[row] = whole.lse();
  }
}
