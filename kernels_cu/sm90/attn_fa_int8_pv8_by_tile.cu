// attn_fa_int8_pv8_by_tile -- Hopper form: both products by wgmma over codes, P and V tile by tile.
//
// Idea         The accurate arithmetic of 8-bit P and V. Codes of P are relative to the largest
//              weight of their tile, so every tile uses all 8 bits. V has a scale per channel and
//              tile. Sums of a tile are exact integers. They are added to O in float32, with the
//              factor of the tile and the scales of its channels.
// Differs from the Hopper form with O in whole numbers: S2 loads V's scales with every step. S4
//              finds the maximum of the tile, and has alpha and beta in place of shifts. S5 has two
//              levels of sums, a few columns of O at a time: one group is added while the next is
//              multiplied. S6 applies no scales. No tile is cut into pieces.
//              (diff attn_fa_int8_pv8.cu attn_fa_int8_pv8_by_tile.cu)
// Kept simple  P in u8, V in INT8 with a scale for a multiple of BLOCK_KV keys and no zero points.
//              At least 16 adjacent keys share a scale of K. Integers of S and of O do not overlap
//              in time, so registers suffice up to head_dim 256. Row state is in shared memory.
// Scores       Softcap, bias, mask as there. A tile's maximum is over unmasked keys; a row without
//              any has weights 0, beta 0. A mask alone: M and codes of integers (step_bits.cuh).
// Rounding     R1 by quantize.cu, or of Q in quantize_q.cuh; R3 dot to float (exact), softcap and
//              bias, factor of both scales, within R4's fma; R4 M, up, and exp2, R5 P to 8 bits, R6
//              alpha, beta times V's scale, l, the sum over tiles, R7 1/l, plus the mean, and store
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
#include "sm90/int8/producer.cuh"
#include "sm90/int8/products.cuh"
#include "sm90/int8/rows.cuh"
#include "sm90/int8/scored_codes.cuh"
#include "sm90/int8/scored_step.cuh"
#include "sm90/int8/step_bits.cuh"
#include "sm90/int8/value_codes.cuh"
#include "sm90/int8/warpgroups.cuh"

constexpr int SUM_COLS = 32;             // of those, whose sums are in registers at once
constexpr bool IN_TURN = HEAD_DIM > 64;  // at the exponentials

// O leaves through shared memory if there is room for it.
constexpr bool O_STAGED =
    ELEM_IS_16_BIT &&
    INPUT_BYTES + NUM_STAGES * SCORE_STAGE_BYTES + BLOCK_Q * STORE_BOXES * BOX_BYTES <= 208 * 1024;

// State of a lane's two rows from step to step, with this lane's part of their sums.
struct alignas(8) OwnRows {
  RowState state[2];
  float exact_l[2];  // of the weights that codes round; for lse alone
};

struct SharedStorage {
  alignas(1024) int8_t Q[Q_STAGES][Q_BOXES][BLOCK_Q * BOX_BYTES];
  alignas(1024) int8_t K[NUM_STAGES][CODE_BOXES][BLOCK_KV * BOX_BYTES];
  alignas(1024) int8_t V[NUM_STAGES][V_BOXES][O_COLS * BOX_BYTES];
  alignas(1024) elem_t O[O_STAGED ? BLOCK_Q / STORE_ROWS * OWN_BOXES : 1];
  alignas(QUANTIZE_Q ? 1024 : 1) int8_t Q_codes[CODE_BOXES][QUANTIZE_Q ? BLOCK_Q * BOX_BYTES : 1];
  WorkTile tile[Q_STAGES];  // that Q belongs to
  Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];        // K, V and their scales of a step
  int step[NUM_STAGES];                                // as its first key; not read unless LISTED
  float K_scale[NUM_STAGES][SCALES];                   // of its keys
  alignas(16) float V_scale[NUM_STAGES][O_COLS];       // of its channels
  ChannelScales<O_COLS> V_means[CONSUMERS][Q_STAGES];  // the scales are 1
  OwnRows rows[CONSUMERS * WARPGROUP];                 // each thread's
  ScorePlaces<SCORED> places;                          // of softcap, bias and mask
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);
constexpr int V_SCALE_BYTES = HEAD_DIM * sizeof(float);
constexpr int STEP_BYTES =
    sizeof(SharedStorage::K[0]) + sizeof(SharedStorage::V[0]) + V_SCALE_BYTES;

