// attn_fa_tc -- fused attention with both products on tensor cores.
//
// Idea         Tensor cores. S = Q K^T and O += P V are mma.m16n8k16. Operands reach registers
//              through swizzled shared memory and ldmatrix. The next K, V tiles arrive by cp.async
//              during the computation on the current ones.
// Differs from attn_fa_warps: the hardware prescribes which lane holds which element. So a row is
//              in the four lanes of a quad, and S, P, O become fragments; every step changes for
//              this reason. (diff attn_fa_warps.cu attn_fa_tc.cu) Three things are only for speed.
//              Addresses for ldmatrix are computed once, not each step (1.4 times as fast). The
//              longest causal rows come first. M is lazy: S4 weights a step with the M of the steps
//              before. Only if a lane's weights sum to more than LARGEST_SUM, S4 finds the largest
//              score, raises M, rescales O and weights the step again. With fast products the
//              softmax takes most of the time, and most steps need no maximum
//              (experiments/results/NOTES.md, "A lazy maximum in the portable fa_tc").
// Kept simple  S of one step feeds P of the same step from registers; one barrier a step.
// Rounding     R2 tensor core over HEAD_DIM, R3 softcap and bias, R4 exp2, R5 P to 16 bits, R6
//              alpha, l and the tensor core over keys, R7 times 1/l, store
//              (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/mma_tiles.cuh"
#include "prims/score/fragment_rows.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int CHUNKS = HEAD_DIM_PAD / 8;  // 16-byte chunks per row
constexpr float LARGEST_SUM = 256.0f;     // 2^LARGEST_EXPONENT, of a lane's weights, or M rises
// Resident blocks per SM: three, twelve warps whose waits overlap, if registers allow.
constexpr int RESIDENT = HEAD_DIM <= 64 && BLOCK_KV <= 32 && NUM_WARPS == 4 ? 3 : 1;

