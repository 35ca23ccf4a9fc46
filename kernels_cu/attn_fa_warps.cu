// attn_fa_warps -- fused attention in which a warp owns whole query rows.
//
// Idea         Ownership. A warp owns WARP_Q rows from S to O. A lane has keys in S3 and S4, and
//              columns in S5. Row maxima and sums are shuffles, and S stays in registers.
// Differs from attn_fa: S and alpha leave shared memory, and so do the barriers between S3, S4 and
//              S5. The remaining barriers guard K and V.  (diff attn_fa.cu attn_fa_warps.cu)
// Kept simple  float32 FMA as before; each element of K and V that a lane reads serves WARP_Q rows.
// Rounding     R2 FMA chain over HEAD_DIM, R3 softcap and bias, R4 exp2, R6 alpha, l and the FMA
//              chain over keys, R7 times 1/l and store (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/io/finite.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/io/rope.cuh"
#include "prims/score/score.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int LD = HEAD_DIM | 1;  // odd row length: a column of K falls into 32 different banks
constexpr int LANE_KEYS = BLOCK_KV / WARP_SIZE;           // keys per lane
constexpr int LANE_COLS = ceil_div(HEAD_DIM, WARP_SIZE);  // columns of O per lane

struct SharedStorage {
  float Q[BLOCK_Q * HEAD_DIM];
  float K[BLOCK_KV * LD];
  float V[BLOCK_KV * HEAD_DIM];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

static_assert(BLOCK_Q % NUM_WARPS == 0, "BLOCK_Q must be a multiple of NUM_WARPS");
static_assert(
    BLOCK_KV % WARP_SIZE == 0, "BLOCK_KV must be a multiple of 32: a lane holds whole keys");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_warps(
    const __grid_constant__ AttnParams call) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = blockIdx.x % q_blocks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [len_q, HEAD_DIM], from row q0
                    + batch * p.Q_stride.batch + head * p.Q_stride.head + q0 * p.Q_stride.len;
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM]
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM]
                    + batch * p.V_stride.batch + head_kv * p.V_stride.head;
  elem_t* O = static_cast<elem_t*>(p.O)  // [len_q, HEAD_DIM], from row q0
              + batch * p.O_stride.batch + head * p.O_stride.head + q0 * p.O_stride.len;
  const int row0 = warp_id() * WARP_Q;             // first row of this warp in the block
  const float* Q_warp = smem.Q + row0 * HEAD_DIM;  // [WARP_Q, HEAD_DIM]
  const Scores scores(p, batch, head);

  // S1 load Q
  load_placed_f32<BLOCK_Q, HEAD_DIM>(
      smem.Q, Q, p.Q_stride.len, p.len_q - q0, p, q0 + p.rope_offset_q, thread_id());

  RowState state[WARP_Q];
  float O_acc[WARP_Q][LANE_COLS] = {};  // columns lane_id() + 32 c
  const KeptKeys keys(p, batch, head, q0, kv_begin(p, q0), kv_end(p, q0, BLOCK_Q));
  for (int number = round_down(keys.begin, BLOCK_KV); number < keys.end; number += BLOCK_KV) {
    const int kv0 = keys.key(number);
    __syncthreads();  // the previous K, V tiles are no longer read
    // S2 load K, V
    load_placed_f32<BLOCK_KV, LD>(
        smem.K, K + kv0 * p.K_stride.len, p.K_stride.len, p.len_kv - kv0, p, kv0, thread_id());
    load_tile_f32<BLOCK_KV, HEAD_DIM, HEAD_DIM, VEC>(
        smem.V, V + kv0 * p.V_stride.len, p.V_stride.len, p.len_kv - kv0, thread_id());
    __syncthreads();  // Q, K, V tiles visible to the whole block

    // S3 scores
    float S_acc[WARP_Q][LANE_KEYS] = {};  // keys lane_id() + 32 c
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; ++d)
#pragma unroll
      for (int c = 0; c < LANE_KEYS; ++c) {
        const float k = smem.K[(lane_id() + c * WARP_SIZE) * LD + d];
#pragma unroll
        for (int r = 0; r < WARP_Q; ++r)
          S_acc[r][c] = fmaf(Q_warp[r * HEAD_DIM + d], k, S_acc[r][c]);  // R2
      }

    // S4 softmax
    float alpha[WARP_Q];
#pragma unroll
    for (int r = 0; r < WARP_Q; ++r) {
      float m = NEG_INF;
#pragma unroll
      for (int c = 0; c < LANE_KEYS; ++c) {
        const int key = kv0 + lane_id() + c * WARP_SIZE;
        if constexpr (NATURAL_SCORES)
          S_acc[r][c] = scores.of(S_acc[r][c] * p.scale, q0 + row0 + r, key);  // R3
        if (!scores.admit(q0 + row0 + r, key)) S_acc[r][c] = NEG_INF;
        m = fmaxf(m, S_acc[r][c]);
      }
      alpha[r] = state[r].advance(row_maximum_of_any_size(shfl_max<WARP_SIZE>(m), p.scale_log2));
      const float M = state[r].M_finite();
#pragma unroll
      for (int c = 0; c < LANE_KEYS; ++c) {
        S_acc[r][c] = ex2_approx_ftz(exponent(S_acc[r][c], p.scale_log2, -M, true));  // R4
        state[r].l += S_acc[r][c];  // R6: this lane's part of l
      }
    }

    // S5 output
#pragma unroll
    for (int r = 0; r < WARP_Q; ++r)
#pragma unroll
      for (int c = 0; c < LANE_COLS; ++c) O_acc[r][c] *= alpha[r];  // R6
#pragma unroll
    for (int k = 0; k < LANE_KEYS; ++k)
#pragma unroll 4
      for (int j = 0; j < WARP_SIZE; ++j) {
        const float* V_row = smem.V + (j + k * WARP_SIZE) * HEAD_DIM;  // [HEAD_DIM]
        float v[LANE_COLS];
#pragma unroll
        for (int c = 0; c < LANE_COLS; ++c)
          v[c] = V_row[min(lane_id() + c * WARP_SIZE, HEAD_DIM - 1)];
#pragma unroll
        for (int r = 0; r < WARP_Q; ++r) {
          const float probability = __shfl_sync(FULL_WARP, S_acc[r][k], j);
#pragma unroll
          for (int c = 0; c < LANE_COLS; ++c)
            O_acc[r][c] = fmaf(probability, v[c], O_acc[r][c]);  // R6
        }
      }
  }

  // S6 store
#pragma unroll
  for (int r = 0; r < WARP_Q; ++r) {
    state[r].l = shfl_sum<WARP_SIZE>(state[r].l);  // R6
    const float inverse_l = state[r].inverse_l();
    const int row = row0 + r;
    if (q0 + row >= p.len_q) continue;
    if constexpr (LSE)
      if (lane_id() == 0) lse_of(p, batch_head, head)[q0 + row] = state[r].lse();
#pragma unroll
    for (int c = 0; c < LANE_COLS; ++c) {
      const int d = lane_id() + c * WARP_SIZE;
      if (d < HEAD_DIM)
        O[row * p.O_stride.len + d] = from_sum<elem_t>(O_acc[r][c] * inverse_l);  // R7
    }
  }
}