static_assert(P_TYPE == PType::U8, "this form takes P in u8");
static_assert(GROUP_V % BLOCK_KV == 0, "GROUP_V must be whole tiles: a tile has one V scale");
static_assert(
    HEAD_DIM % 4 == 0, "HEAD_DIM must be a multiple of 4: scales come 16 bytes at a time");

// S2 load K, V: both of a step, and the scales of V.
struct LoadStage {
  static constexpr int V_STEPS = 0;  // stages of a tile that hold V alone
  SharedStorage& smem;
  const TensorMap &K_map, &V_map;
  const ValueParams& values;
  int V_first;           // column of the sequence
  const float* V_scale;  // [ceil(len_kv / GROUP_V), HEAD_DIM]

  __device__ __forceinline__ void begin(const AttnParams& call, const WorkTile& tile) {
    V_first = first_column(call, tile);
    V_scale = values.V_scale + tile.batch * values.V_scale_stride_batch +
              tile.head_kv * values.V_scale_stride_head +
              first_scale<GROUP_V>(call.cu_seqlens_k, tile.batch) * HEAD_DIM;
  }
  __device__ __forceinline__ void operator()(
      const WorkTile& tile, RingPosition<NUM_STAGES> at, const KeyStep& step) {
    Mbarrier& full = smem.full[at.stage];
    mbarrier_arrive_expect_tx(full, STEP_BYTES + step.score_bytes);
    load_K(smem.K[at.stage], K_map, full, tile, step.kv0);
    load_V(smem.V[at.stage], V_map, full, tile, V_first + step.kv0);
    // NOTE: a step that may be without keys takes arbitrary scales, as for K.
    const int group = uint32_t(min(step.kv0, max(step.len_kv - 1, 0))) / GROUP_V;
    cp_async_bulk(smem.V_scale[at.stage], V_scale + int64_t(group) * HEAD_DIM, V_SCALE_BYTES, full);
  }
};

// S4 softmax, first half: the M of this tile, in the unit of code 1, rounded up. A NaN scale makes
// it NaN, which reaches l and O through beta, because the code of NaN is 0. A scale whose keys are
// all masked is ignored: its NaN does not reach rows that do not attend to them.
template <bool MASKED>
__device__ __forceinline__ void find_M(
    const AttnParams& p, float (&tile_M)[2], const int32_t (&dot)[BLOCK_KV / 2],
    const Factors& factor, const StepBits<MASK_ALONE>& bits, int q, int kv0) {
  const StepMask<MASK_ALONE> mask(p, q, kv0, bits);
  tile_M[0] = tile_M[1] = NEG_INF;
#pragma unroll
  for (int j = 0; j < SCALES; ++j) {
    int largest[2];
    largest_dots<MASKED>(largest, dot, mask, j);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (!MASKED || largest[h] != NO_KEY)
        tile_M[h] = max_nan(tile_M[h], M_of_codes(float(largest[h]), factor[j][h]));  // R4
  }
}
// Returns whether scores are masked. `q` is the first of this lane's two rows, the other is q + 8.
__device__ __forceinline__ bool choose_M(
    const AttnParams& p, float (&tile_M)[2], const int32_t (&dot)[BLOCK_KV / 2],
    const float (&Q_factor)[2], const float (&K_scale)[SCALES], const StepBits<MASK_ALONE>& bits,
    int q, int kv0, int unmasked) {
  Factors factor;
  make_factors(factor, Q_factor, K_scale);
  const bool masked = !bits.admit_all(p, q, kv0, unmasked);
  if (masked)
    find_M<true>(p, tile_M, dot, factor, bits, q, kv0);
  else
    find_M<false>(p, tile_M, dot, factor, bits, q, kv0);
  tile_M[0] = shfl_max_nan<4>(tile_M[0]), tile_M[1] = shfl_max_nan<4>(tile_M[1]);
  return masked;
}

