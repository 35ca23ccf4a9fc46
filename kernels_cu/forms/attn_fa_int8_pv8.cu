// attn_fa_int8_pv8 -- fa_int8 with P and V in 8 bits too: both products over codes.
//
// Idea         The second product runs at the rate of the first. V is codes, one scale per channel.
//              P is rounded to codes, in steps of the largest exponential of its tile. The product
//              of a tile is an exact integer; float32 adds the tiles, each with its factor.
// Differs from attn_fa_int8 in S4 above all, hence the longest diff: there M lags behind all tiles,
//              here each tile subtracts its own maximum. Scores are in units of code 1, so a code
//              is a rounded exponential. A single scale of K in a tile joins the row's factor, and
//              the maximum is found among integers. l sums codes, lse weights. S2 loads V by
//              channels, because 8-bit fragments need neighbours along the keys, in an order that
//              makes the scores of a lane neighbours (quantize.cu). S5 adds twice: in a tile, less
//              V's zero points, then over tiles. S6 applies V's scale per channel and adds V's
//              mean. Row factors lie in shared memory and loads recompute their thread, to leave
//              registers to the loop. (diff attn_fa_int8.cu forms/attn_fa_int8_pv8.cu)
// Kept simple  The scale of a row is scale[row / GROUP], of a value V_scale[key /
//              GROUP_V][channel].
// Rounding     R1 by quantize.cu; R3 dot to float (exact), times K scale, times Q scale; R4 M, up,
//              and exp2, R5 P to 8 bits, R6 alpha, beta, the sum over tiles and l, of integer codes
//              exact within a tile, R7 V's scale, times 1/l, plus the mean, and store
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/codes/head_scales.cuh"
#include "prims/codes/mean_dot.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/mma_tiles.cuh"
#include "prims/score/fragment_rows.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/codes/p_codes.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/codes/value_zeros.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/codes/zero_points.cuh"

constexpr int V_CHUNKS = BLOCK_KV / 16;  // 16-byte chunks per channel of V
// Resident blocks per SM: three, twelve warps whose waits overlap, if registers allow.
constexpr int RESIDENT = HEAD_DIM <= 64 && NUM_WARPS == 4 ? 3 : 1;
constexpr bool ONE_V_SCALE = GROUP_V == 1 << 30;        // a channel has one scale, used once, in S6
constexpr bool ONE_K_SCALE = GROUP_KV % BLOCK_KV == 0;  // a tile has one scale, used once per row
// Then the largest integer of a row gives its largest score, at two comparisons per instruction.
// With the sums of lse, registers for float maxima of masked steps were spilled.
constexpr bool BY_DOTS = ONE_K_SCALE && !ZERO_POINTS && !(CAUSAL && LSE);
// The sum for lse alone. In these forms its registers, or others in their place, were spilled.
constexpr bool EXACT_L_SHARED = LSE && SUMS_CODES && (HEAD_DIM < 128 || VARLEN);

