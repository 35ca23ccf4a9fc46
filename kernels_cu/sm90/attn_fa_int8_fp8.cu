// attn_fa_int8_fp8 -- Hopper form: Q K^T by wgmma over INT8 codes, P V by wgmma over e4m3.
//
// Idea         Two levels of sums. A product of 8-bit floats keeps 14 bits of its sum, including
//              the accumulator that it starts from. So each tile starts from zero, with P in units
//              of the tile's largest weight. The result is added to O in float32, with the factor
//              of the tile. So the error of the instruction is that of one tile.
// Differs from the Hopper form with P in u8: S4 computes the maximum of the tile, and has alpha and
//              beta in place of shifts. S5 has two levels of sums. S6 converts no integers. Q and K
//              may have zero points, as in the Hopper form with V in 16 bits.
//              (diff attn_fa_int8_pv8.cu attn_fa_int8_fp8.cu)
// Kept simple  One scale per channel of V. At least 16 adjacent keys share a scale. head_dim up to
//              128: past it registers hold no second level. The portable form does the rest. Packed
//              sequences and block masks as in fa_tc: code 0 times a finite code is 0.
// Scores       With softcap, bias or mask as in the form by tile (attn_fa_int8_pv8_by_tile.cu).
// Rounding     R1 by quantize.cu, or of Q in quantize_q.cuh; R3 dot to float (exact), softcap and
//              bias, the factor of both scales, within R4's fma; R4 M, up, and exp2, R5 P to e4m3,
//              R6 alpha, beta, l, the tensor core within a tile and the sum over tiles, R7 times
//              the channel's scale and 1/l, plus the mean, and store (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/codes/channel_scales.cuh"
#include "prims/config.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/wgmma_8bit.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/io/output.cuh"
#include "prims/codes/p_codes.cuh"
#include "prims/params.cuh"
#include "prims/codes/quantize_q.cuh"
#include "prims/score/score.cuh"
#include "prims/score/score_hook.cuh"
#include "prims/score/step_scores.cuh"
#include "prims/io/varlen.cuh"
#include "prims/schedule/work_tile.cuh"
#include "prims/codes/zero_points_sm90.cuh"
#include "sm90/int8/producer.cuh"
#include "sm90/int8/products.cuh"
#include "sm90/int8/rows.cuh"
#include "sm90/int8/scored_codes.cuh"
#include "sm90/int8/scored_step.cuh"
#include "sm90/int8/step_bits.cuh"
#include "sm90/int8/value_codes.cuh"
#include "sm90/int8/warpgroups.cuh"

constexpr int BEHIND_ALL = 1 << 30;  // a key past every V: the copy engine brings zeros

// O leaves through shared memory if there is room for it.
constexpr bool O_STAGED =
    ELEM_IS_16_BIT &&
    INPUT_BYTES + NUM_STAGES * SCORE_STAGE_BYTES + BLOCK_Q * STORE_BOXES * BOX_BYTES <= 220 * 1024;

struct SharedStorage {
  alignas(1024) int8_t Q[Q_STAGES][Q_BOXES][BLOCK_Q * BOX_BYTES];
  alignas(1024) int8_t K[NUM_STAGES][CODE_BOXES][BLOCK_KV * BOX_BYTES];
  alignas(1024) int8_t V[NUM_STAGES][V_BOXES][O_COLS * BOX_BYTES];
  alignas(1024) elem_t O[O_STAGED ? BLOCK_Q / STORE_ROWS * OWN_BOXES : 1];
  alignas(QUANTIZE_Q ? 1024 : 1) int8_t Q_codes[CODE_BOXES][QUANTIZE_Q ? BLOCK_Q * BOX_BYTES : 1];
  WorkTile tile[Q_STAGES];  // that Q belongs to
  Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  Mbarrier K_full[NUM_STAGES], K_empty[NUM_STAGES];
  Mbarrier V_full[NUM_STAGES], V_empty[NUM_STAGES];
  int step[NUM_STAGES];               // of that K; not read unless LISTED
  float K_scale[NUM_STAGES][SCALES];  // of its keys
  ChannelScales<O_COLS> V_scales[CONSUMERS][Q_STAGES];
  ScorePlaces<SCORED> places;  // of softcap, bias and mask
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + SHARED_ZEROS_BYTES;

static_assert(P_TYPE == PType::E4M3, "this form takes P in e4m3");
static_assert(
    HEAD_DIM <= 128 && (CONSUMERS == 2 || HEAD_DIM <= 64),
    "HEAD_DIM must be 128 at most, and BLOCK_Q 128 past 64: registers hold two levels of sums");

// S2 load K, V: K and V of a step, a ring each.
struct LoadStage {
  static constexpr int V_STEPS = 0;  // stages of a tile that hold V alone
  SharedStorage& smem;
  const TensorMap &K_map, &V_map;
  int V_first;  // column of the sequence