// The same for scores that are numbers in log2 units, -inf if masked.
__device__ __forceinline__ void choose_M(float (&tile_M)[2], const float (&S_acc)[BLOCK_KV / 2]) {
  float m[2];
  largest_of_rows(m, S_acc);
#pragma unroll
  for (int h = 0; h < 2; ++h) tile_M[h] = M_of_codes(shfl_max_nan<4>(m[h]), 1.0f);  // R4
}

// The row's M rises to the M of the tile, and l and O are rescaled.
__device__ __forceinline__ void follow(
    RowState (&state)[2], float (&exact_l)[2], const float (&tile_M)[2],
    float (&O_acc)[O_COLS / 2]) {
  // NOTE: most steps raise no row's maximum: every alpha is 1, l and O stay as they are.
  if (__any_sync(FULL_WARP, tile_M[0] > state[0].M || tile_M[1] > state[1].M)) {
    const float alpha[2] = {state[0].advance(tile_M[0]), state[1].advance(tile_M[1])};
    if (LSE) exact_l[0] *= alpha[0], exact_l[1] *= alpha[1];  // R6
#pragma unroll
    for (int i = 0; i < O_COLS / 2; ++i) O_acc[i] *= alpha[i / 2 % 2];  // R6
  }
}

// Adds the weights of a tile to l. Beta converts their unit to the row's.
__device__ __forceinline__ void add_weights(
    RowState (&state)[2], float (&exact_l)[2], const float (&tile_M)[2], float (&beta)[2],
    const uint32_t (&sum)[2], const float (&weight)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    beta[h] = ex2_approx_ftz(tile_M[h] - state[h].M_finite());   // R4
    state[h].l = fmaf(float(sum[h]), beta[h], state[h].l);       // R6
    if (LSE) exact_l[h] = fmaf(weight[h], beta[h], exact_l[h]);  // R6
  }
}

// S4 softmax, second half: codes P of the weights, four keys in a register, the left operand of P
// V. A masked key weighs 0.
// NOTE: integers become floats between the exponentials, because these leave the other pipes mostly
// free. Done before them, the conversions would take as long again. Factors are computed again:
// kept from the first half, they would take two registers for every scale.
template <bool MASKED>
__device__ __forceinline__ void weigh(
    const AttnParams& p, RowState (&state)[2], float (&exact_l)[2], const float (&tile_M)[2],
    float (&beta)[2], const int32_t (&dot)[BLOCK_KV / 2], const float (&Q_factor)[2],
    const float (&K_scale)[SCALES], uint32_t (&P_frag)[BLOCK_KV / 32][4],
    const StepBits<MASK_ALONE>& bits, int q, int kv0) {
  const StepMask<MASK_ALONE> mask(p, q, kv0, bits);
  uint32_t sum[2] = {};            // of this lane's codes
  float weight[2] = {0.0f, 0.0f};  // of this lane's keys, for lse alone
  // NOTE: no key of the tile: any number that may be subtracted.
  const float M[2] = {fmaxf(tile_M[0], -0x1p127f), fmaxf(tile_M[1], -0x1p127f)};
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 8; ++i) {  // two key tiles, one row: four neighbours in V
    const int h = i % 2, n = i / 2 * 8 + h * 2;
    const float factor = Q_factor[h] * K_scale[n / PART];  // R3
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = n + j / 2 * 4 + j % 2;
      const float y = code_exponent(float(dot[at]), factor, -M[h]);     // R3, R4
      x[j] = ex2_approx_ftz(MASKED && !mask.admits(at) ? NEG_INF : y);  // R4
      if (LSE) weight[h] += x[j];                                       // R6
    }
    const uint32_t codes = pack_p_codes(x[0], x[1], x[2], x[3]);  // R5
    P_frag[i / 4][i % 4] = codes;
    sum[h] = __dp4a(codes, 0x01010101u, sum[h]);  // exact
  }
  add_weights(state, exact_l, tile_M, beta, sum, weight);
}
// The same for scores that are numbers in log2 units, -inf if masked.
__device__ __forceinline__ void weigh(
    RowState (&state)[2], float (&exact_l)[2], const float (&tile_M)[2], float (&beta)[2],
    const float (&S_acc)[BLOCK_KV / 2], uint32_t (&P_frag)[BLOCK_KV / 32][4]) {
  uint32_t sum[2];
  float weight[2];
  const float M[2] = {fmaxf(tile_M[0], -0x1p127f), fmaxf(tile_M[1], -0x1p127f)};
  weigh_scores(S_acc, M, P_frag, sum, weight);
  add_weights(state, exact_l, tile_M, beta, sum, weight);
}