struct SharedStorage {
  alignas(128) int8_t Q[BLOCK_Q * CODES_PAD];
  alignas(128) int8_t K[NUM_STAGES][BLOCK_KV * CODES_PAD];
  alignas(128) int8_t V[NUM_STAGES][HEAD_DIM_PAD * BLOCK_KV];
  float K_scale[NUM_STAGES][BLOCK_KV];
  float V_scale[NUM_STAGES][HEAD_DIM_PAD];  // not read if ONE_V_SCALE
  float Q_factor[BLOCK_Q];  // Q scale and softmax scale of each row: registers are few
  float exact_l[MMA_ROWS][2][EXACT_L_SHARED ? NUM_THREADS : 1];  // of each thread's own
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + ZERO_TILES_BYTES + VALUE_ZEROS_BYTES;

static_assert(
    GROUP_Q >= 1 && GROUP_KV >= 1, "fa_int8 needs GROUP_Q and GROUP_KV, the rows per scale");
static_assert(
    BLOCK_KV % 32 == 0 && VALUES_PAD % BLOCK_KV == 0,
    "BLOCK_KV must be 32, 64 or 128: whole mma of 32 keys, and a divisor of V's padding");
static_assert(GROUP_V % BLOCK_KV == 0, "GROUP_V must be whole tiles: a tile has one V scale");
static_assert(
    NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next tile arrives during this one");

extern "C" __global__ __launch_bounds__(NUM_THREADS, RESIDENT) void attn_fa_int8_pv8(
    const __grid_constant__ AttnParams call, const __grid_constant__ QuantParams quant,
    const __grid_constant__ ValueParams values) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = (q_blocks - 1 - blockIdx.x % q_blocks) * BLOCK_Q;  // longest causal rows first
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch<int8_t, int8_t>(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const int8_t* Q = static_cast<const int8_t*>(p.Q)  // [len_q, HEAD_DIM] codes, from row q0
                    + batch * p.Q_stride.batch + head * p.Q_stride.head + q0 * p.Q_stride.len;
  const int8_t* K = static_cast<const int8_t*>(p.K)  // [len_kv, HEAD_DIM] codes
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const int8_t* V = static_cast<const int8_t*>(call.V)  // [HEAD_DIM, V_stride.len] codes
                    + batch * p.V_stride.batch + head_kv * p.V_stride.head +
                    first_scale<VALUES_PAD>(call.cu_seqlens_k, batch) * VALUES_PAD;
  elem_t* O = static_cast<elem_t*>(p.O)  // [len_q, HEAD_DIM], from row q0
              + batch * p.O_stride.batch + head * p.O_stride.head + q0 * p.O_stride.len;
  const float* Q_scale = Q_scale_of(call, quant, batch, head);     // [ceil(len_q / GROUP_Q)]
  const float* K_scale = K_scale_of(call, quant, batch, head_kv);  // [ceil(len_kv / GROUP_KV)]
  const float* V_scale = values.V_scale  // [ceil(len_kv / GROUP_V), HEAD_DIM]
                         + batch * values.V_scale_stride_batch +
                         head_kv * values.V_scale_stride_head +
                         first_scale<GROUP_V>(call.cu_seqlens_k, batch) * HEAD_DIM;
  const ValueZeros V_zeros(
      shared_bytes + sizeof(SharedStorage) + ZERO_TILES_BYTES,
      values.V_zero + (V_scale - values.V_scale));
  const int row0 = warp_id() * WARP_Q;             // first row of this warp in the block
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  // Where this lane points the first ldmatrix of each operand; swizzled_from() goes on from there.
  const uint32_t Q_lane = chunk_address<CODE_CHUNKS>(smem.Q, row0 + lane_id() % 16, lane_id() / 16);
  const uint32_t K_lane = key_address<CODE_CHUNKS>(smem.K[0]);
  const uint32_t V_lane = key_address<V_CHUNKS>(smem.V[0]);
  const Scores scores(p, batch, head);
  const ZeroPoints zeros(
      shared_bytes + sizeof(SharedStorage), call, quant, Q_scale, K_scale, batch, head, head_kv);

  // S1 load Q: the group also holds the first K, V tile
  load_tile_async<BLOCK_Q, HEAD_DIM, CODES_PAD, CODE_VEC>(
      smem.Q, Q, p.Q_stride.len, p.len_q - q0, thread_id());
  zeros.load_rows(q0, p.len_q);
  for (int row = thread_id(); row < BLOCK_Q; row += NUM_THREADS)
    smem.Q_factor[row] =
        row_factor(softmax_scale(p), Q_scale[min(q0 + row, p.len_q - 1) / GROUP_Q]);  // R3
  const KeptKeys keys(p, batch, head, q0, kv_begin(p, q0), kv_end(p, q0, BLOCK_Q));
  const int first_step = keys.begin / BLOCK_KV;
  const int num_steps = ceil_div(keys.end, BLOCK_KV);
  auto load_kv = [&](int step) {  // into its stage; one group per step, empty past the end
    const int kv0 = keys.key(step * BLOCK_KV), stage = step % NUM_STAGES;
    if (step < num_steps) {
      load_tile_async<BLOCK_KV, HEAD_DIM, CODES_PAD, CODE_VEC>(
          smem.K[stage], K + kv0 * p.K_stride.len, p.K_stride.len, p.len_kv - kv0,
          thread_id_anew());
      gather_async<BLOCK_KV>(smem.K_scale[stage], [&](int key) {
        return K_scale + min(kv0 + key, p.len_kv - 1) / GROUP_KV;
      });
      zeros.load_keys(stage, kv0, p.len_kv);
      load_tile_async<HEAD_DIM_PAD, BLOCK_KV, BLOCK_KV, 16>(
          smem.V[stage], V + kv0, p.V_stride.len, HEAD_DIM, thread_id_anew());
      if (!ONE_V_SCALE)
        gather_async<HEAD_DIM_PAD>(smem.V_scale[stage], [&](int col) {
          return V_scale + kv0 / GROUP_V * HEAD_DIM + min(col, HEAD_DIM - 1);
        });
      V_zeros.load(stage, kv0);
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_kv(first_step + i);

  RowState state[MMA_ROWS][2];  // rows g and g + 8 of each row tile
  float own_exact_l[MMA_ROWS][2];
  auto exact_l = [&](int r, int h) -> float& {  // this lane's part of the sum of weights
    return EXACT_L_SHARED ? smem.exact_l[r][h][thread_id_anew()] : own_exact_l[r][h];
  };
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r) exact_l(r, 0) = exact_l(r, 1) = 0.0f;
  float O_acc[MMA_ROWS][MMA_COLS][4] = {};
  for (int step = first_step; step < num_steps; ++step) {
    const int kv0 = keys.key(step * BLOCK_KV);
    const uint32_t K_tile = K_lane + step % NUM_STAGES * sizeof(smem.K[0]);
    const uint32_t V_tile = V_lane + step % NUM_STAGES * sizeof(smem.V[0]);
    const float* K_scale_tile = smem.K_scale[step % NUM_STAGES];  // [BLOCK_KV]
    const float* V_scale_tile = smem.V_scale[step % NUM_STAGES];  // [HEAD_DIM_PAD]
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
    float factor[MMA_ROWS][2];           // the scale of Q, and of K if a tile has only one
    float S_acc[MMA_ROWS][MMA_KEYS][4];  // without that factor
    float m[MMA_ROWS][2];                // this lane's largest score of a row
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float k_scale = ONE_K_SCALE ? K_scale_tile[0] : 1.0f;
        factor[r][h] = row_factor(smem.Q_factor[row0 + r * 16 + g + h * 8], k_scale);  // R3
        if (BY_DOTS) m[r][h] = float(largest_of_row(dot[r], h));
      }
#pragma unroll
    for (int n = 0; n < MMA_KEYS; ++n) {
      const float2 k_scale = *reinterpret_cast<const float2*>(K_scale_tile + n * 8 + t * 2);
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          S_acc[r][n][i] = float(zeros.tiles->without(
                               dot[r][n][i], row0 + r * 16 + g + i / 2 * 8, step % NUM_STAGES,
                               n * 8 + t * 2 + i % 2)) *
                           (ONE_K_SCALE ? 1.0f
                            : i % 2     ? k_scale.y
                                        : k_scale.x);  // R3
    }

    // S4 softmax
    const bool are_products = scores.are_products(q0 + row0, WARP_Q, kv0, BLOCK_KV);
    if (!are_products) {
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int n = 0; n < MMA_KEYS; ++n) {
            const int row = q0 + row0 + r * 16 + g + i / 2 * 8, key = kv0 + n * 8 + t * 2 + i % 2;
            if constexpr (NATURAL_SCORES)
              S_acc[r][n][i] = scores.of(S_acc[r][n][i] * factor[r][i / 2], row, key);  // R3
            else
              S_acc[r][n][i] += 0.0f * factor[r][i / 2];  // exact
            if (!scores.admit(row, key)) S_acc[r][n][i] = NEG_INF;
          }
      // NOTE: a NaN scale has reached the keys of its rows, except masked keys.
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (factor[r][h] != factor[r][h]) factor[r][h] = 1.0f;
    }
    if (!BY_DOTS || !are_products)
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) m[r][h] = largest_of_row(S_acc[r], h);
    RowState tile[MMA_ROWS][2];  // of this step alone
    bool rises = false;
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        tile[r][h].M = M_of_codes(shfl_max_nan<4>(m[r][h]), factor[r][h]);
        rises |= tile[r][h].M > state[r][h].M;
      }
    // NOTE: most steps raise no row's maximum: every alpha is 1, l and O stay as they are.
    if (__any_sync(FULL_WARP, rises))
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float alpha = state[r][h].advance(tile[r][h].M);
          if (SUMS_WEIGHTS) exact_l(r, h) *= alpha;  // R6
          scale_row(O_acc[r], h, alpha);             // R6
        }
    float beta[MMA_ROWS][2];  // brings the weights of this tile to the unit of the row
    uint32_t P_frag[MMA_ROWS][BLOCK_KV / 32][4];  // four key tiles of S are one k step of P
    p_sum_t P_sum[MMA_ROWS][4] = {};              // of the codes of a row
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        beta[r][h] = ex2_approx_ftz((tile[r][h].M - state[r][h].M_finite()) * M_TO_LOG2);  // R4
#pragma unroll
        for (int i = h; i < BLOCK_KV / 8; i += 2)  // two key tiles: four neighbours in V
          P_frag[r][i / 4][i % 4] =
              weigh_codes(S_acc[r], i, factor[r][h], tile[r][h].M_finite(), tile[r][h].l);  // R5
        if (SUMS_WEIGHTS) exact_l(r, h) = fmaf(tile[r][h].l, beta[r][h], exact_l(r, h));    // R6
      }
      sum_p_codes(P_sum[r], P_frag[r]);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        state[r][h].l = fmaf(float(P_sum[r][2 * h + 1]), beta[r][h], state[r][h].l);  // R6
    }

    // S5 output