  __device__ __forceinline__ void begin(const AttnParams& call, const WorkTile& tile) {
    V_first = first_column(call, tile);
  }
  __device__ __forceinline__ void operator()(
      const WorkTile& tile, RingPosition<NUM_STAGES> at, const KeyStep& step) {
    mbarrier_arrive_expect_tx(smem.K_full[at.stage], sizeof(smem.K[0]) + step.score_bytes);
    load_K(smem.K[at.stage], K_map, smem.K_full[at.stage], tile, step.kv0);
    // NOTE: rows that keep no key take zeros past the end of V. Unwritten memory may be NaN, and 0
    // times NaN is NaN.
    const int column = step.kept ? V_first + step.kv0 : BEHIND_ALL;
    mbarrier_wait_parity(smem.V_empty[at.stage], at.parity ^ 1);  // this V is no longer read
    mbarrier_arrive_expect_tx(smem.V_full[at.stage], sizeof(smem.V[0]));
    load_V(smem.V[at.stage], V_map, smem.V_full[at.stage], tile, column);
  }
};

// S4 softmax, first half: the M of this tile, in the unit of code 1, rounded up. Returns whether
// scores are masked. `factor` is the factor of unmasked scores. `q` is the first of this lane's two
// rows, the other is q + 8.
__device__ __forceinline__ bool choose_M(
    const AttnParams& p, float (&tile_M)[2], const int32_t (&dot)[BLOCK_KV / 2], Factors& factor,
    const float (&Q_factor)[2], const float (&K_scale)[SCALES], const StepBits<MASK_ALONE>& bits,
    int q, int kv0, int unmasked) {
  make_factors(factor, Q_factor, K_scale);
  tile_M[0] = tile_M[1] = NEG_INF;
  const bool masked = !bits.admit_all(p, q, kv0, unmasked);
  const StepMask<MASK_ALONE> mask(p, q, kv0, bits);
  if (masked) {
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 2; ++i) {
      const int h = i / 2 % 2;
      const float M = M_of_codes(float(dot[i]), factor[i / PART][h]);  // R4
      tile_M[h] = fmaxf(tile_M[h], mask.admits(i) ? M : NEG_INF);
    }
  } else {
#pragma unroll
    for (int j = 0; j < SCALES; ++j) {
      int largest[2];
      largest_dots<false>(largest, dot, mask, j);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        tile_M[h] = fmaxf(tile_M[h], M_of_codes(float(largest[h]), factor[j][h]));  // R4
    }
  }
  tile_M[0] = shfl_max<4>(tile_M[0]), tile_M[1] = shfl_max<4>(tile_M[1]);
  return masked;
}

// The same for scores that are numbers in log2 units, -inf if masked.
__device__ __forceinline__ void choose_M(float (&tile_M)[2], const float (&S_acc)[BLOCK_KV / 2]) {
  float m[2];
  largest_of_rows(m, S_acc);
#pragma unroll
  for (int h = 0; h < 2; ++h) tile_M[h] = M_of_codes(shfl_max_nan<4>(m[h]), 1.0f);  // R4
}

// O += sum of a tile, in the unit of M.
__device__ __forceinline__ void add_tile(
    float (&O_acc)[O_COLS / 2], const float (&sum)[O_COLS / 2], const float (&beta)[2]) {
#pragma unroll
  for (int i = 0; i < O_COLS / 2; ++i) O_acc[i] = fmaf(sum[i], beta[i / 2 % 2], O_acc[i]);  // R6
}

// The row's M rises to the M of the tile, and l and O are rescaled. Beta converts weights of the
// tile to the unit of the row.
__device__ __forceinline__ void follow(
    RowState (&state)[2], const float (&tile_M)[2], float (&O_acc)[O_COLS / 2], float (&beta)[2]) {
  // NOTE: most steps raise no row's maximum: every alpha is 1, l and O stay as they are.
  if (__any_sync(FULL_WARP, tile_M[0] > state[0].M || tile_M[1] > state[1].M)) {
    const float alpha[2] = {state[0].advance(tile_M[0]), state[1].advance(tile_M[1])};
#pragma unroll
    for (int i = 0; i < O_COLS / 2; ++i) O_acc[i] *= alpha[i / 2 % 2];  // R6
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) beta[h] = ex2_approx_ftz(tile_M[h] - state[h].M_finite());  // R4
}

