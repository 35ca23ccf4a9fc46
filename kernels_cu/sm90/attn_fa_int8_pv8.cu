// attn_fa_int8_pv8 -- Hopper form: both products by wgmma over codes, O kept as whole numbers.
//
// Idea         O stays in int32 from the first key to the last. Codes of P are multiples of a power
//              of two that follows the largest weight of each tile. So O moves from one power to
//              the next by a shift, without conversion, product and sum. One set of accumulators
//              is enough; two levels of sums would need two.
// Differs from the Hopper form with V in 16 bits: S2 loads V by channels. S4 finds the maximum of
//              every tile, among integers if the tile has one scale, and packs codes. S5 multiplies
//              codes. S6 applies the scales of the channels and adds the mean of V.
//              (diff attn_fa_int8.cu attn_fa_int8_pv8.cu)
// Kept simple  A warpgroup does one thing after another; others compute while it waits. P in u8, V
//              in INT8 with one scale per channel and no zero points; at least 16 adjacent keys
//              share a scale. Packed sequences and block masks as in fa_tc: n times code 0 is 0.
// Scores       Softcap, bias, mask as in that form. With softcap or bias M follows the largest
//              changed score, and a score of NaN or +inf makes its row NaN through l.
// Rounding     R1 by quantize.cu, or of Q in quantize_q.cuh; R3 dot to float (exact), softcap and
//              bias, the factor of both scales, within R4's fma; R4 exp2, R5 P to 8 bits, R6 l, and
//              bits of O lost in shifts, R7 O to float, times the channel's scale, times 1/l, plus
//              the mean, and store.  Tried: experiments/results/NOTES.md
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/codes/channel_scales.cuh"
#include "prims/config.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/instructions/wgmma_8bit.cuh"
#include "prims/io/output.cuh"
#include "prims/codes/p_codes.cuh"
#include "prims/params.cuh"
#include "prims/schedule/pieces.cuh"
#include "prims/codes/quantize_q.cuh"
#include "prims/score/score.cuh"
#include "prims/score/score_hook.cuh"
#include "prims/score/shift_state.cuh"
#include "prims/score/step_scores.cuh"
#include "prims/io/varlen.cuh"
#include "prims/schedule/work_tile.cuh"
#include "sm90/int8/producer.cuh"
#include "sm90/int8/products.cuh"
#include "sm90/int8/rows.cuh"
#include "sm90/int8/scored_codes.cuh"
#include "sm90/int8/scored_step.cuh"
#include "sm90/int8/step_bits.cuh"
#include "sm90/int8/value_codes.cuh"
#include "sm90/int8/warpgroups.cuh"

constexpr bool IN_TURN = HEAD_DIM > 64;  // at the exponentials, as timed
constexpr bool PIECES = !UNEVEN;         // tiles are alike: tiles of the last wave may be cut
constexpr int WATCH_STEPS = 6;           // steps between two checks of l for overflow

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
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];  // K, its scales and V of a step
  int step[NUM_STAGES];                          // as its first key; not read unless LISTED
  float K_scale[NUM_STAGES][SCALES];             // of its keys
  ChannelScales<O_COLS> V_scales[CONSUMERS][Q_STAGES];
  ScorePlaces<SCORED> places;  // of softcap, bias and mask
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);
constexpr int STEP_BYTES = sizeof(SharedStorage::K[0]) + sizeof(SharedStorage::V[0]);

static_assert(P_TYPE == PType::U8, "this form takes P in u8");

// S2 load K, V: both of a step.
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
    Mbarrier& full = smem.full[at.stage];
    mbarrier_arrive_expect_tx(full, STEP_BYTES + step.score_bytes);
    load_K(smem.K[at.stage], K_map, full, tile, step.kv0);
    load_V(smem.V[at.stage], V_map, full, tile, V_first + step.kv0);
  }
};

// S5 output: O [64, O_COLS] += P V of codes, exact, in the background.
__device__ __forceinline__ void start_output(
    int32_t (&O_acc)[O_COLS / 2], uint32_t (&P_frag)[BLOCK_KV / 32][4], Descriptor V_rows) {
  wgmma_use(O_acc);
  wgmma_use(P_frag);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 32; ++k) {  // 32 bytes of a channel, then the next box
    const int box = k / 4, byte = k % 4 * 32;
    WgmmaU8<O_COLS>::rs(O_acc, P_frag[k], V_rows + (box * O_COLS * BOX_BYTES + byte), true);  // R6
  }
  wgmma_commit_group();
}

// Factors of a step. A few are kept in registers. If there are more, each is computed from the
// scale in shared memory at every use, because scores and O leave no room.
struct StepFactors {
  static constexpr bool KEPT = SCALES <= 4;
  Factors kept;          // unused unless KEPT
  const float* K_scale;  // [SCALES], of this step
  float Q_factor[2];

