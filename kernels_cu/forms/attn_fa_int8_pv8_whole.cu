// attn_fa_int8_pv8_whole -- fa_int8 with P and V in 8 bits, O kept as whole numbers.
//
// Idea         O stays in int32 from the first key to the last. Codes of P are multiples of a power
//              of two that follows the largest weight of each tile. A shift moves O from one power
//              to the next, and products of a tile are added directly to O. This takes one
//              instruction for each element of O and tile, in place of a conversion and an fma.
// Differs from attn_fa_int8_pv8: S4 has one M for row and tile, an integer, and l is an integer,
//              too. S5 has one level of sums. S6 multiplies by V's scale and 1/l at once.
//              (diff forms/attn_fa_int8_pv8.cu forms/attn_fa_int8_pv8_whole.cu)
//              The diff is long because the state of a row differs, and so do the updates of O
//              between tiles. WholeState repeats the methods of ShiftState in integers: M as the
//              bits of a float, and l as a sum by dp4a, take fewer instructions.
// Kept simple  P in u8, V in INT8 with one scale per channel, no zero points, softcap or bias. The
//              rest is in attn_fa_int8_pv8, also scales of V by tile, which are more accurate.
//              Scores below -WHOLE, about -1.2e7 in log2 units, are not distinguished.
// Rounding     R1 by quantize.cu; R3 dot to float (exact), times K scale, times Q scale; R4 exp2,
//              R5 P to 8 bits, R6 l, and what shifts drop of it and of O, R7 O to float, times the
//              channel's scale, times 1/l, plus the mean, and store (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/codes/head_scales.cuh"
#include "prims/codes/mean_dot.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/mma_tiles.cuh"
#include "prims/codes/p_codes.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/score/shift_state.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int V_CHUNKS = BLOCK_KV / 16;  // 16-byte chunks per channel of V
// Resident blocks per SM: three, twelve warps whose waits overlap, if registers allow.
constexpr int RESIDENT = HEAD_DIM <= 64 && NUM_WARPS == 4 ? 3 : 1;
constexpr bool ONE_K_SCALE = GROUP_KV % BLOCK_KV == 0;  // a tile has one scale, used once per row
// Then the largest integer of a row gives its largest score, at two comparisons per instruction.
constexpr bool BY_DOTS = ONE_K_SCALE;
// State of four rows is in shared memory if its registers spilled; otherwise its addresses did.
constexpr bool FEW_REGISTERS = RESIDENT > 1;
constexpr bool EXACT_L_SHARED =
    LSE && HEAD_DIM <= 128 &&
    (FEW_REGISTERS || VARLEN || VEC < 8 && __CUDA_ARCH__ == 800 || __CUDA_ARCH__ >= 900);
constexpr bool HIGHEST_SHARED =
    FEW_REGISTERS && (VARLEN || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ >= 900 && !ONE_K_SCALE);
constexpr int WATCH_STEPS = 12;  // how often l is looked at
constexpr int L_BITS = 7;        // l is in units of 2^(M - L_BITS): shifts drop next to nothing
static_assert(
    WATCH_STEPS * BLOCK_KV * 255 << LOWER_BITS < 3 << (SUM_BITS - 2),
    "BLOCK_KV must leave what WATCH_STEPS steps add to l, once M has fallen, in 3/4 of its range");

struct SharedStorage {
  alignas(128) int8_t Q[BLOCK_Q * CODES_PAD];
  alignas(128) int8_t K[NUM_STAGES][BLOCK_KV * CODES_PAD];
  alignas(128) int8_t V[NUM_STAGES][HEAD_DIM_PAD * BLOCK_KV];
  float K_scale[NUM_STAGES][BLOCK_KV];
  float Q_factor[BLOCK_Q];  // Q scale and softmax scale of each row: registers are few
  int highest[MMA_ROWS][2][HIGHEST_SHARED ? NUM_THREADS : 1];    // of each thread's own
  float exact_l[MMA_ROWS][2][EXACT_L_SHARED ? NUM_THREADS : 1];  // likewise
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

// The state of a row. M, an integer, is the bits of the float M + WHOLE: ordered as floats, NaN
// above all, with equal differences up to 2^22. Past that a step of M is a step of float32.
// Below -WHOLE bits are negative and have no order.
struct WholeState {
  int M;  // weights are in units of 2^M
  int l;  // this lane's part of the sum of codes of P