struct SharedStorage {
  alignas(128) elem_t Q[BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t K[NUM_STAGES][BLOCK_KV * HEAD_DIM_PAD];
  alignas(128) elem_t V[NUM_STAGES][BLOCK_KV * HEAD_DIM_PAD];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

static_assert(ELEM_IS_16_BIT, "fa_tc multiplies float16 or bfloat16");
static_assert(
    NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next tile arrives during this one");

extern "C" __global__ __launch_bounds__(NUM_THREADS, RESIDENT) void attn_fa_tc(
    const __grid_constant__ AttnParams call) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = (q_blocks - 1 - blockIdx.x % q_blocks) * BLOCK_Q;  // longest causal rows first
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
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  // Where this lane points the first ldmatrix of each operand; swizzled_from() goes on from there.
  const uint32_t Q_lane = chunk_address<CHUNKS>(smem.Q, row0 + lane_id() % 16, lane_id() / 16);
  const uint32_t K_lane = key_address<CHUNKS>(smem.K[0]);
  const uint32_t V_lane = chunk_address<CHUNKS>(smem.V[0], lane_id() % 16, lane_id() / 16);
  const Scores scores(p, batch, head);

  // S1 load Q: the group also holds the first K, V tile
  load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
      smem.Q, Q, p.Q_stride.len, p.len_q - q0, thread_id());
  const KeptKeys keys(p, batch, head, q0, kv_begin(p, q0), kv_end(p, q0, BLOCK_Q));
  const int first_step = keys.begin / BLOCK_KV;
  const int num_steps = ceil_div(keys.end, BLOCK_KV);
  auto load_kv = [&](int step) {  // into its stage; one group per step, empty past the end
    const int kv0 = keys.key(step * BLOCK_KV), stage = step % NUM_STAGES;
    if (step < num_steps) {
      load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.K[stage], K + kv0 * p.K_stride.len, p.K_stride.len, p.len_kv - kv0, thread_id());
      load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.V[stage], V + kv0 * p.V_stride.len, p.V_stride.len, p.len_kv - kv0, thread_id());
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_kv(first_step + i);

  RowState state[MMA_ROWS][2];  // rows g and g + 8 of each row tile
  float O_acc[MMA_ROWS][MMA_COLS][4] = {};
  for (int step = first_step; step < num_steps; ++step) {
    const int kv0 = keys.key(step * BLOCK_KV);
    const uint32_t K_tile = K_lane + step % NUM_STAGES * sizeof(smem.K[0]);
    const uint32_t V_tile = V_lane + step % NUM_STAGES * sizeof(smem.V[0]);
    cp_async_wait_group<NUM_STAGES - 2>();
    __syncthreads();  // this step's tiles are visible, the stage filled next is no longer read
    // S2 load K, V
    load_kv(step + NUM_STAGES - 1);

    // S3 scores
    float S_acc[MMA_ROWS][MMA_KEYS][4] = {};
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
          mma_m16n8k16<elem_t>(S_acc[r][n], Q_frag[r], K_frag[0], K_frag[1]);      // R2
          mma_m16n8k16<elem_t>(S_acc[r][n + 1], Q_frag[r], K_frag[2], K_frag[3]);  // R2
        }
      }
    }

    // S4 softmax
    // NOTE: row0 is computed again, because a register kept for its results spilled.
    if (!scores.are_products(q0 + thread_id_anew() / WARP_SIZE * WARP_Q, WARP_Q, kv0, BLOCK_KV))
      scores.settle(S_acc, q0 + row0, kv0, [&](int r, int n, int i) {
        return NATURAL_SCORES ? S_acc[r][n][i] * p.scale : S_acc[r][n][i];  // R3
      });
    uint32_t P_frag[BLOCK_KV / 16][MMA_ROWS][4];  // two key tiles of S are one k step of P
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r) {
      auto factor = [&](int h, int n) { return p.scale_log2; };  // to log2 units
      float sum[2];  // of the weights that this lane holds of row g, then of row g + 8
      auto weigh = [&](const float (&M)[2], bool anew) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          sum[h] = 0.0f;
#pragma unroll
          for (int n = 0; n < MMA_KEYS; ++n) {
            const float* pair = S_acc[r][n] + 2 * h;                                       // [2]
            const float x = ex2_approx_ftz(exponent(pair[0], factor(h, n), -M[h], anew));  // R4
            const float y = ex2_approx_ftz(exponent(pair[1], factor(h, n), -M[h], anew));  // R4
            sum[h] += x, sum[h] += y;                                                      // R6
            P_frag[n / 2][r][n % 2 * 2 + h] = pack_rn<elem_t>(x, y);                       // R5
          }
        }
      };
      float M[2] = {state[r][0].M, state[r][1].M};  // -inf: no key yet, and weights are infinite
      if (!NATURAL_SCORES) weigh(M, false);
      // NOTE: most steps find no weight too large, hence no maximum: M lags, l and O stay.
      bool small[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) small[h] = !NATURAL_SCORES && sum[h] <= LARGEST_SUM;
      if (NATURAL_SCORES || !__all_sync(FULL_WARP, small[0] && small[1])) {
        float m[2];  // the largest score that this lane holds of a row, where M has to rise
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          find_largest(m[h], S_acc[r], h, factor);
          if (small[h]) m[h] = NEG_INF;  // so no row's M depends on its neighbours
        }
        if (__any_sync(FULL_WARP, m[0] > state[r][0].M || m[1] > state[r][1].M)) {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            scale_row(O_acc[r], h, state[r][h].advance(shfl_max<4>(m[h])));  // R6
        }
        M[0] = state[r][0].M_finite(), M[1] = state[r][1].M_finite();
        weigh(M, true);
      }
      state[r][0].l += sum[0], state[r][1].l += sum[1];  // R6: this lane's part of l
    }

    // S5 output
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; ++k) {
#pragma unroll
      for (int c = 0; c < MMA_COLS; c += 2) {
        uint32_t V_frag[4];  // two column tiles, two halves of k
        ldmatrix_x4_trans(V_frag, swizzled_from<CHUNKS>(V_tile, k * 16, c));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_m16n8k16<elem_t>(O_acc[r][c], P_frag[k][r], V_frag[0], V_frag[1]);      // R6
          mma_m16n8k16<elem_t>(O_acc[r][c + 1], P_frag[k][r], V_frag[2], V_frag[3]);  // R6
        }
      }
    }
  }

  // S6 store
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state[r][h].l = shfl_sum<4>(state[r][h].l);  // R6
      const float inverse_l = state[r][h].inverse_l();
      const int row = row0 + r * 16 + g + h * 8;
      if (q0 + row >= p.len_q) continue;
      if constexpr (LSE)
        if (t == 0) lse_of(p, batch_head, head)[q0 + row] = state[r][h].lse();
#pragma unroll
      for (int c = 0; c < MMA_COLS; ++c)
        store_sums(
            O + row * p.O_stride.len, c * 8 + t * 2, O_acc[r][c][2 * h] * inverse_l,
            O_acc[r][c][2 * h + 1] * inverse_l);  // R7
    }
}
