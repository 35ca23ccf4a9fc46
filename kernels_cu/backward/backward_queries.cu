// backward_queries -- the gradient of Q where it must have the same bits on every run.
//
// Idea         attn_fa_tc with dS K in the place of P V. A block of query rows stays, the keys
//              pass, and dQ is summed in registers from the first key to the last.
// Differs from attn_fa_tc: P follows from the log-sum-exp of the row; there is one more product,
//              dP. S and dP are computed again, after backward_keys.cu has computed them for dK and
//              dV. This makes 7 products instead of 5, but needs no memory for sums.
// Kept simple  One barrier a step, the tiles of all columns in each warp.
// Rounding     R9 P from the log-sum-exp, R10 dP, R11 dS, dS to 16 bits, R12 the tensor core over
//              keys, times scale, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/config.cuh"
#include "prims/score/gradient.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int HEAD_DIM_PAD = round_up(HEAD_DIM, 16);
constexpr int CHUNKS = HEAD_DIM_PAD / 8;    // 16-byte chunks per row
constexpr int MMA_ROWS = WARP_Q / 16;       // row tiles of 16 per warp
constexpr int MMA_KEYS = BLOCK_KV / 8;      // key tiles of 8 per step
constexpr int MMA_COLS = HEAD_DIM_PAD / 8;  // column tiles of 8 of dQ

struct SharedStorage {
  alignas(128) elem_t Q[BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t dO[BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t K[NUM_STAGES][BLOCK_KV * HEAD_DIM_PAD];
  alignas(128) elem_t V[NUM_STAGES][BLOCK_KV * HEAD_DIM_PAD];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);
// dO lies behind Q, and V behind K: a lane adds these offsets to one address for both.
constexpr uint32_t dO_FROM_Q = sizeof(SharedStorage::Q);
constexpr uint32_t V_FROM_K = sizeof(SharedStorage::K);

static_assert(ELEM_IS_16_BIT, "gradients are of float16 or bfloat16");
static_assert(
    BLOCK_Q % (16 * NUM_WARPS) == 0,
    "BLOCK_Q / NUM_WARPS must be a multiple of 16, the rows of an mma");
static_assert(BLOCK_KV % 16 == 0, "BLOCK_KV must be a multiple of 16, the depth of an mma");
static_assert(ROW_PAD % BLOCK_Q == 0, "BLOCK_Q must divide ROW_PAD, to which rows are padded");
static_assert(
    NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next tile arrives during this one");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_queries(
    const __grid_constant__ AttnParams call, const __grid_constant__ BackwardParams grad) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = (q_blocks - 1 - blockIdx.x % q_blocks) * BLOCK_Q;  // longest causal rows first
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const int first_row = Sequences<VARLEN>(call, batch).first_row() + q0;
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [len_q, HEAD_DIM], from row q0
                    + batch * p.Q_stride.batch + head * p.Q_stride.head + q0 * p.Q_stride.len;
  const elem_t* dO = static_cast<const elem_t*>(grad.dO)  // [len_q, HEAD_DIM], from row q0
                     + batch * grad.dO_stride.batch + head * grad.dO_stride.head +
                     first_row * grad.dO_stride.len;
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM]
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM]
                    + batch * p.V_stride.batch + head_kv * p.V_stride.head;
  elem_t* dQ = static_cast<elem_t*>(grad.dQ)  // [len_q, HEAD_DIM], from row q0
               + batch * grad.dQ_stride.batch + head * grad.dQ_stride.head +
               first_row * grad.dQ_stride.len;
  const int row0 = warp_id() * WARP_Q;             // first row of this warp in the block
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  // Where this lane points the first ldmatrix of each operand, as in attn_fa_tc.cu.
  const uint32_t Q_lane =
      shared_address(swizzled<CHUNKS>(smem.Q, row0 + lane_id() % 16, lane_id() / 16));
  const uint32_t K_lane = shared_address(
      swizzled<CHUNKS>(smem.K[0], lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2));
  const uint32_t K_trans =
      shared_address(swizzled<CHUNKS>(smem.K[0], lane_id() % 16, lane_id() / 16));
  const Scores scores(p, batch, head);

  // S1 load Q, dO: the group also holds the first K, V tile
  load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
      smem.Q, Q, p.Q_stride.len, p.len_q - q0, thread_id());
  load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
      smem.dO, dO, grad.dO_stride.len, p.len_q - q0, thread_id());
  const KeptKeys keys(p, batch, head, q0, kv_begin(p, q0), kv_end(p, q0, BLOCK_Q));
  const int first_step = keys.begin / BLOCK_KV;
  const int num_steps = ceil_div(keys.end, BLOCK_KV);
  auto load_kv = [&](int step) {  // into its stage; one group per step, empty past the end
    const int kv0 = keys.key(step * BLOCK_KV), stage = step % NUM_STAGES;
    if (step < num_steps) {
      load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.K[stage], K + kv0 * p.K_stride.len, p.K_stride.len, p.len_kv - kv0,
          loading_thread());
      load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.V[stage], V + kv0 * p.V_stride.len, p.V_stride.len, p.len_kv - kv0,
          loading_thread());
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_kv(first_step + i);

  float M[MMA_ROWS][2], delta[MMA_ROWS][2];  // rows g and g + 8 of each row tile
  const int64_t padded = padded_row(call, grad, batch, head) + q0 + row0;
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      M[r][h] = grad.row_M[padded + r * 16 + g + h * 8];
      delta[r][h] = grad.delta[padded + r * 16 + g + h * 8];
    }
  const bool coarse = any_coarse<WARP_Q>(grad.coarse + padded / COARSE_ROWS);
  float dQ_acc[MMA_ROWS][MMA_COLS][4] = {};
  for (int step = first_step; step < num_steps; ++step) {
    const int kv0 = keys.key(step * BLOCK_KV);
    const uint32_t K_tile = K_lane + step % NUM_STAGES * sizeof(smem.K[0]);
    const uint32_t K_columns = K_trans + step % NUM_STAGES * sizeof(smem.K[0]);
    cp_async_wait_group<NUM_STAGES - 2>();
    __syncthreads();  // this step's tiles are visible, the stage filled next is no longer read
    // S2 load K, V
    load_kv(step + NUM_STAGES - 1);

    // S3 scores, and dP
    float S_acc[MMA_ROWS][MMA_KEYS][4] = {};
    float dP_acc[MMA_ROWS][MMA_KEYS][4] = {};
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
          mma_m16n8k16<elem_t>(S_acc[r][n], Q_frag[r], K_frag[0], K_frag[1]);      // R9
          mma_m16n8k16<elem_t>(S_acc[r][n + 1], Q_frag[r], K_frag[2], K_frag[3]);  // R9
        }
      }
    }