  static constexpr int LOWEST = LOWER_BITS;  // finite for subtraction at this distance, too
  static constexpr int LEAST = 1 << 23;      // the bits of the least M that is above -WHOLE

  __device__ __forceinline__ WholeState() : M(LOWEST), l(0) {}

  __device__ __forceinline__ float M_number() const { return __int_as_float(M) - WHOLE; }

  // From now on M is so high that the current l is below a quarter of its range. Weights until the
  // next check sum to less than the rest.
  __device__ __forceinline__ void keep_in_range(int& highest) const {
    const int least_rise = exponent_of(shfl_sum<4>(float(l))) - L_BITS + 3 - SUM_BITS;
    highest = max(highest, M + least_rise + LOWER_BITS);
  }

  // M for scores whose largest is m, so that they weigh less than 2^CODE_BITS; negative if m is
  // below -WHOLE. M is rounded down, so it never exceeds m.
  __device__ __forceinline__ static int M_of(float m) {
    return __float_as_int(__fadd_rd(m, WHOLE + (1 - CODE_BITS)));
  }

  // Choose that M, or the least that may follow. Returns how much higher it is than it was.
  __device__ __forceinline__ int advance(int M_of_step, int& highest) {
    const int M_old = M;
    highest = max(highest, M_of_step);
    M = max(M_of_step, highest - LOWER_BITS);
    const int rise = M - M_old;
    l = shifted(l, right_shift(-rise));  // R6
    return rise;
  }
};

static_assert(
    GROUP_Q >= 1 && GROUP_KV >= 1, "fa_int8 needs GROUP_Q and GROUP_KV, the rows per scale");
static_assert(
    BLOCK_KV % 32 == 0 && VALUES_PAD % BLOCK_KV == 0,
    "BLOCK_KV must be 32, 64 or 128: whole mma of 32 keys, and a divisor of V's padding");
static_assert(GROUP_V == 1 << 30, "this form takes one scale for a channel of V");
static_assert(P_TYPE == PType::U8, "this form takes P in u8");
static_assert(!NATURAL_SCORES && !ZERO_POINTS, "softcap, bias and zero points are left to pv8");
static_assert(
    NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next tile arrives during this one");

extern "C" __global__ __launch_bounds__(NUM_THREADS, RESIDENT) void attn_fa_int8_pv8_whole(
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
  const int row0 = warp_id() * WARP_Q;             // first row of this warp in the block
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  // Where this lane points the first ldmatrix of each operand; swizzled_from() goes on from there.
  const uint32_t Q_lane = chunk_address<CODE_CHUNKS>(smem.Q, row0 + lane_id() % 16, lane_id() / 16);
  const uint32_t K_lane = key_address<CODE_CHUNKS>(smem.K[0]);
  const uint32_t V_lane = shared_address(
      swizzled<V_CHUNKS>(smem.V[0], lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2));
  const Scores scores(p, batch, head);

  // S1 load Q: the group also holds the first K, V tile
  load_tile_async<BLOCK_Q, HEAD_DIM, CODES_PAD, CODE_VEC>(
      smem.Q, Q, p.Q_stride.len, p.len_q - q0, thread_id());
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
      load_tile_async<HEAD_DIM_PAD, BLOCK_KV, BLOCK_KV, 16>(
          smem.V[stage], V + kv0, p.V_stride.len, HEAD_DIM, thread_id_anew());
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES - 1; ++i) load_kv(first_step + i);

  WholeState state[MMA_ROWS][2];  // rows g and g + 8 of each row tile
  int own_highest[MMA_ROWS][2];
  float own_exact_l[MMA_ROWS][2];
  auto highest = [&](int r, int h) -> int& {  // M so far
    return HIGHEST_SHARED ? smem.highest[r][h][thread_id_anew()] : own_highest[r][h];
  };
  auto exact_l = [&](int r, int h) -> float& {  // this lane's part of the sum of weights
    return EXACT_L_SHARED ? smem.exact_l[r][h][thread_id_anew()] : own_exact_l[r][h];
  };
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) highest(r, h) = WholeState::LOWEST, exact_l(r, h) = 0.0f;
  const bool may_overflow = p.len_kv >= 1 << (SUM_BITS - CODE_BITS - LOWER_BITS);
  int watched = may_overflow ? first_step : num_steps;  // the next step that looks at l
  int32_t O_acc[MMA_ROWS][MMA_COLS][4] = {};
  for (int step = first_step; step < num_steps; ++step) {
    const int kv0 = keys.key(step * BLOCK_KV);
    const uint32_t K_tile = K_lane + step % NUM_STAGES * sizeof(smem.K[0]);
    const uint32_t V_tile = V_lane + step % NUM_STAGES * sizeof(smem.V[0]);
    const float* K_scale_tile = smem.K_scale[step % NUM_STAGES];  // [BLOCK_KV]
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
        factor[r][h] = smem.Q_factor[row0 + r * 16 + g + h * 8] * k_scale;  // R3
        if (BY_DOTS) m[r][h] = float(largest_of_row(dot[r], h));
      }
#pragma unroll
    for (int n = 0; n < MMA_KEYS; ++n) {
      const float2 k_scale = *reinterpret_cast<const float2*>(K_scale_tile + n * 8 + t * 2);
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          S_acc[r][n][i] = float(dot[r][n][i]) * (ONE_K_SCALE ? 1.0f
                                                  : i % 2     ? k_scale.y
                                                              : k_scale.x);  // R3
    }

