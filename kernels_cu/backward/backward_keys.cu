// backward_keys -- gradients of K and V: a block of keys stays, the query rows pass.
//
// Idea         attn_fa_tc with its operands exchanged. S and dP are computed as their transposes, K
//              Q^T and V dO^T, so rows of fragments are keys. P^T and dS^T are then already in
//              registers as operands of dV += P^T dO and dK += dS^T Q. All query heads of a key
//              head pass in order. No two blocks add to one element of dK or dV, so every run has
//              the same bits.
// Differs from attn_fa_tc: P needs no running maximum, because the log-sum-exp of a row is known.
//              There are two more products. SUMS_DQ: dQ += dS K, too. Its sum also runs over the
//              keys of other blocks. So dS goes through shared memory, and blocks add to memory in
//              float32, in any order. Without SUMS_DQ, backward_queries.cu computes dQ.
// Kept simple  Past 128 columns two warps share their keys. Both compute S and dP, and each has
//              half of the columns of dK and dV, which would otherwise not fit in registers.
// Rounding     R9 P from the log-sum-exp, P to 16 bits, R10 dP, R11 dS, dS to 16 bits, R12 the
//              tensor core over query rows, sums of blocks, times scale, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/config.cuh"
#include "prims/score/gradient.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int COL_WARPS = HEAD_DIM > 128 ? 2 : 1;  // warps that share their keys
constexpr int HEAD_DIM_PAD = round_up(HEAD_DIM, 16 * COL_WARPS);
constexpr int CHUNKS = HEAD_DIM_PAD / 8;                   // 16-byte chunks per row
constexpr int COL_TILES = HEAD_DIM_PAD / 16;               // tiles of 16 columns
constexpr int WARP_COL_TILES = COL_TILES / COL_WARPS;      // of dK and dV, every COL_WARPS-th
constexpr int WARP_KV = BLOCK_KV * COL_WARPS / NUM_WARPS;  // key rows per warp
constexpr int MMA_KEYS = WARP_KV / 16;                     // row tiles of 16 keys per warp
constexpr int MMA_Q = BLOCK_Q / 8;                         // tiles of 8 query rows per step
constexpr int Q_CHUNKS = BLOCK_Q / 8;                      // 16-byte chunks per row of dS^T
// dQ: warps share its tiles of 16 rows, and its columns if there are more warps than tiles.
constexpr int Q_TILES = BLOCK_Q / 16;
constexpr int SUM_COL_WARPS = NUM_WARPS / Q_TILES;
constexpr int SUM_COL_TILES = ceil_div(COL_TILES, SUM_COL_WARPS);