// S4 softmax, second half: codes P of the weights, four keys in a register, the left operand of P
// V. A masked key weighs 0.
// NOTE: integers become floats between the exponentials, because these leave the other pipes mostly
// free. Done before them, the conversions would take as long again.
template <bool MASKED>
__device__ __forceinline__ void weigh(
    const AttnParams& p, RowState (&state)[2], const float (&tile_M)[2], const float (&beta)[2],
    const int32_t (&dot)[BLOCK_KV / 2], const Factors& factor, uint32_t (&P_frag)[BLOCK_KV / 32][4],
    const StepBits<MASK_ALONE>& bits, int q, int kv0) {
  const StepMask<MASK_ALONE> mask(p, q, kv0, bits);
  float l[2] = {0.0f, 0.0f};  // this lane's part, of this tile
  // NOTE: for a tile without keys, any finite number.
  const float M[2] = {fmaxf(tile_M[0], -0x1p127f), fmaxf(tile_M[1], -0x1p127f)};
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 8; ++i) {  // two key tiles, one row: four neighbours in V
    const int h = i % 2, n = i / 2 * 8 + h * 2;
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = n + j / 2 * 4 + j % 2;
      const float y = code_exponent(float(dot[at]), factor[at / PART][h], -M[h]);  // R3, R4
      x[j] = ex2_approx_ftz(MASKED && !mask.admits(at) ? NEG_INF : y);             // R4
      l[h] += x[j];                                                                // R6
    }
    P_frag[i / 4][i % 4] = pack_p_codes(x[0], x[1], x[2], x[3]);  // R5
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) state[h].l = fmaf(l[h], beta[h], state[h].l);  // R6
}
// The same for scores that are numbers in log2 units, -inf if masked.
__device__ __forceinline__ void weigh(
    RowState (&state)[2], const float (&tile_M)[2], const float (&beta)[2],
    const float (&S_acc)[BLOCK_KV / 2], uint32_t (&P_frag)[BLOCK_KV / 32][4]) {
  uint32_t codes[2];
  float l[2];
  const float M[2] = {fmaxf(tile_M[0], -0x1p127f), fmaxf(tile_M[1], -0x1p127f)};
  weigh_scores(S_acc, M, P_frag, codes, l);
#pragma unroll
  for (int h = 0; h < 2; ++h) state[h].l = fmaf(l[h], beta[h], state[h].l);  // R6
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_int8_fp8(
    const __grid_constant__ AttnParams call, const __grid_constant__ QuantParams quant,
    const __grid_constant__ ValueParams values, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap O_map,
    const __grid_constant__ ScheduleParams schedule SCORE_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  auto& zeros = *reinterpret_cast<SharedZeros*>(shared_bytes + sizeof(SharedStorage));
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const Scoring<SCORED> scoring SCORE_ARGUMENTS;

  if (threadIdx.x == 0) {
    init_ring(smem.Q_full, 1, smem.Q_empty, CONSUMER_WARPS + PRODUCERS - 1);  // all other warps
    init_ring(smem.K_full, PRODUCERS, smem.K_empty, CONSUMER_WARPS);
    init_ring(smem.V_full, 1, smem.V_empty, CONSUMER_WARPS);
    smem.places.init(CONSUMER_WARPS);
    fence_mbarrier_init();
  }
  __syncthreads();       // the barriers are initialised before anyone waits or arrives
  if (warpgroup == 0) {  // ---- the producer, one thread: S1 and S2
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if constexpr (ZERO_POINTS)
      if (warp_id() == 1) zeros.load_keys<0>(smem, smem.K_full, smem.K_empty, call, quant, scoring);
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    produce<int8_t>(
        smem, smem.K_full, smem.K_empty, call, quant, Q_map, schedule, scoring, WholeTiles{},
        LoadStage{smem, K_map, V_map});
    return;
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int row0 = (warpgroup - 1) * 64;           // first row of this warpgroup in the tile
  const int warp_row = row0 + warp_id() % 4 * 16;  // and of this warp
  const int row = warp_row + lane_id() / 4;        // this lane's rows of the tile: row, row + 8
  const Turn<CONSUMERS> turn = {warpgroup - 1};    // at the tensor cores
  if (warpgroup == CONSUMERS) turn.pass();         // the first warpgroup begins
  RingPosition<Q_STAGES> Q_at;
  RingPosition<NUM_STAGES> K_at, V_at;  // K of a step, V of the one before
  ScoreChange<SCORED> change_scores;
  const Descriptor K_first = uniform(descriptor_k_major(smem.K[0][0]));
  const Descriptor V_first = uniform(descriptor_k_major(smem.V[0][0]));

  while (true) {
    // S0 locate
    mbarrier_wait_parity(smem.Q_full[Q_at.stage], Q_at.parity);  // Q has arrived, and its tile
    const WorkTile tile = uniform(smem.tile[Q_at.stage]);
    if (tile.q0 < 0) break;
    const auto& p = of_sequences<int8_t, int8_t>(call, tile);
    int kv0 = round_down(kv_begin(p, tile.q0), BLOCK_KV);
    const int unmasked = kv_unmasked_end(p, tile.q0 + row0);
    const int8_t* Q_codes =  // [CODE_BOXES][BLOCK_Q, 128]
        QUANTIZE_Q ? smem.Q_codes[0] : smem.Q[Q_at.stage][0];
    const Descriptor Q_rows = uniform(descriptor_k_major(Q_codes + row0 * BOX_BYTES));
    RowState state[2];             // of row and row + 8
    float O_acc[O_COLS / 2] = {};  // [O_COLS / 8][4]
    float sum[O_COLS / 2];         // likewise, of one tile
    int32_t dot[BLOCK_KV / 2];     // [BLOCK_KV / 8][4]
    float S_acc[BLOCK_KV / 2];     // likewise; SCORES_CHANGE
    uint32_t P_frag[BLOCK_KV / 32][4];
    Factors factor;
    StepBits<MASK_ALONE> bits;
    float K_scale[SCALES], tile_M[2], beta[2];
    float Q_factor[2];  // Q scale and softmax scale of row and row + 8
    if constexpr (QUANTIZE_Q)
      quantize_q(
          Q_factor, smem.Q_codes, smem.Q[Q_at.stage], smem.Q_empty[Q_at.stage], warp_row,
          p.len_q - tile.q0, CONSUMERS + warpgroup);
    const float* Q_scale = scales_of_rows(call, quant, tile);  // [ceil(len_q / GROUP_Q)]
    ChannelScales<O_COLS>& V_scales = smem.V_scales[warpgroup - 1][Q_at.stage];
    V_scales.load<WARPGROUP>(p, values, tile.head_kv, tile.batch);
    make_row_factors(Q_factor, p, Q_scale, tile.q0 + row);
    zeros.load_rows(call, quant, Q_scale, tile, row, p.len_q);
    change_scores.begin(p, tile, tile.q0 + row);

    // The first scores, by themselves.
    mbarrier_wait_parity(smem.K_full[K_at.stage], K_at.parity);  // K has arrived
    int step_word = LISTED ? smem.step[K_at.stage] : 0;
    if (LISTED) kv0 = first_key(step_word);
    zeros.begin(dot, K_at.stage);
    turn.take();
    start_scores(dot, Q_rows, K_first.stage(K_at.stage, sizeof(smem.K[0])));
    turn.pass();
    copy_scales(K_scale, smem.K_scale[K_at.stage]);
    bits.load(smem.places, p, K_at.stage, warp_row, tile.q0 + row, step_word);
    wgmma_wait_group<0>();
    wgmma_use(dot);
    if constexpr (SCORES_CHANGE)
      score_step(
          S_acc, dot, Q_factor, K_scale, change_scores, scoring, smem.places, p, tile, K_at.stage,
          warp_row, kv0, step_word, unmasked, smem.K_empty[K_at.stage]);
    else if (lane_id() == 0)
      mbarrier_arrive(smem.K_empty[K_at.stage]);
    V_at = K_at;
    K_at.advance();
    if constexpr (SCORES_CHANGE) {
      choose_M(tile_M, S_acc);
      follow(state, tile_M, O_acc, beta);
      weigh(state, tile_M, beta, S_acc, P_frag);
    } else {
      const bool first_masked =
          choose_M(p, tile_M, dot, factor, Q_factor, K_scale, bits, tile.q0 + row, kv0, unmasked);
      follow(state, tile_M, O_acc, beta);
      if (first_masked)
        weigh<true>(p, state, tile_M, beta, dot, factor, P_frag, bits, tile.q0 + row, kv0);
      else
        weigh<false>(p, state, tile_M, beta, dot, factor, P_frag, bits, tile.q0 + row, kv0);
    }

    for (int step = 1; step < tile.steps; ++step) {  // K of this step, V of the one before
      const Descriptor K_rows = K_first.stage(K_at.stage, sizeof(smem.K[0]));
      const Descriptor V_rows = V_first.stage(V_at.stage, sizeof(smem.V[0]));
      mbarrier_wait_parity(smem.K_full[K_at.stage], K_at.parity);  // K has arrived
      step_word = LISTED ? smem.step[K_at.stage] : 0;
      kv0 = LISTED ? first_key(step_word) : kv0 + BLOCK_KV;
      zeros.begin(dot, K_at.stage);
      mbarrier_wait_parity(smem.V_full[V_at.stage], V_at.parity);  // V has arrived
      turn.take();
      start_scores(dot, Q_rows, K_rows);
      start_tile_sums<WgmmaE4m3<O_COLS>>(sum, P_frag, V_rows);
      turn.pass();
      copy_scales(K_scale, smem.K_scale[K_at.stage]);
      bits.load(smem.places, p, K_at.stage, warp_row, tile.q0 + row, step_word);
      wgmma_wait_group<1>();  // the scores are there: their maximum is computed while P V is summed
      wgmma_use(dot);
      bool masked = false;
      if constexpr (SCORES_CHANGE) {
        score_step(
            S_acc, dot, Q_factor, K_scale, change_scores, scoring, smem.places, p, tile, K_at.stage,
            warp_row, kv0, step_word, unmasked, smem.K_empty[K_at.stage]);
        choose_M(tile_M, S_acc);
      } else {
        if (lane_id() == 0) mbarrier_arrive(smem.K_empty[K_at.stage]);
        masked =
            choose_M(p, tile_M, dot, factor, Q_factor, K_scale, bits, tile.q0 + row, kv0, unmasked);
      }
      wgmma_wait_group<0>();
      wgmma_use(sum);
      wgmma_use(P_frag);
      if (lane_id() == 0) mbarrier_arrive(smem.V_empty[V_at.stage]);
      V_at = K_at;
      K_at.advance();
      add_tile(O_acc, sum, beta);
      follow(state, tile_M, O_acc, beta);
      if constexpr (SCORES_CHANGE)
        weigh(state, tile_M, beta, S_acc, P_frag);
      else if (masked)
        weigh<true>(p, state, tile_M, beta, dot, factor, P_frag, bits, tile.q0 + row, kv0);
      else
        weigh<false>(p, state, tile_M, beta, dot, factor, P_frag, bits, tile.q0 + row, kv0);
    }
    if (!QUANTIZE_Q && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);

    // The last output, by itself.
    mbarrier_wait_parity(smem.V_full[V_at.stage], V_at.parity);  // V has arrived
    turn.take();
    start_tile_sums<WgmmaE4m3<O_COLS>>(sum, P_frag, V_first.stage(V_at.stage, sizeof(smem.V[0])));
    turn.pass();
    wgmma_wait_group<0>();
    wgmma_use(sum);
    if (lane_id() == 0) mbarrier_arrive(smem.V_empty[V_at.stage]);
    add_tile(O_acc, sum, beta);

    // S6 store
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q = tile.q0 + row + h * 8;
      state[h].l = shfl_sum<4>(state[h].l);  // R6
      if constexpr (LSE) {
        give_mean_back(state[h], p, quant, tile, q, Q_factor[h], zeros.of_row(h));
        store_lse(p, tile, q, state[h]);
      }
    }
    cp_async_wait_group<0>();
    // All threads see the scales that any of them loaded. All have also left the tile before, whose
    // scales the next tile's scales replace.
    named_barrier_sync(CONSUMERS + warpgroup, WARPGROUP);
    float O_value[O_COLS / 2];                                        // [O_COLS / 8][4]
    V_scales.apply<false>(O_value, O_acc, {state[0].l, state[1].l});  // R7
    store_tile<O_STAGED>(smem, p, O_map, tile, warp_row, O_value);
    Q_at.advance();
  }
  if (O_STAGED && lane_id() == 0) cp_async_bulk_wait_group_read();  // before the block's end
  if (turn.warpgroup == 0) turn.take();  // consume the last signal; no warpgroup waits for it
}