    // S4 softmax
    // NOTE: rows are computed again here; kept, they would take registers through the loop.
    const int first_row = q0 + (VARLEN ? thread_id_anew() / WARP_SIZE * WARP_Q : row0);
    const bool are_products = scores.are_products(first_row, WARP_Q, kv0, BLOCK_KV);
    if (!are_products) {
      const int thread = thread_id_anew(), lane = thread % WARP_SIZE;
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r) {
        const int q = q0 + thread / WARP_SIZE * WARP_Q + r * 16 + lane / 4;
        const ScoreMask by_place(p, q, kv0);
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = q + i / 2 * 8, key = kv0 + n * 8 + lane % 4 * 2 + i % 2;
            S_acc[r][n][i] += 0.0f * factor[r][i / 2];  // exact
            if (!(MASK ? scores.admit(row, key) : by_place.admits(n * 4 + i)))
              S_acc[r][n][i] = NEG_INF;
          }
      }
      // NOTE: -inf times 0 is not -inf. A NaN scale has reached the keys of its rows by now, except
      // masked keys.
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) factor[r][h] = fmaxf(factor[r][h], __int_as_float(1));
    }
    if (!BY_DOTS || !are_products)
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) m[r][h] = largest_of_row(S_acc[r], h);
    if (step == watched) {
      watched += WATCH_STEPS;
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) state[r][h].keep_in_range(highest(r, h));
    }
    int M_of_step[MMA_ROWS][2], signs = 0;
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = __fmul_rd(shfl_max_nan<4>(m[r][h]), factor[r][h]);  // R3
        M_of_step[r][h] = WholeState::M_of(largest);
        signs |= M_of_step[r][h];
      }
    // If no score of a row exceeds -WHOLE so far, all its keys weigh the same: 2^7, reduced by
    // rises of M due to l. The same branch takes rows without any key so far.
    if (__any_sync(FULL_WARP, signs < 0))
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (M_of_step[r][h] >= 0 || highest(r, h) >= WholeState::LEAST) continue;
          factor[r][h] = 1.0f;
          const float S = (CODE_BITS - 1 - WHOLE) - float(highest(r, h) - LOWER_BITS);
#pragma unroll
          for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i)
              if (S_acc[r][n][i] != NEG_INF) S_acc[r][n][i] = S;
        }
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int rise = state[r][h].advance(M_of_step[r][h], highest(r, h));
        if (LSE) exact_l(r, h) *= power_of_two(max(-rise, -126));  // exact