#pragma unroll
    for (int c = 0; c < MMA_COLS; c += 2) {
      p_sum_t sum[MMA_ROWS][2][4] = {};  // of this tile, two column tiles
#pragma unroll
      for (int k = 0; k < BLOCK_KV / 32; ++k) {
        uint32_t V_frag[4];  // two column tiles, two halves of k
        ldmatrix_x4(V_frag, swizzled_from<V_CHUNKS>(V_tile, c * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_p_codes(sum[r][0], P_frag[r][k], V_frag[0], V_frag[1]);
          mma_p_codes(sum[r][1], P_frag[r][k], V_frag[2], V_frag[3]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float2 v_scale = {1.0f, 1.0f};
        if (!ONE_V_SCALE)
          v_scale = *reinterpret_cast<const float2*>(V_scale_tile + (c + j) * 8 + t * 2);
        const int2 v_zero = V_zeros.pair(step % NUM_STAGES, (c + j) * 8 + t * 2);
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            O_acc[r][c + j][i] = fmaf(
                float(sum[r][j][i] - P_sum[r][i / 2 * 2] * (i % 2 ? v_zero.y : v_zero.x)),
                beta[r][i / 2] * (i % 2 ? v_scale.y : v_scale.x), O_acc[r][c + j][i]);  // R6
      }
    }
  }

  // S6 store
  if (ONE_V_SCALE && p.len_kv > 0) {  // a sequence without keys has no scales
    // NOTE: from the parameters, not from V_scale, which would keep registers through the loop.
    const float* scale = values.V_scale  // [HEAD_DIM]
                         + batch * values.V_scale_stride_batch +
                         head_kv * values.V_scale_stride_head +
                         first_scale<GROUP_V>(call.cu_seqlens_k, batch) * HEAD_DIM;
#pragma unroll
    for (int c = 0; c < MMA_COLS; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float v_scale = scale[min(c * 8 + t * 2 + i % 2, HEAD_DIM - 1)];
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) O_acc[r][c][i] *= v_scale;  // R7
      }
  }
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum_of_weights = shfl_sum<4>(exact_l(r, h));                   // R6
      state[r][h].l = SUMS_CODES ? shfl_sum<4>(state[r][h].l) : sum_of_weights;  // R6
      const float inverse_l = state[r][h].inverse_l();
      const int row = row0 + r * 16 + g + h * 8;
      // Smoothing took one number off every score of a row: O is unchanged, lse gets it back.
      if (LSE && quant.K_mean) {
        const float* K_mean = quant.K_mean  // [HEAD_DIM]
                              + (batch * p.heads_kv + head_kv) * HEAD_DIM;
        // NOTE: from the parameters, not from Q, which would keep registers through the loop.
        const int8_t* Q_row = static_cast<const int8_t*>(p.Q)  // [HEAD_DIM]
                              + batch * p.Q_stride.batch + head * p.Q_stride.head +
                              min(q0 + row, p.len_q - 1) * p.Q_stride.len;
        const float dot = mean_dot<4>(Q_row, K_mean, zeros.of_row(row, state[r][h].M > NEG_INF));
        if (state[r][h].M > NEG_INF) state[r][h].M += smem.Q_factor[row] * dot;  // R3
      }
      if (q0 + row >= p.len_q) continue;
      state[r][h].l = finite_or(sum_of_weights, state[r][h].l) * CODE_UNIT;  // R7
      if constexpr (LSE)
        if (t == 0) lse_of(p, batch_head, head)[q0 + row] = state[r][h].lse();
      const float* V_mean = values.V_mean  // [HEAD_DIM]
                            + (batch * p.heads_kv + head_kv) * HEAD_DIM;
      const bool has_mean = values.V_mean && inverse_l != 0.0f;  // a row without keys stays 0
#pragma unroll
      for (int c = 0; c < MMA_COLS; ++c) {
        const int col = c * 8 + t * 2;
        const float mean0 = has_mean ? V_mean[min(col, HEAD_DIM - 1)] : 0.0f;
        const float mean1 = has_mean ? V_mean[min(col + 1, HEAD_DIM - 1)] : 0.0f;
        store_sums(
            O + row * p.O_stride.len, col, fmaf(O_acc[r][c][2 * h], inverse_l, mean0),
            fmaf(O_acc[r][c][2 * h + 1], inverse_l, mean1));  // R7
      }
    }
}