  __device__ __forceinline__ void begin(const float (&scales)[SCALES]) {
    K_scale = scales;
    if (KEPT) make_factors(kept, Q_factor, scales);
  }
  // Factors of the keys that share scale number `part` of the step, for both rows.
  __device__ __forceinline__ void of(float (&factor)[2], int part) const {
    const float scale = KEPT ? 0.0f : *const_cast<const volatile float*>(&K_scale[part]);
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[h] = KEPT ? kept[part][h] : Q_factor[h] * scale;  // R3
  }
};

// S4 softmax, first half: the largest scores of a lane's two rows, -inf if all are masked. They are
// rounded down, for an M that is a whole number below them. A scale whose keys are all masked is
// ignored: its NaN does not reach rows that do not attend to them.
template <bool MASKED>
__device__ __forceinline__ void largest_scores(
    const AttnParams& p, float (&m)[2], const int32_t (&dot)[BLOCK_KV / 2],
    const StepFactors& factors, const StepBits<MASK_ALONE>& bits, int q, int kv0) {
  const StepMask<MASK_ALONE> mask(p, q, kv0, bits);
  m[0] = m[1] = NEG_INF;
#pragma unroll
  for (int j = 0; j < SCALES; ++j) {
    float factor[2];
    factors.of(factor, j);
    int largest[2];
    largest_dots<MASKED>(largest, dot, mask, j);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (!MASKED || largest[h] != NO_KEY)
        m[h] = fmaxf(m[h], __fmul_rd(float(largest[h]), factor[h]));  // R3
  }
}
// M of the largest score of each row. Returns whether scores are masked. `shift` is the result of
// ShiftState::advance. `q` is the first of this lane's two rows, the other is q + 8.
__device__ __forceinline__ bool choose_M(
    const AttnParams& p, ShiftState (&state)[2], const int32_t (&dot)[BLOCK_KV / 2],
    int (&shift)[2], const StepFactors& factors, const StepBits<MASK_ALONE>& bits, int q, int kv0,
    int unmasked, bool watched) {
  const bool masked = !bits.admit_all(p, q, kv0, unmasked);
  float m[2];
  if (masked)
    largest_scores<true>(p, m, dot, factors, bits, q, kv0);
  else
    largest_scores<false>(p, m, dot, factors, bits, q, kv0);
  m[0] = shfl_max<4>(m[0]), m[1] = shfl_max<4>(m[1]);
  if (watched) state[0].keep_in_range(), state[1].keep_in_range();
#pragma unroll
  for (int h = 0; h < 2; ++h) shift[h] = state[h].advance(m[h]);
  return masked;
}

// S4 softmax, second half: codes P of the weights, four keys in a register, the left operand of P
// V. A masked key weighs 0.
// NOTE: NaN becomes code 0 and would vanish. Adding factor * 0 to l propagates it.
// NOTE: integers become floats between the exponentials, because these leave the other pipes mostly
// free. Done before them, the conversions would take as long again.
template <bool MASKED>
__device__ __forceinline__ void weigh(
    const AttnParams& p, ShiftState (&state)[2], const int32_t (&dot)[BLOCK_KV / 2],
    const StepFactors& factors, uint32_t (&P_frag)[BLOCK_KV / 32][4],
    const StepBits<MASK_ALONE>& bits, int q, int kv0) {
  const StepMask<MASK_ALONE> mask(p, q, kv0, bits);
  uint32_t sum[2] = {};  // of codes
  float factor[2];       // of keys that share a scale
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 8; ++i) {  // two key tiles, one row: four neighbours in V
    const int h = i % 2, n = i / 2 * 8 + h * 2;
    if (n % PART == 0) {
      factors.of(factor, n / PART);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (!MASKED || mask.admits_any(n + 2 * r, n + 2 * r + PART - 3))
          state[r].l = fmaf(factor[r], 0.0f, state[r].l);
    }
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = n + j / 2 * 4 + j % 2;
      const float y = fmaf(float(dot[at]), factor[h], -state[h].M);     // R3
      x[j] = ex2_approx_ftz(MASKED && !mask.admits(at) ? NEG_INF : y);  // R4
      if (LSE) state[h].exact_l += x[j];                                // R6
    }
    const uint32_t codes = pack_u8(x[0], x[1], x[2], x[3]);  // R5
    P_frag[i / 4][i % 4] = codes;
    sum[h] = __dp4a(codes, 0x01010101u, sum[h]);  // exact
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) state[h].l += float(sum[h]);  // R6
}

