// attn_fa_int8 -- fused attention with Q K^T on INT8 tensor cores.
//
// Idea         Smaller operands. Q and K are INT8 codes with a float scale per group of rows. So
//              the first product is mma.m16n8k32 over integers: exact, twice the rate, half the
//              bytes. The softmax saves no instruction, so it gains only the conversion of integers
//              to floats: both scales are one factor of the exponent's fma.
// Differs from attn_fa_tc: S1 and S2 load codes and scales. S3 multiplies integers. S4 has a factor
//              for a row and the keys that share a scale. S6 adds the part of the keys' mean to
//              lse. V stays in 16 bits, so S5 is as in fa_tc. (diff attn_fa_tc.cu attn_fa_int8.cu)
// Kept simple  One indexing for every granularity: the scale of a row is scale[row / GROUP]. Zero
//              points are subtracted from the integer product in S3, which stays an integer.
// Rounding     R1 by quantize.cu; R3 dot to float (exact), of fine scales times K scale, and the
//              factor of both scales within R4's fma; R4 exp2, R5 P to 16 bits, R6 alpha, l and the
//              tensor core over keys, R7 times 1/l and store (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/codes/head_scales.cuh"
#include "prims/codes/key_parts.cuh"
#include "prims/codes/mean_dot.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/mma_tiles.cuh"
#include "prims/score/fragment_rows.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/codes/zero_points.cuh"

constexpr int CHUNKS = HEAD_DIM_PAD / 8;  // 16-byte chunks per row of V
constexpr float LARGEST_SUM = 256.0f;     // 2^LARGEST_EXPONENT, of a lane's weights, or M rises
// Resident blocks per SM: three, twelve warps whose waits overlap, if registers allow.
constexpr int RESIDENT = HEAD_DIM <= 64 && BLOCK_KV <= 32 && NUM_WARPS == 4 ? 3 : 1;