// O += sum, columns `col0` on, with the scales of these channels in this tile, in the unit of M.
__device__ __forceinline__ void add_tile(
    float (&O_acc)[O_COLS / 2], const int32_t (&sum)[SUM_COLS / 2], const float (&beta)[2],
    const float (&V_scale)[O_COLS], int col0) {
#pragma unroll
  for (int n = 0; n < SUM_COLS / 8; ++n) {
    if (col0 + n * 8 >= HEAD_DIM) break;
    int col = col0 + n * 8 + lane_id() % 4 * 2;
    if (HEAD_DIM % 8 != 0) col = min(col, HEAD_DIM - 2);  // past it there are no scales
    const float2 scale = *reinterpret_cast<const float2*>(&V_scale[col]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // two columns of row g, and of row g + 8
      const float factor = beta[i / 2] * (i % 2 ? scale.y : scale.x);  // R6
      float& x = O_acc[col0 / 2 + 4 * n + i];
      x = fmaf(float(sum[4 * n + i]), factor, x);  // R6
    }
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_int8_pv8_by_tile(
    const __grid_constant__ AttnParams call, const __grid_constant__ QuantParams quant,
    const __grid_constant__ ValueParams values, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap O_map,
    const __grid_constant__ ScheduleParams schedule SCORE_PARAMETERS) {
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
        smem, smem.full, smem.empty, call, quant, Q_map, schedule, scoring, WholeTiles{},
        LoadStage{smem, K_map, V_map, values});
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
    int kv0 = round_down(kv_begin(p, tile.q0), BLOCK_KV);
    const int unmasked = kv_unmasked_end(p, tile.q0 + row0);
    const int own_end = kv_end(p, tile.q0 + row0, 64);  // of the keys of this warpgroup's rows
    const int8_t* Q_codes =                             // [CODE_BOXES][BLOCK_Q, 128]
        QUANTIZE_Q ? smem.Q_codes[0] : smem.Q[Q_at.stage][0];
    const Descriptor Q_rows = uniform(descriptor_k_major(Q_codes + row0 * BOX_BYTES));
    OwnRows& own_rows = smem.rows[threadIdx.x - WARPGROUP];
    RowState(&state)[2] = own_rows.state;    // of row and row + 8
    float (&exact_l)[2] = own_rows.exact_l;  // likewise
    state[0] = state[1] = RowState();
    exact_l[0] = exact_l[1] = 0.0f;
    float O_acc[O_COLS / 2] = {};  // [O_COLS / 8][4]
    int32_t dot[BLOCK_KV / 2];     // [BLOCK_KV / 8][4]
    float S_acc[BLOCK_KV / 2];     // likewise; SCORES_CHANGE
    int32_t sum[2][SUM_COLS / 2];  // [SUM_COLS / 8][4], of some columns and of the next
    uint32_t P_frag[BLOCK_KV / 32][4];
    StepBits<MASK_ALONE> bits;
    float tile_M[2], beta[2];
    float Q_factor[2];  // Q scale and softmax scale of row and row + 8
    if constexpr (QUANTIZE_Q)
      quantize_q(
          Q_factor, smem.Q_codes, smem.Q[Q_at.stage], smem.Q_empty[Q_at.stage], warp_row,
          p.len_q - tile.q0, CONSUMERS + warpgroup);
    const float* Q_scale = scales_of_rows(call, quant, tile);  // [ceil(len_q / GROUP_Q)]
    ChannelScales<O_COLS>& V_means = smem.V_means[warpgroup - 1][Q_at.stage];
    V_means.load<WARPGROUP>(p, values, tile.head_kv, tile.batch);
    make_row_factors(Q_factor, p, Q_scale, tile.q0 + row);
    change_scores.begin(p, tile, tile.q0 + row);

    for (int step = 0; step < tile.steps; ++step, kv0 += BLOCK_KV) {
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // K, V and their scales have arrived
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
      bits.load(smem.places, p, at.stage, warp_row, tile.q0 + row, step_word);
      wgmma_wait_group<0>();
      wgmma_use(dot);
      const float (&K_scale)[SCALES] = smem.K_scale[at.stage];
      if constexpr (SCORES_CHANGE) {
        score_step(
            S_acc, dot, Q_factor, K_scale, change_scores, scoring, smem.places, p, tile, at.stage,
            warp_row, kv0, step_word, unmasked);
        choose_M(tile_M, S_acc);
        follow(state, exact_l, tile_M, O_acc);
        if (IN_TURN) turn.take();
        weigh(state, exact_l, tile_M, beta, S_acc, P_frag);
      } else {
        const bool masked =
            choose_M(p, tile_M, dot, Q_factor, K_scale, bits, tile.q0 + row, kv0, unmasked);
        follow(state, exact_l, tile_M, O_acc);
        if (IN_TURN) turn.take();
        if (masked)
          weigh<true>(
              p, state, exact_l, tile_M, beta, dot, Q_factor, K_scale, P_frag, bits, tile.q0 + row,
              kv0);
        else
          weigh<false>(
              p, state, exact_l, tile_M, beta, dot, Q_factor, K_scale, P_frag, bits, tile.q0 + row,
              kv0);
      }
      if (IN_TURN) turn.pass();
      const Descriptor V_rows = V_first.stage(at.stage, sizeof(smem.V[0]));
      start_tile_sums<WgmmaU8<SUM_COLS>>(sum[0], P_frag, V_rows);
#pragma unroll
      for (int c = 0; c < HEAD_DIM; c += SUM_COLS) {
        int32_t (&own)[SUM_COLS / 2] = sum[c / SUM_COLS % 2];
        if (c + SUM_COLS < HEAD_DIM) {
          const int next = c + SUM_COLS;
          start_tile_sums<WgmmaU8<SUM_COLS>>(
              sum[next / SUM_COLS % 2], P_frag, V_rows + next * BOX_BYTES);
          wgmma_wait_group<1>();  // the sums of these columns are there
        } else {
          wgmma_wait_group<0>();
        }
        wgmma_use(own);
        add_tile(O_acc, own, beta, smem.V_scale[at.stage], c);
      }
      wgmma_use(P_frag);
      __syncwarp();  // every lane has read its scales
      if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
      at.advance();
    }
    if (!QUANTIZE_Q && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);

    // S6 store
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q = tile.q0 + row + h * 8;
      state[h].l = shfl_sum<4>(state[h].l);  // R6
      if constexpr (LSE) {
        exact_l[h] = shfl_sum<4>(exact_l[h]);  // R6
        give_mean_back(state[h], p, quant, tile, q, Q_factor[h]);
        RowState of_weights = state[h];
        of_weights.l = finite_or(exact_l[h], state[h].l);
        store_lse(p, tile, q, of_weights);
      }
    }
    cp_async_wait_group<0>();
    // All threads see the scales that any of them loaded. All have also left the tile before, whose
    // scales the next tile's scales replace.
    named_barrier_sync(CONSUMERS + warpgroup, WARPGROUP);
    float O_value[O_COLS / 2];                                       // [O_COLS / 8][4]
    V_means.apply<false>(O_value, O_acc, {state[0].l, state[1].l});  // R7
    store_tile<O_STAGED>(smem, p, O_map, tile, warp_row, O_value);
    Q_at.advance();
  }
  if (O_STAGED && lane_id() == 0) cp_async_bulk_wait_group_read();  // before the block's end
  if (IN_TURN && turn.warpgroup == 0) turn.take();  // consume the last signal, which none awaits
}