// S4 of scores that are numbers in log2 units, -inf if masked. A score of NaN or +inf makes its row
// NaN through l, because no code is NaN.
__device__ __forceinline__ void choose_M(
    ShiftState (&state)[2], const float (&S_acc)[BLOCK_KV / 2], int (&shift)[2], bool watched) {
  float m[2];
  largest_of_rows(m, S_acc);
  m[0] = shfl_max_nan<4>(m[0]), m[1] = shfl_max_nan<4>(m[1]);
  if (watched) state[0].keep_in_range(), state[1].keep_in_range();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    shift[h] = state[h].advance(m[h]);
    if (!(m[h] < -NEG_INF)) state[h].l = m[h] - m[h];  // NaN
  }
}
__device__ __forceinline__ void weigh(
    ShiftState (&state)[2], const float (&S_acc)[BLOCK_KV / 2],
    uint32_t (&P_frag)[BLOCK_KV / 32][4]) {
  const float M[2] = {state[0].M, state[1].M};
  uint32_t codes[2];
  float weights[2];
  weigh_scores(S_acc, M, P_frag, codes, weights);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    state[h].l += float(codes[h]);            // R6
    if (LSE) state[h].exact_l += weights[h];  // R6
  }
}

// O to another M.
__device__ __forceinline__ void shift_output(int32_t (&O_acc)[O_COLS / 2], const int (&shift)[2]) {
  const int right[2] = {right_shift(shift[0]), right_shift(shift[1])};
#pragma unroll
  for (int i = 0; i < O_COLS / 2; ++i) O_acc[i] = shifted(O_acc[i], right[i / 2 % 2]);  // R6
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_int8_pv8(
    const __grid_constant__ AttnParams call, const __grid_constant__ QuantParams quant,
    const __grid_constant__ ValueParams values, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap O_map, const __grid_constant__ ScheduleParams schedule,
    const __grid_constant__ PieceParams pieces SCORE_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const Scoring<SCORED> scoring SCORE_ARGUMENTS;

  if (threadIdx.x == 0) {
    init_ring(smem.Q_full, 1, smem.Q_empty, CONSUMER_WARPS);
    init_ring(smem.full, 1, smem.empty, CONSUMER_WARPS);
    smem.places.init(CONSUMER_WARPS);
    fence_mbarrier_init();
  }
  __syncthreads();       // the barriers are initialised before anyone waits or arrives
  if (warpgroup == 0) {  // ---- the producer, one thread: S1 and S2
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    produce<int8_t>(
        smem, smem.full, smem.empty, call, quant, Q_map, schedule, scoring, cut_if_alike(pieces),
        LoadStage{smem, K_map, V_map});
    return;
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int row0 = (warpgroup - 1) * 64;               // first row of this warpgroup in the tile
  const int warp_row = row0 + warp_id() % 4 * 16;      // and of this warp
  const int row = warp_row + lane_id() / 4;            // this lane's rows of the tile: row, row + 8
  const Turn<CONSUMERS> turn = {warpgroup - 1};        // at the exponentials
  if (IN_TURN && warpgroup == CONSUMERS) turn.pass();  // the first warpgroup begins
  RingPosition<Q_STAGES> Q_at;
  RingPosition<NUM_STAGES> at;  // of K and V
  ScoreChange<SCORED> change_scores;
  const Descriptor K_first = uniform(descriptor_k_major(smem.K[0][0]));
  const Descriptor V_first = uniform(descriptor_k_major(smem.V[0][0]));

  while (true) {
    // S0 locate
    mbarrier_wait_parity(smem.Q_full[Q_at.stage], Q_at.parity);  // Q has arrived, and its tile
    const WorkTile tile = uniform(smem.tile[Q_at.stage]);
    if (tile.q0 < 0) break;
    const auto& p = of_sequences<int8_t, int8_t>(call, tile);
    int kv0 = round_down(kv_begin(p, tile.q0), BLOCK_KV) + tile.first * BLOCK_KV;
    const int unmasked = kv_unmasked_end(p, tile.q0 + row0);
    const int own_end = kv_end(p, tile.q0 + row0, 64);  // of the keys of this warpgroup's rows
    const int8_t* Q_codes =                             // [CODE_BOXES][BLOCK_Q, 128]
        QUANTIZE_Q ? smem.Q_codes[0] : smem.Q[Q_at.stage][0];
    const Descriptor Q_rows = uniform(descriptor_k_major(Q_codes + row0 * BOX_BYTES));
    ShiftState state[2];             // of row and row + 8
    int32_t O_acc[O_COLS / 2] = {};  // [O_COLS / 8][4]
    int32_t dot[BLOCK_KV / 2];       // [BLOCK_KV / 8][4]
    float S_acc[BLOCK_KV / 2];       // likewise; SCORES_CHANGE
    uint32_t P_frag[BLOCK_KV / 32][4];
    StepFactors factors;
    StepBits<MASK_ALONE> bits;
    int shift[2];
    const bool may_overflow = p.len_kv >= 1 << (SUM_BITS - CODE_BITS - LOWER_BITS);
    auto& Q_factor = factors.Q_factor;  // Q scale and softmax scale of row and row + 8
    if constexpr (QUANTIZE_Q)
      quantize_q(
          Q_factor, smem.Q_codes, smem.Q[Q_at.stage], smem.Q_empty[Q_at.stage], warp_row,
          p.len_q - tile.q0, CONSUMERS + warpgroup);
    const float* Q_scale = scales_of_rows(call, quant, tile);  // [ceil(len_q / GROUP_Q)]
    ChannelScales<O_COLS>& V_scales = smem.V_scales[warpgroup - 1][Q_at.stage];
    V_scales.load<WARPGROUP>(p, values, tile.head_kv, tile.batch);
    make_row_factors(Q_factor, p, Q_scale, tile.q0 + row);
    change_scores.begin(p, tile, tile.q0 + row);

    for (int step = 0; step < tile.steps; ++step, kv0 += BLOCK_KV) {
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // K, its scales and V have arrived
      const int step_word = LISTED ? smem.step[at.stage] : 0;
      if (LISTED) kv0 = first_key(step_word);
      if (CAUSAL && kv0 >= own_end) {  // the last steps are for rows of the other warpgroups
        if (IN_TURN) turn.take(), turn.pass();
        change_scores.skip(smem.places);
        if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
        at.advance();
        continue;
      }
      start_scores(dot, Q_rows, K_first.stage(at.stage, sizeof(smem.K[0])));
      factors.begin(smem.K_scale[at.stage]);
      bits.load(smem.places, p, at.stage, warp_row, tile.q0 + row, step_word);
      wgmma_wait_group<0>();
      wgmma_use(dot);
      const bool watched = may_overflow && step % WATCH_STEPS == 0;
      if constexpr (SCORES_CHANGE) {
        score_step(
            S_acc, dot, Q_factor, smem.K_scale[at.stage], change_scores, scoring, smem.places, p,
            tile, at.stage, warp_row, kv0, step_word, unmasked);
        choose_M(state, S_acc, shift, watched);
        shift_output(O_acc, shift);
        if (IN_TURN) turn.take();
        weigh(state, S_acc, P_frag);
      } else {
        const bool masked =
            choose_M(p, state, dot, shift, factors, bits, tile.q0 + row, kv0, unmasked, watched);
        shift_output(O_acc, shift);
        if (IN_TURN) turn.take();
        if (masked)
          weigh<true>(p, state, dot, factors, P_frag, bits, tile.q0 + row, kv0);
        else
          weigh<false>(p, state, dot, factors, P_frag, bits, tile.q0 + row, kv0);
      }
      if (IN_TURN) turn.pass();
      start_output(O_acc, P_frag, V_first.stage(at.stage, sizeof(smem.V[0])));
      wgmma_wait_group<0>();
      wgmma_use(O_acc);
      wgmma_use(P_frag);
      if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
      at.advance();
    }
    if (!QUANTIZE_Q && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);

    // S6 store
    const bool is_piece = PIECES && tile.slot >= 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q = tile.q0 + row + h * 8;
      state[h].l = shfl_sum<4>(state[h].l);                       // R6
      if (LSE) state[h].exact_l = shfl_sum<4>(state[h].exact_l);  // R6
      if (LSE && !is_piece) {
        give_mean_back(state[h], p, quant, tile, q, Q_factor[h]);
        store_lse(p, tile, q, state[h]);
      }
    }
    cp_async_wait_group<0>();
    // All threads see the scales that any of them loaded. All have also left the tile before, whose
    // scales the next tile's scales replace.
    named_barrier_sync(CONSUMERS + warpgroup, WARPGROUP);
    float O_value[O_COLS / 2];  // [O_COLS / 8][4]
    if (is_piece) {             // merge_pieces.cu divides and stores
      V_scales.apply<true>(O_value, O_acc, {state[0].l, state[1].l});
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_piece_row<O_COLS>(
            pieces, tile.slot, row, h, O_value,
            {state[h].M, LSE ? state[h].weights() : state[h].l, state[h].l});
      Q_at.advance();
      continue;
    }
    V_scales.apply<false>(O_value, O_acc, {state[0].l, state[1].l});  // R7
    store_tile<O_STAGED>(smem, p, O_map, tile, warp_row, O_value);
    Q_at.advance();
  }
  if (O_STAGED && lane_id() == 0) cp_async_bulk_wait_group_read();  // before the block's end
  if (IN_TURN && turn.warpgroup == 0) turn.take();  // consume the last signal, which none awaits
}