struct SharedStorage {
  alignas(128) elem_t K[BLOCK_KV * HEAD_DIM_PAD];
  alignas(128) elem_t V[BLOCK_KV * HEAD_DIM_PAD];
  alignas(128) elem_t Q[NUM_STAGES][BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t dO[NUM_STAGES][BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t dS[SUMS_DQ ? BLOCK_KV * BLOCK_Q : 8];  // transposed: [BLOCK_KV, BLOCK_Q]
  alignas(16) float row_M[NUM_STAGES][BLOCK_Q];
  alignas(16) float delta[NUM_STAGES][BLOCK_Q];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);
// V lies behind K, and dO behind Q: a lane adds these offsets to one address for both.
constexpr uint32_t V_FROM_K = sizeof(SharedStorage::K);
constexpr uint32_t dO_FROM_Q = sizeof(SharedStorage::Q);

static_assert(ELEM_IS_16_BIT, "gradients are of float16 or bfloat16");
static_assert(BLOCK_KV % (16 * NUM_WARPS / COL_WARPS) == 0, "each warp has 16 keys, or multiples");
static_assert(BLOCK_Q % 16 == 0, "BLOCK_Q must be a multiple of 16, the depth of an mma");
static_assert(ROW_PAD % BLOCK_Q == 0, "BLOCK_Q must divide ROW_PAD, to which rows are padded");
static_assert(NUM_WARPS % Q_TILES == 0, "the warps must share tiles of 16 rows of dQ evenly");
static_assert(
    NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next tile arrives during this one");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_keys(
    const __grid_constant__ AttnParams call, const __grid_constant__ BackwardParams grad) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int kv_blocks = ceil_div(call.len_kv, BLOCK_KV);
  const int kv0 = blockIdx.x % kv_blocks * BLOCK_KV;  // the first keys have most causal rows
  const int64_t batch_head = blockIdx.x / kv_blocks;
  const int64_t batch = batch_head / call.heads_kv, head_kv = batch_head % call.heads_kv;
  const auto& p = of_batch(call, batch);
  if (VARLEN && kv0 >= p.len_kv) return;
  const Sequences<VARLEN> sequences(call, batch);
  const int group = p.heads / p.heads_kv;
  const int first_head = head_kv * group, last_head = first_head + group;  // of the query heads
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM], from row kv0
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head + kv0 * p.K_stride.len;
  const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM], from row kv0
                    + batch * p.V_stride.batch + head_kv * p.V_stride.head + kv0 * p.V_stride.len;
  const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [heads, len_q, HEAD_DIM], strided
                    + batch * p.Q_stride.batch;
  const elem_t* dO = static_cast<const elem_t*>(grad.dO)  // [heads, len_q, HEAD_DIM], strided
                     + batch * grad.dO_stride.batch + sequences.first_row() * grad.dO_stride.len;
  const int key_warp = warp_id() / COL_WARPS, col_warp = warp_id() % COL_WARPS;
  const int key0 = key_warp * WARP_KV;             // first key of this warp in the block
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  // Where this lane points the first ldmatrix of each operand, as in attn_fa_tc.cu.
  const uint32_t K_lane =
      shared_address(swizzled<CHUNKS>(smem.K, key0 + lane_id() % 16, lane_id() / 16));
  const uint32_t Q_lane = shared_address(
      swizzled<CHUNKS>(smem.Q[0], lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2));
  const uint32_t Q_trans =
      shared_address(swizzled<CHUNKS>(smem.Q[0], lane_id() % 16, lane_id() / 16 + 2 * col_warp));

  // S1 load K, V: the group also holds the first Q, dO tile
  load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
      smem.K, K, p.K_stride.len, p.len_kv - kv0, thread_id());
  load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
      smem.V, V, p.V_stride.len, p.len_kv - kv0, thread_id());
  RowSteps loading(p, grad, batch, first_head, last_head, kv0);
  auto load_q = [&](int stage) {  // the next step; one group per step, empty past the end
    if (loading.head < last_head) {
      const int64_t head = loading.head;
      const int q0 = loading.q0();
      load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.Q[stage], Q + head * p.Q_stride.head + q0 * p.Q_stride.len, p.Q_stride.len,
          p.len_q - q0, loading_thread());
      load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.dO[stage], dO + head * grad.dO_stride.head + q0 * grad.dO_stride.len,
          grad.dO_stride.len, p.len_q - q0, loading_thread());
      const int64_t padded = padded_row(call, grad, batch, head) + q0;
      load_rows_async<BLOCK_Q>(smem.row_M[stage], grad.row_M + padded, loading_thread());
      load_rows_async<BLOCK_Q>(smem.delta[stage], grad.delta + padded, loading_thread());
      loading.advance(p, grad, batch, last_head, kv0);
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_q(i);

  float dK_acc[MMA_KEYS][2 * WARP_COL_TILES][4] = {};
  float dV_acc[MMA_KEYS][2 * WARP_COL_TILES][4] = {};
  RowSteps steps(p, grad, batch, first_head, last_head, kv0);
  for (int step = 0; steps.head < last_head; ++step) {
    const int stage = step % NUM_STAGES;
    const int64_t head = steps.head;
    const int q0 = steps.q0();
    const uint32_t Q_tile = Q_lane + stage * sizeof(smem.Q[0]);
    const uint32_t Q_columns = Q_trans + stage * sizeof(smem.Q[0]);
    const Scores scores(p, batch, head);
    const int64_t padded = padded_row(call, grad, batch, head) + q0;
    const bool coarse = any_coarse<BLOCK_Q>(grad.coarse + padded / COARSE_ROWS);
    cp_async_wait_group<NUM_STAGES - 2>();
    __syncthreads();  // this step's tiles are visible, the stage filled next is no longer read
    // S2 load Q, dO
    load_q((step + NUM_STAGES - 1) % NUM_STAGES);
    steps.advance(p, grad, batch, last_head, kv0);

    // S3 scores, and dP
    float S_acc[MMA_KEYS][MMA_Q][4] = {};
    float dP_acc[MMA_KEYS][MMA_Q][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM_PAD / 16; ++k) {
      uint32_t K_frag[MMA_KEYS][4];
#pragma unroll
      for (int r = 0; r < MMA_KEYS; ++r)
        ldmatrix_x4(K_frag[r], swizzled_from<CHUNKS>(K_lane, r * 16, 2 * k));
#pragma unroll
      for (int n = 0; n < MMA_Q; n += 2) {
        uint32_t Q_frag[4];  // two tiles of rows, two halves of k
        ldmatrix_x4(Q_frag, swizzled_from<CHUNKS>(Q_tile, n * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_KEYS; ++r) {
          mma_m16n8k16<elem_t>(S_acc[r][n], K_frag[r], Q_frag[0], Q_frag[1]);      // R9
          mma_m16n8k16<elem_t>(S_acc[r][n + 1], K_frag[r], Q_frag[2], Q_frag[3]);  // R9
        }
      }
    }
#pragma unroll
    for (int k = 0; k < HEAD_DIM_PAD / 16; ++k) {
      uint32_t V_frag[MMA_KEYS][4];
#pragma unroll
      for (int r = 0; r < MMA_KEYS; ++r)
        ldmatrix_x4(V_frag[r], swizzled_from<CHUNKS>(K_lane + V_FROM_K, r * 16, 2 * k));
#pragma unroll
      for (int n = 0; n < MMA_Q; n += 2) {
        uint32_t dO_frag[4];  // two tiles of rows, two halves of k
        ldmatrix_x4(dO_frag, swizzled_from<CHUNKS>(Q_tile + dO_FROM_Q, n * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_KEYS; ++r) {
          mma_m16n8k16<elem_t>(dP_acc[r][n], V_frag[r], dO_frag[0], dO_frag[1]);      // R10
          mma_m16n8k16<elem_t>(dP_acc[r][n + 1], V_frag[r], dO_frag[2], dO_frag[3]);  // R10
        }
      }
    }

    // S4 P and dS
    const bool products = scores.are_products(q0, BLOCK_Q, kv0 + key0, WARP_KV);
    uint32_t P_frag[MMA_KEYS][BLOCK_Q / 16][4], dS_frag[MMA_KEYS][BLOCK_Q / 16][4];
    using Pair = Vec<float, 2>;  // of the two rows that this lane has of a tile
    float slope_of[SOFTCAP ? MMA_KEYS : 1][SOFTCAP ? MMA_Q : 1][4];
#pragma unroll
    for (int n = 0; n < MMA_Q; ++n) {
      const Pair M = *reinterpret_cast<const Pair*>(&smem.row_M[stage][n * 8 + t * 2]);
#pragma unroll
      for (int r = 0; r < MMA_KEYS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float S = S_acc[r][n][i];
          if (!products) {
            const int row = q0 + n * 8 + t * 2 + i % 2;
            const int key = kv0 + key0 + r * 16 + g + i / 2 * 8;
            if constexpr (NATURAL_SCORES) {
              if (SOFTCAP) slope_of[r][n][i] = scores.slope(S * p.scale);  // R11
              S = scores.of(S * p.scale, row, key);                        // R9
            }
            if (!scores.admit(row, key)) S = NEG_INF;
          }
          S_acc[r][n][i] = probability(S, p.scale_log2, M.v[i % 2]);
        }
    }
    if (coarse) {
#pragma unroll
      for (int n = 0; n < MMA_Q; ++n) {
        const Pair factor =
            *reinterpret_cast<const Pair*>(&grad.row_factor[padded + n * 8 + t * 2]);
#pragma unroll
        for (int r = 0; r < MMA_KEYS; ++r)
#pragma unroll
          for (int i = 0; i < 4; ++i) S_acc[r][n][i] = normalised(S_acc[r][n][i], factor.v[i % 2]);
      }
    }
#pragma unroll
    for (int n = 0; n < MMA_Q; ++n) {
      const Pair delta = *reinterpret_cast<const Pair*>(&smem.delta[stage][n * 8 + t * 2]);
#pragma unroll
      for (int r = 0; r < MMA_KEYS; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float dS = S_acc[r][n][i] * (dP_acc[r][n][i] - delta.v[i % 2]);  // R11
          dP_acc[r][n][i] = SOFTCAP ? dS * slope_of[r][n][i] : dS;               // R11
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {              // two tiles of rows are one k step
          const float* P = S_acc[r][n] + 2 * h;    // [2]
          const float* dS = dP_acc[r][n] + 2 * h;  // [2]
          P_frag[r][n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(P[0], P[1]);     // R9
          dS_frag[r][n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(dS[0], dS[1]);  // R11
        }
      }
    }

    // S5 dV, dK
#pragma unroll
    for (int k = 0; k < BLOCK_Q / 16; ++k)
#pragma unroll
      for (int c = 0; c < WARP_COL_TILES; ++c) {
        uint32_t dO_frag[4], Q_frag[4];  // two column tiles, two halves of k
        ldmatrix_x4_trans(
            dO_frag, swizzled_from<CHUNKS>(Q_columns + dO_FROM_Q, k * 16, 2 * COL_WARPS * c));
        ldmatrix_x4_trans(Q_frag, swizzled_from<CHUNKS>(Q_columns, k * 16, 2 * COL_WARPS * c));
#pragma unroll
        for (int r = 0; r < MMA_KEYS; ++r)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            mma_m16n8k16<elem_t>(
                dV_acc[r][2 * c + h], P_frag[r][k], dO_frag[2 * h], dO_frag[2 * h + 1]);  // R12
            mma_m16n8k16<elem_t>(
                dK_acc[r][2 * c + h], dS_frag[r][k], Q_frag[2 * h], Q_frag[2 * h + 1]);  // R12
          }
      }

    // S5 dQ
    if constexpr (SUMS_DQ) {
      if (col_warp == 0)
#pragma unroll
        for (int r = 0; r < MMA_KEYS; ++r)
#pragma unroll
          for (int n = 0; n < MMA_Q; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int key = key0 + r * 16 + g + h * 8;
              elem_t* rows = swizzled<Q_CHUNKS>(smem.dS, key, n);  // [8], of one key
              reinterpret_cast<uint32_t*>(rows)[t] = dS_frag[r][n / 2][n % 2 * 2 + h];
            }
      __syncthreads();  // dS of all keys is visible
      const int q_tile = warp_id() % Q_TILES, sum_col = warp_id() / Q_TILES;
      float dQ_acc[SUM_COL_TILES][2][4] = {};
#pragma unroll
      for (int k = 0; k < BLOCK_KV / 16; ++k) {
        uint32_t dS_rows[4];  // of dS itself: query rows by keys
        const int key = k * 16 + lane_id() / 16 * 8 + lane_id() % 8;
        ldmatrix_x4_trans(
            dS_rows,
            shared_address(swizzled<Q_CHUNKS>(smem.dS, key, q_tile * 2 + lane_id() / 8 % 2)));
#pragma unroll
        for (int c = 0; c < SUM_COL_TILES; ++c) {
          const int tile = sum_col + c * SUM_COL_WARPS;
          if (tile >= COL_TILES) continue;
          uint32_t K_frag[4];  // two column tiles, two halves of k
          ldmatrix_x4_trans(
              K_frag,
              shared_address(
                  swizzled<CHUNKS>(smem.K, k * 16 + lane_id() % 16, 2 * tile + lane_id() / 16)));
          mma_m16n8k16<elem_t>(dQ_acc[c][0], dS_rows, K_frag[0], K_frag[1]);  // R12
          mma_m16n8k16<elem_t>(dQ_acc[c][1], dS_rows, K_frag[2], K_frag[3]);  // R12
        }
      }
      const int64_t entry = VARLEN ? head * call.total_q + sequences.first_row()
                                   : (batch * call.heads + head) * call.len_q;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = q0 + q_tile * 16 + g + h * 8;
        if (row >= p.len_q) continue;
        float* sum = grad.dQ_sum + (entry + row) * HEAD_DIM;  // [HEAD_DIM]
#pragma unroll
        for (int c = 0; c < SUM_COL_TILES; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int col = (sum_col + c * SUM_COL_WARPS) * 16 + i / 2 * 8 + t * 2 + i % 2;
            if (col < HEAD_DIM) atomicAdd(sum + col, dQ_acc[c][i / 2][2 * h + i % 2]);  // R12
          }
      }
    }
  }

  // S6 store
  elem_t* dK = static_cast<elem_t*>(grad.dK)  // [len_kv, HEAD_DIM], from row kv0
               + batch * grad.dK_stride.batch + head_kv * grad.dK_stride.head +
               (sequences.first_key() + kv0) * grad.dK_stride.len;
  elem_t* dV = static_cast<elem_t*>(grad.dV)  // [len_kv, HEAD_DIM], from row kv0
               + batch * grad.dV_stride.batch + head_kv * grad.dV_stride.head +
               (sequences.first_key() + kv0) * grad.dV_stride.len;
#pragma unroll
  for (int r = 0; r < MMA_KEYS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = key0 + r * 16 + g + h * 8;
      if (kv0 + key >= p.len_kv) continue;
#pragma unroll
      for (int c = 0; c < 2 * WARP_COL_TILES; ++c) {
        const int col = (c / 2 * COL_WARPS + col_warp) * 16 + c % 2 * 8 + t * 2;
        store_pair(
            dK + key * grad.dK_stride.len, col, dK_acc[r][c][2 * h] * p.scale,
            dK_acc[r][c][2 * h + 1] * p.scale);  // R12
        store_pair(
            dV + key * grad.dV_stride.len, col, dV_acc[r][c][2 * h],
            dV_acc[r][c][2 * h + 1]);  // R12
      }
    }
}