struct SharedStorage {
  alignas(128) int8_t Q[BLOCK_Q * CODES_PAD];
  alignas(128) int8_t K[NUM_STAGES][BLOCK_KV * CODES_PAD];
  alignas(128) elem16_t V[NUM_STAGES][BLOCK_KV * HEAD_DIM_PAD];
  float K_scale[NUM_STAGES][SCALES];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + ZERO_TILES_BYTES;

static_assert(
    GROUP_Q >= 1 && GROUP_KV >= 1, "fa_int8 needs GROUP_Q and GROUP_KV, the rows per scale");
static_assert(
    NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next tile arrives during this one");

extern "C" __global__ __launch_bounds__(NUM_THREADS, RESIDENT) void attn_fa_int8(
    const __grid_constant__ AttnParams call, const __grid_constant__ QuantParams quant) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = (q_blocks - 1 - blockIdx.x % q_blocks) * BLOCK_Q;  // longest causal rows first
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch<int8_t, elem16_t>(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const int8_t* Q = static_cast<const int8_t*>(p.Q)  // [len_q, HEAD_DIM] codes, from row q0
                    + batch * p.Q_stride.batch + head * p.Q_stride.head + q0 * p.Q_stride.len;
  const int8_t* K = static_cast<const int8_t*>(p.K)  // [len_kv, HEAD_DIM] codes
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const elem16_t* V = static_cast<const elem16_t*>(p.V)  // [len_kv, HEAD_DIM]
                      + batch * p.V_stride.batch + head_kv * p.V_stride.head;
  elem_t* O = static_cast<elem_t*>(p.O)  // [len_q, HEAD_DIM], from row q0
              + batch * p.O_stride.batch + head * p.O_stride.head + q0 * p.O_stride.len;
  const float* Q_scale = Q_scale_of(call, quant, batch, head);     // [ceil(len_q / GROUP_Q)]
  const float* K_scale = K_scale_of(call, quant, batch, head_kv);  // [ceil(len_kv / GROUP_KV)]
  const int row0 = warp_id() * WARP_Q;             // first row of this warp in the block
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  // Where this lane points the first ldmatrix of each operand; swizzled_from() goes on from there.
  const uint32_t Q_lane = chunk_address<CODE_CHUNKS>(smem.Q, row0 + lane_id() % 16, lane_id() / 16);
  const uint32_t K_lane = key_address<CODE_CHUNKS>(smem.K[0]);
  const uint32_t V_lane = chunk_address<CHUNKS>(smem.V[0], lane_id() % 16, lane_id() / 16);
  const Scores scores(p, batch, head);
  const ZeroPoints zeros(
      shared_bytes + sizeof(SharedStorage), call, quant, Q_scale, K_scale, batch, head, head_kv);

  // S1 load Q: the group also holds the first K, V tile
  load_tile_async<BLOCK_Q, HEAD_DIM, CODES_PAD, CODE_VEC>(
      smem.Q, Q, p.Q_stride.len, p.len_q - q0, thread_id());
  zeros.load_rows(q0, p.len_q);
  float Q_factor[MMA_ROWS][2];  // Q scale and softmax scale of rows g and g + 8 of each row tile
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      Q_factor[r][h] = factor_of_Q_row(
          p, Q_scale[min(q0 + row0 + r * 16 + g + h * 8, p.len_q - 1) / GROUP_Q]);  // R3
  const KeptKeys keys(p, batch, head, q0, kv_begin(p, q0), kv_end(p, q0, BLOCK_Q));
  const int first_step = keys.begin / BLOCK_KV;
  const int num_steps = ceil_div(keys.end, BLOCK_KV);
  auto load_kv = [&](int step) {  // into its stage; one group per step, empty past the end
    const int kv0 = keys.key(step * BLOCK_KV), stage = step % NUM_STAGES;
    if (step < num_steps) {
      load_tile_async<BLOCK_KV, HEAD_DIM, CODES_PAD, CODE_VEC>(
          smem.K[stage], K + kv0 * p.K_stride.len, p.K_stride.len, p.len_kv - kv0,
          loading_thread());
      gather_async<SCALES>(smem.K_scale[stage], [&](int i) {
        return K_scale + min(kv0 + i * (BLOCK_KV / SCALES), p.len_kv - 1) / GROUP_KV;
      });
      zeros.load_keys(stage, kv0, p.len_kv);
      load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.V[stage], V + kv0 * p.V_stride.len, p.V_stride.len, p.len_kv - kv0,
          loading_thread());
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
    const float* K_scale_tile = smem.K_scale[step % NUM_STAGES];  // [SCALES]
    cp_async_wait_group<NUM_STAGES - 2>();
    __syncthreads();  // this step's tiles are visible, the stage filled next is no longer read
    // S2 load K, V
    load_kv(step + NUM_STAGES - 1);

    // S3 scores
    int32_t dot[MMA_ROWS][MMA_KEYS][4] = {};
#pragma unroll
    for (int k = 0; k < CODES_PAD / 32; ++k) {
      uint32_t Q_frag[MMA_ROWS][4];
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
        ldmatrix_x4(Q_frag[r], swizzled_from<CODE_CHUNKS>(Q_lane, r * 16, 2 * k));
#pragma unroll
      for (int n = 0; n < MMA_KEYS; n += 2) {
        uint32_t K_frag[4];  // two key tiles, two halves of k
        ldmatrix_x4(K_frag, swizzled_from<CODE_CHUNKS>(K_tile, n * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_m16n8k32_s8(dot[r][n], Q_frag[r], K_frag[0], K_frag[1]);
          mma_m16n8k32_s8(dot[r][n + 1], Q_frag[r], K_frag[2], K_frag[3]);
        }
      }
    }
    float part_scale[PARTS];  // of the keys of each part
#pragma unroll
    for (int i = 0; i < PARTS; ++i) part_scale[i] = BY_KEY ? 1.0f : K_scale_tile[i];
    float S_acc[MMA_ROWS][MMA_KEYS][4];  // the factor is still to come
#pragma unroll
    for (int n = 0; n < MMA_KEYS; ++n) {
      float2 k_scale = {1.0f, 1.0f};
      if (BY_KEY) k_scale = *reinterpret_cast<const float2*>(K_scale_tile + n * 8 + t * 2);
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          S_acc[r][n][i] = float(zeros.tiles->without(
                               dot[r][n][i], row0 + r * 16 + g + i / 2 * 8, step % NUM_STAGES,
                               n * 8 + t * 2 + i % 2)) *
                           (i % 2 ? k_scale.y : k_scale.x);  // R3
    }

    // S4 softmax
    if (!scores.are_products(q0 + row0, WARP_Q, kv0, BLOCK_KV)) {
      scores.settle(S_acc, q0 + row0, kv0, [&](int r, int n, int i) {
        const float scale = part_scale[part_of(n * 8)], x = S_acc[r][n][i];
        if constexpr (NATURAL_SCORES) return x * row_factor(Q_factor[r][i / 2], scale);  // R3
        return x + 0.0f * scale;                                                         // exact
      });
      spare_masked(part_scale);
    }
    uint32_t P_frag[BLOCK_KV / 16][MMA_ROWS][4];  // two key tiles of S are one k step of P
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r) {
      auto factor = [&](int h, int n) {  // to log2 units
        return row_factor(Q_factor[r][h], part_scale[part_of(n * 8)]);
      };
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
            P_frag[n / 2][r][n % 2 * 2 + h] = pack_rn<elem16_t>(x, y);                     // R5
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
          mma_m16n8k16<elem16_t>(O_acc[r][c], P_frag[k][r], V_frag[0], V_frag[1]);      // R6
          mma_m16n8k16<elem16_t>(O_acc[r][c + 1], P_frag[k][r], V_frag[2], V_frag[3]);  // R6
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
      state[r][h].l = l_of_Q_row(state[r][h], Q_factor[r][h]);
      const float inverse_l = state[r][h].inverse_l();
      const int row = row0 + r * 16 + g + h * 8;
      // Smoothing took one number off every score of a row: O is unchanged, lse gets it back.
      if (LSE && quant.K_mean) {
        const float* K_mean = quant.K_mean  // [HEAD_DIM]
                              + (batch * p.heads_kv + head_kv) * HEAD_DIM;
        const int8_t* Q_row = Q + min(row, p.len_q - 1 - q0) * p.Q_stride.len;  // [HEAD_DIM]
        const float dot = mean_dot<4>(Q_row, K_mean, zeros.of_row(row, state[r][h].M > NEG_INF));
        if (state[r][h].M > NEG_INF) state[r][h].M += Q_factor[r][h] * dot;  // R3
      }
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