#pragma unroll
    for (int k = 0; k < HEAD_DIM_PAD / 16; ++k) {
      uint32_t dO_frag[MMA_ROWS][4];
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
        ldmatrix_x4(dO_frag[r], swizzled_from<CHUNKS>(Q_lane + dO_FROM_Q, r * 16, 2 * k));
#pragma unroll
      for (int n = 0; n < MMA_KEYS; n += 2) {
        uint32_t V_frag[4];  // two key tiles, two halves of k
        ldmatrix_x4(V_frag, swizzled_from<CHUNKS>(K_tile + V_FROM_K, n * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_m16n8k16<elem_t>(dP_acc[r][n], dO_frag[r], V_frag[0], V_frag[1]);      // R10
          mma_m16n8k16<elem_t>(dP_acc[r][n + 1], dO_frag[r], V_frag[2], V_frag[3]);  // R10
        }
      }
    }

    // S4 P and dS
    const bool products = scores.are_products(q0 + row0, WARP_Q, kv0, BLOCK_KV);
    float slope_of[SOFTCAP ? MMA_ROWS : 1][SOFTCAP ? MMA_KEYS : 1][4];
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float S = S_acc[r][n][i];
          if (!products) {
            const int row = q0 + row0 + r * 16 + g + i / 2 * 8, key = kv0 + n * 8 + t * 2 + i % 2;
            if constexpr (NATURAL_SCORES) {
              if (SOFTCAP) slope_of[r][n][i] = scores.slope(S * p.scale);  // R11
              S = scores.of(S * p.scale, row, key);                        // R9
            }
            if (!scores.admit(row, key)) S = NEG_INF;
          }
          S_acc[r][n][i] = probability(S, p.scale_log2, M[r][i / 2]);
        }
    if (coarse) {
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float factor = grad.row_factor[padded + r * 16 + g + i / 2 * 8];
#pragma unroll
          for (int n = 0; n < MMA_KEYS; ++n) S_acc[r][n][i] = normalised(S_acc[r][n][i], factor);
        }
    }
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float dS = S_acc[r][n][i] * (dP_acc[r][n][i] - delta[r][i / 2]);  // R11
          dP_acc[r][n][i] = SOFTCAP ? dS * slope_of[r][n][i] : dS;                // R11
        }

    // S5 dQ
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; ++k) {
      uint32_t dS_frag[MMA_ROWS][4];  // two key tiles of dS are one k step
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          dS_frag[r][i] = pack_rn<elem_t>(
              dP_acc[r][2 * k + i / 2][i % 2 * 2],
              dP_acc[r][2 * k + i / 2][i % 2 * 2 + 1]);  // R11
#pragma unroll
      for (int c = 0; c < MMA_COLS; c += 2) {
        uint32_t K_frag[4];  // two column tiles, two halves of k
        ldmatrix_x4_trans(K_frag, swizzled_from<CHUNKS>(K_columns, k * 16, c));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_m16n8k16<elem_t>(dQ_acc[r][c], dS_frag[r], K_frag[0], K_frag[1]);      // R12
          mma_m16n8k16<elem_t>(dQ_acc[r][c + 1], dS_frag[r], K_frag[2], K_frag[3]);  // R12
        }
      }
    }
  }

  // S6 store
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + r * 16 + g + h * 8;
      if (q0 + row >= p.len_q) continue;
#pragma unroll
      for (int c = 0; c < MMA_COLS; ++c)
        store_pair(
            dQ + row * grad.dQ_stride.len, c * 8 + t * 2, dQ_acc[r][c][2 * h] * p.scale,
            dQ_acc[r][c][2 * h + 1] * p.scale);  // R12
    }
}