#pragma unroll
        for (int c = 0; c < MMA_COLS; ++c)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i)
            O_acc[r][c][i] = shifted(O_acc[r][c][i], right_shift(-rise));  // R6
      }
    uint32_t P_frag[MMA_ROWS][BLOCK_KV / 32][4];  // four key tiles of S are one k step of P
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weights = exact_l(r, h);  // their sum
#pragma unroll
        for (int i = h; i < BLOCK_KV / 8; i += 2)  // two key tiles: four neighbours in V
          P_frag[r][i / 4][i % 4] = weigh_codes<false>(
              S_acc[r], i, factor[r][h], state[r][h].M_number(), weights);  // R4, R5
        if (LSE) exact_l(r, h) = weights;
      }
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 8; ++i)
        state[r][i % 2].l = __dp4a(
            P_frag[r][i / 4][i % 4], 0x01010101u << L_BITS, uint32_t(state[r][i % 2].l));  // exact
    }

    // S5 output
#pragma unroll
    for (int c = 0; c < MMA_COLS; c += 2) {
#pragma unroll
      for (int k = 0; k < BLOCK_KV / 32; ++k) {
        uint32_t V_frag[4];  // two column tiles, two halves of k
        ldmatrix_x4(V_frag, swizzled_from<V_CHUNKS>(V_tile, c * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_p_codes(O_acc[r][c], P_frag[r][k], V_frag[0], V_frag[1]);
          mma_p_codes(O_acc[r][c + 1], P_frag[r][k], V_frag[2], V_frag[3]);
        }
      }
    }
  }

  // S6 store
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float M = state[r][h].M_number();
      // NOTE: the code of NaN is 0. So l is increased by a term that is 0 unless M is NaN.
      const float codes = shfl_sum<4>(float(state[r][h].l)) * power_of_two(-L_BITS);  // R6
      const float l = fmaf(M, 0.0f, codes);
      const float inverse_l = l == 0.0f ? 0.0f : 1.0f / l;
      // NOTE: past 2^24 weights may be infinite, where M is in steps of more than 1. The sum of
      // codes in their place, as in ShiftState, spilled on compute capability 8.0.
      const float weights = fminf(shfl_sum<4>(exact_l(r, h)), 0x1.fffffep127f);
      const float sum_of_weights = fmaf(M, 0.0f, weights);  // R6
      const int row = row0 + r * 16 + g + h * 8;
      // Smoothing took one number off every score of a row: O is unchanged, lse gets it back.
      if (LSE && quant.K_mean) {
        const float* K_mean = quant.K_mean  // [HEAD_DIM]
                              + (batch * p.heads_kv + head_kv) * HEAD_DIM;
        // NOTE: from the parameters, not from Q, which would keep registers through the loop.
        const int8_t* Q_row = static_cast<const int8_t*>(p.Q)  // [HEAD_DIM]
                              + batch * p.Q_stride.batch + head * p.Q_stride.head +
                              min(q0 + row, p.len_q - 1) * p.Q_stride.len;
        const float dot = mean_dot<4>(Q_row, K_mean);
        if (l > 0.0f) M += smem.Q_factor[row] * dot;  // R3
      }
      if (q0 + row >= p.len_q) continue;
      if constexpr (LSE)
        if (t == 0) lse_of(p, batch_head, head)[q0 + row] = (M + log2f(sum_of_weights)) * LN2;
      const float* V_scale = values.V_scale  // [HEAD_DIM]
                             + batch * values.V_scale_stride_batch +
                             head_kv * values.V_scale_stride_head +
                             first_scale<GROUP_V>(call.cu_seqlens_k, batch) * HEAD_DIM;
      const float* V_mean = values.V_mean  // [HEAD_DIM]
                            + (batch * p.heads_kv + head_kv) * HEAD_DIM;
      const bool has_scale = inverse_l != 0.0f;  // a row without keys stays 0
      const bool has_mean = values.V_mean && has_scale;
#pragma unroll
      for (int c = 0; c < MMA_COLS; ++c) {
        float value[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int col = min(c * 8 + t * 2 + j, HEAD_DIM - 1);
          value[j] = fmaf(
              float(O_acc[r][c][2 * h + j]), (has_scale ? V_scale[col] : 0.0f) * inverse_l,
              has_mean ? V_mean[col] : 0.0f);  // R7
        }
        store_sums(O + row * p.O_stride.len, c * 8 + t * 2, value[0], value[1]);
      }
    }
}
