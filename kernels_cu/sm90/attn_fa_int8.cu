// attn_fa_int8 -- Hopper form: Q K^T by wgmma over INT8 codes, P V by wgmma in 16 bits.
//
// Idea         Issue slots. INT8 halves the tensor-core time of Q K^T, so the softmax decides. A
//              score costs conversion, multiplication, addition, exp2, sum and pack, nothing more.
//              Both scales are one factor in the exponent's fma, computed once for all keys of a
//              scale, ideally of a step. M is lazy: most steps, masked ones too, need no maximum
//              and no rescale. If V has room for a column near 1, its product sums the weights.
// Differs from the Hopper form of fa_tc: S1 and S2 load codes, and K's scales beside K. If Q comes
//              as numbers, its warps make the codes, so no pass writes them. S3 multiplies
//              integers; zero points are in the accumulators from the start (zero_points_sm90.cuh).
//              S4 applies the scales, and tests the largest pair of weights, not their sum. O has
//              twice the bytes of Q, hence a separate place. (diff attn_fa_tc.cu attn_fa_int8.cu)
// Kept simple  At least 16 adjacent keys share a scale. Packed sequences, block masks as in fa_tc.
// Scores       Softcap or bias: integers become log2 units (score_hook.cuh), with factor 1. A mask
//              alone clears bits of packed weights, two at a time (step_bits.cuh).
// Rounding     R1 by quantize.cu, or of Q in quantize_q.cuh; R3 dot to float (exact), softcap and
//              bias, the factor of both scales, within R4's fma; R4 exp2, R5 P to 16 bits, R6
//              alpha, l and the tensor core over keys, R7 times 1/l and store. Tried: NOTES.md
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/io/output.cuh"
#include "prims/params.cuh"
#include "prims/schedule/pieces.cuh"
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
#include "sm90/int8/scored_step.cuh"
#include "sm90/int8/step_bits.cuh"
#include "sm90/int8/warpgroups.cuh"

constexpr int V_BOX_COLS = 64;                           // columns of V per box
constexpr int V_BOXES = ceil_div(HEAD_DIM, V_BOX_COLS);  // per row of V
// A box behind V, filled with SUMMED, makes the next 8 columns of P V the sum of P. It is left out
// if V's last box is half used, or if the columns of a wgmma or the shared memory do not suffice.
// NOTE: not 1. Tensor cores truncate products at the last digit of the sum. P V has digits past it,
// and P 1 has none: O would be truncated, its divisor would not.
constexpr float SUMMED = 1.0f + ELEM16_STEP;
constexpr int SUM_BOXES = HEAD_DIM <= 128 && O_COLS % V_BOX_COLS == 0 ? 1 : 0;
constexpr int PV_COLS = O_COLS + 8 * SUM_BOXES;
// Weights that a mask of rows does not admit are cut out of P, which the product with V sums. The
// sum for lse takes weights before rounding, and nothing is cut from it.
// NOTE: not with a mask of keys: it spills at HEAD_DIM 64, and a tile has a mixed step or two.
constexpr bool CUTS_WEIGHTS = MASK_ALONE && MASK_KIND == MaskKind::ROWS && SUM_BOXES && !LSE;
constexpr bool PIECES = !UNEVEN;  // tiles are alike: tiles of the last wave may be cut
// M rises if a weight reaches 2 to this power. P and its sums can hold smaller weights. Exponents
// that M's rounding causes are capped there, too.
constexpr int HEADROOM = int(LARGEST_EXPONENT);

// Warpgroups take turns at the tensor cores in every step. With products as short as at HEAD_DIM
// 64, they do not collide without turns.
constexpr bool IN_TURN = HEAD_DIM > 64;
constexpr int INPUT_BYTES =
    BOX_BYTES *
    (Q_ROW_BOXES * BLOCK_Q + NUM_STAGES * (CODE_BOXES + V_BOXES + SUM_BOXES) * BLOCK_KV);
// O leaves through shared memory if there is room for it.
constexpr bool O_STAGED =
    ELEM_IS_16_BIT &&
    INPUT_BYTES + NUM_STAGES * SCORE_STAGE_BYTES + BLOCK_Q * STORE_BOXES * BOX_BYTES <= 220 * 1024;

struct SharedStorage {
  alignas(1024) int8_t Q[Q_STAGES][Q_BOXES][BLOCK_Q * BOX_BYTES];
  alignas(1024) int8_t K[NUM_STAGES][CODE_BOXES][BLOCK_KV * BOX_BYTES];
  alignas(1024) elem16_t V[NUM_STAGES][V_BOXES + SUM_BOXES][BLOCK_KV * V_BOX_COLS];
  alignas(1024) elem_t O[O_STAGED ? BLOCK_Q / STORE_ROWS * OWN_BOXES : 1];
  alignas(QUANTIZE_Q ? 1024 : 1) int8_t Q_codes[CODE_BOXES][QUANTIZE_Q ? BLOCK_Q * BOX_BYTES : 1];
  WorkTile tile[Q_STAGES];  // that Q belongs to
  Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];  // K of a step and V of the one before
  int step[NUM_STAGES];                          // of that K; not read unless LISTED
  float K_scale[NUM_STAGES][SCALES];             // of its keys
  ScorePlaces<SCORED> places;                    // of softcap, bias and mask
  int whole_steps[NUM_STAGES];                   // of the tile whose first K it is
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + SHARED_ZEROS_BYTES;
constexpr int K_BYTES = sizeof(SharedStorage::K[0]);  // that arrive for a step
constexpr int V_BYTES = V_BOXES * sizeof(SharedStorage::V[0][0]);

// S2 load K, V: K of a step, V of the one before.
struct LoadStage {
  static constexpr int V_STEPS = 1;  // stages of a tile that hold V alone
  SharedStorage& smem;
  const TensorMap &K_map, &V_map;
  int V_kv0;  // first key of that V

  __device__ __forceinline__ void begin(const AttnParams&, const WorkTile&) { V_kv0 = 0; }
  __device__ __forceinline__ void operator()(
      const WorkTile& tile, RingPosition<NUM_STAGES> at, const KeyStep& step) {
    Mbarrier& full = smem.full[at.stage];
    if (WHOLE_STEPS && step.index == 0) smem.whole_steps[at.stage] = step.whole;
    mbarrier_arrive_expect_tx(
        full, (step.index < tile.steps ? K_BYTES : 0) + (step.index > 0 ? V_BYTES : 0) +
                  step.score_bytes);
    if (step.index < tile.steps) load_K(smem.K[at.stage], K_map, full, tile, step.kv0);
    for (int b = 0; b < V_BOXES && step.index > 0; ++b)
      cp_async_bulk_tensor_4d(
          smem.V[at.stage][b], V_map, full, b * V_BOX_COLS, tile.first_key() + V_kv0, tile.head_kv,
          tile.entry());
    V_kv0 = step.kv0;
  }
};

// S5 output: O [64, PV_COLS] += P V, in the background.
__device__ __forceinline__ void start_output(
    float (&O_acc)[PV_COLS / 2], uint32_t (&P_frag)[BLOCK_KV / 16][4], Descriptor V_rows) {
  wgmma_use(O_acc);
  wgmma_use(P_frag);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 16; ++k)
    Wgmma<elem16_t, PV_COLS>::rs(O_acc, P_frag[k], V_rows + k * 16 * BOX_BYTES);  // R6
  wgmma_commit_group();
}

// The scores of a step as numbers without their factor, -inf if masked. Afterwards no factor is 0,
// and none is NaN if all keys that share its scale are masked.
__device__ __forceinline__ void admit_scores(
    const AttnParams& p, float (&S_acc)[BLOCK_KV / 2], const int32_t (&dot)[BLOCK_KV / 2],
    Factors& factor, const StepBits<MASK_ALONE>& bits, int q, int kv0) {
  const StepMask<MASK_ALONE> mask(p, q, kv0, bits);
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i) S_acc[i] = mask.admits(i) ? float(dot[i]) : NEG_INF;
#pragma unroll
  for (int j = 0; j < SCALES; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = j * PART + 2 * h, last = first + PART - 3;  // scores of the row in the part
      if (factor[j][h] == 0.0f || !mask.admits_any(first, last)) factor[j][h] = __int_as_float(1);
    }
}

// The largest scores of a lane's two rows, -inf if all are masked.
__device__ __forceinline__ void row_maxima(
    float (&m)[2], const float (&S_acc)[BLOCK_KV / 2], const Factors& factor) {
  m[0] = m[1] = NEG_INF;
#pragma unroll
  for (int j = 0; j < SCALES; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = NEG_INF;  // of the keys that share the factor
#pragma unroll
      for (int i = j * PART + 2 * h; i < (j + 1) * PART; i += 4)
        largest = fmaxf(largest, fmaxf(S_acc[i], S_acc[i + 1]));
      m[h] = fmaxf(m[h], row_maximum_of_any_size(largest, factor[j][h]));  // R3
    }
}

// Weights P of scores, in 16 bits and two neighbouring keys in a register, the left operand of P V.
// Returns whether they are small enough, each less than 2^HEADROOM. CAPPED: none is more.
// Masked weights are 0 in P, but `sum` includes them.
template <bool CAPPED, typename T, bool CUT = false>
__device__ __forceinline__ bool weigh(
    const float (&M)[2], const T (&S_acc)[BLOCK_KV / 2], const Factors& factor,
    uint32_t (&P_frag)[BLOCK_KV / 16][4], float (&sum)[2],
    const AdmittedPairs<CUT>& admitted = {}) {
  sum[0] = sum[1] = 0.0f;
  uint32_t largest = 0;  // of both rows, in either half
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 4; ++i) {
    const int h = i % 2;
    float x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = 2 * i + j;
      x[j] = ex2_approx_ftz(
          exponent(float(S_acc[at]), factor[at / PART][h], -M[h], CAPPED));  // R3, R4
      sum[h] += x[j];                                                        // R6
    }
    P_frag[i / 4][i % 4] = pack_rn<elem16_t>(x[0], x[1]) & admitted(i);  // R3, R5
    if (i % 2) largest = max3_packed(largest, P_frag[i / 4][i % 4 - 1], P_frag[i / 4][i % 4]);
  }
  return __all_sync(FULL_WARP, packed_below<elem16_t>(largest, HEADROOM));
}

// S4 softmax: weights P of the scores. M stays unchanged, unless weights are too large. Then M
// rises to the largest score, and O and l are rescaled. In the FIRST step, with O = 0, M always
// rises. `q` is the first of this lane's two rows, the other is q + 8.
template <bool FIRST>
__device__ __forceinline__ void softmax(
    const AttnParams& p, RowState (&state)[2], float (&O_acc)[PV_COLS / 2],
    const int32_t (&dot)[BLOCK_KV / 2], const float (&Q_factor)[2], const float (&K_scale)[SCALES],
    uint32_t (&P_frag)[BLOCK_KV / 16][4], const StepBits<MASK_ALONE>& bits, int q, int kv0,
    int unmasked) {
  Factors factor;
  make_factors(factor, Q_factor, K_scale);
  const bool masked = !bits.admit_all(p, q, kv0, unmasked);
  float M[2] = {state[0].M, state[1].M};  // -inf: no key yet, and every weight is infinite or NaN
  float sum[2];                           // this lane's part
  bool weighed = !FIRST && !masked && weigh<false>(M, dot, factor, P_frag, sum);
  if (CUTS_WEIGHTS && !FIRST && masked) {
    const StepMask<MASK_ALONE> mask(p, q, kv0, bits);
    weighed = weigh<false>(M, dot, factor, P_frag, sum, AdmittedPairs<MASK_ALONE>(mask));
  }
  // NOTE: this ties P to the registers that P V reads. Otherwise P is in other registers, and a
  // step takes 16 moves.
  wgmma_use(P_frag);
  if (!weighed) {
    float S_acc[BLOCK_KV / 2];
    admit_scores(p, S_acc, dot, factor, bits, q, kv0);
    const bool stays =
        !FIRST && masked && !CUTS_WEIGHTS && weigh<false>(M, S_acc, factor, P_frag, sum);
    wgmma_use(P_frag);
    if (!stays) {
      float m[2], alpha[2];
      row_maxima(m, S_acc, factor);
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // row, then row + 8
        alpha[h] = state[h].advance(shfl_max<4>(m[h]));
        M[h] = state[h].M_finite();
      }
#pragma unroll
      for (int i = 0; i < PV_COLS / 2 && !FIRST; ++i) O_acc[i] *= alpha[i / 2 % 2];  // R6
      weigh<true>(M, S_acc, factor, P_frag, sum);
    }
  }
  state[0].l += sum[0], state[1].l += sum[1];  // R6
}
// The same for scores that are numbers in log2 units, -inf if masked.
template <bool FIRST>
__device__ __forceinline__ void softmax(
    RowState (&state)[2], float (&O_acc)[PV_COLS / 2], const float (&S_acc)[BLOCK_KV / 2],
    uint32_t (&P_frag)[BLOCK_KV / 16][4]) {
  Factors one;
#pragma unroll
  for (int j = 0; j < SCALES; ++j) one[j][0] = one[j][1] = 1.0f;
  float M[2] = {state[0].M, state[1].M};
  float sum[2];  // this lane's part
  const bool stays = !FIRST && weigh<false>(M, S_acc, one, P_frag, sum);
  wgmma_use(P_frag);
  if (!stays) {
    float m[2], alpha[2];
    row_maxima(m, S_acc, one);
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // row, then row + 8
      alpha[h] = state[h].advance(shfl_max<4>(m[h]));
      M[h] = state[h].M_finite();
    }
#pragma unroll
    for (int i = 0; i < PV_COLS / 2 && !FIRST; ++i) O_acc[i] *= alpha[i / 2 % 2];  // R6
    weigh<true>(M, S_acc, one, P_frag, sum);
  }
  state[0].l += sum[0], state[1].l += sum[1];  // R6
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_int8(
    const __grid_constant__ AttnParams call, const __grid_constant__ QuantParams quant,
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap O_map,
    const __grid_constant__ ScheduleParams schedule,
    const __grid_constant__ PieceParams pieces SCORE_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  auto& zeros = *reinterpret_cast<SharedZeros*>(shared_bytes + sizeof(SharedStorage));
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const Scoring<SCORED> scoring SCORE_ARGUMENTS;

  if (threadIdx.x == 0) {
    init_ring(smem.Q_full, 1, smem.Q_empty, CONSUMER_WARPS + PRODUCERS - 1);  // all other warps
    init_ring(smem.full, PRODUCERS, smem.empty, CONSUMER_WARPS);
    smem.places.init(CONSUMER_WARPS);
    fence_mbarrier_init();
  }
  if constexpr (SUM_BOXES) {
    for (int s = 0; s < NUM_STAGES; ++s)
      for (int i = threadIdx.x; i < BLOCK_KV * V_BOX_COLS; i += NUM_THREADS)
        smem.V[s][V_BOXES][i] = elem16_t(SUMMED);
    fence_proxy_async();  // wgmma shall see them
  }
  __syncthreads();       // barriers and these boxes are there before anyone waits or multiplies
  if (warpgroup == 0) {  // ---- the producer, one thread: S1 and S2
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if constexpr (ZERO_POINTS)
      if (warp_id() == 1) zeros.load_keys<1>(smem, smem.full, smem.empty, call, quant, scoring);
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    produce<elem16_t>(
        smem, smem.full, smem.empty, call, quant, Q_map, schedule, scoring, cut_if_alike(pieces),
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
  RingPosition<NUM_STAGES> at;  // of K of a step and V of the one before
  ScoreChange<SCORED> change_scores;
  const Descriptor K_first = uniform(descriptor_k_major(smem.K[0][0]));
  const Descriptor V_first = uniform(descriptor_n_major(smem.V[0][0], BLOCK_KV * BOX_BYTES));

  while (true) {
    // S0 locate
    mbarrier_wait_parity(smem.Q_full[Q_at.stage], Q_at.parity);  // Q has arrived, and its tile
    const WorkTile tile = uniform(smem.tile[Q_at.stage]);
    if (tile.q0 < 0) break;
    const auto& p = of_sequences<int8_t, elem16_t>(call, tile);
    // NOTE: all rows of a warp raise M together. Zeros keep rows of the next sequence from doing
    // so.
    if (VARLEN && !QUANTIZE_Q)
      zero_rows<WARPGROUP>(smem.Q[Q_at.stage], max(row0, p.len_q - tile.q0), row0 + 64);
    int kv0 = round_down(kv_begin(p, tile.q0), BLOCK_KV) + tile.first * BLOCK_KV;
    const int unmasked = kv_unmasked_end(p, tile.q0 + row0);
    const int8_t* Q_codes =  // [CODE_BOXES][BLOCK_Q, 128]
        QUANTIZE_Q ? smem.Q_codes[0] : smem.Q[Q_at.stage][0];
    const Descriptor Q_rows = uniform(descriptor_k_major(Q_codes + row0 * BOX_BYTES));
    RowState state[2];              // of row and row + 8
    float O_acc[PV_COLS / 2] = {};  // [PV_COLS / 8][4]
    int32_t dot[BLOCK_KV / 2];      // [BLOCK_KV / 8][4]
    float S_acc[BLOCK_KV / 2];      // likewise; SCORES_CHANGE
    uint32_t P_frag[BLOCK_KV / 16][4] = {};
    float K_scale[SCALES];
    StepBits<MASK_ALONE> bits;
    float Q_factor[2];  // Q scale and softmax scale of row and row + 8
    if constexpr (QUANTIZE_Q)
      quantize_q(
          Q_factor, smem.Q_codes, smem.Q[Q_at.stage], smem.Q_empty[Q_at.stage], warp_row,
          p.len_q - tile.q0, CONSUMERS + warpgroup);
    const float* Q_scale = scales_of_rows(call, quant, tile);  // [ceil(len_q / GROUP_Q)]
    make_row_factors(Q_factor, p, Q_scale, tile.q0 + row);
    zeros.load_rows(call, quant, Q_scale, tile, row, p.len_q);
    change_scores.begin(p, tile, tile.q0 + row);

    // The last steps of a causal tile are for rows of the other warpgroups.
    constexpr bool SOME_STEPS = CAUSAL && !VARLEN && !LISTED;
    const int own_keys = kv_end(p, tile.q0 + row0, 64) - kv0;
    const int steps =
        SOME_STEPS ? min(max(1, ceil_div(own_keys, BLOCK_KV)), tile.steps) : tile.steps;

    // The first scores, by themselves.
    mbarrier_wait_parity(smem.full[at.stage], at.parity);  // K has arrived
    int step_word = LISTED ? smem.step[at.stage] : 0;
    if (LISTED) kv0 = first_key(step_word);
    const int whole_steps = WHOLE_STEPS ? uniform(smem.whole_steps[at.stage]) : 0;
    zeros.begin(dot, at.stage);
    turn.take();
    start_scores(dot, Q_rows, K_first.stage(at.stage, sizeof(smem.K[0])));
    turn.pass();
    copy_scales(K_scale, smem.K_scale[at.stage]);
    bits.load(smem.places, p, at.stage, warp_row, tile.q0 + row, step_word);
    wgmma_wait_group<0>();
    wgmma_use(dot);
    if constexpr (SCORES_CHANGE) {
      score_step(
          S_acc, dot, Q_factor, K_scale, change_scores, scoring, smem.places, p, tile, at.stage,
          warp_row, kv0, step_word, unmasked, smem.empty[at.stage]);
      at.advance();
      softmax<true>(state, O_acc, S_acc, P_frag);
    } else {
      if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
      at.advance();
      softmax<true>(
          p, state, O_acc, dot, Q_factor, K_scale, P_frag, bits, tile.q0 + row, kv0, unmasked);
    }

    for (int step = 1; step < steps; ++step) {  // K of this step, V of the one before
      const Descriptor K_rows = K_first.stage(at.stage, sizeof(smem.K[0]));
      const Descriptor V_rows = V_first.stage(at.stage, sizeof(smem.V[0]));
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // K and V have arrived
      if (!WHOLE_STEPS) {
        step_word = LISTED ? smem.step[at.stage] : 0;
        kv0 = LISTED ? first_key(step_word) : kv0 + BLOCK_KV;
      }
      zeros.begin(dot, at.stage);
      if (IN_TURN) turn.take();
      start_scores(dot, Q_rows, K_rows);
      start_output(O_acc, P_frag, V_rows);
      if (IN_TURN) turn.pass();
      copy_scales(K_scale, smem.K_scale[at.stage]);
      if (!WHOLE_STEPS) bits.load(smem.places, p, at.stage, warp_row, tile.q0 + row, step_word);
      wgmma_wait_group<0>();
      wgmma_use(dot);
      wgmma_use(O_acc);
      // NOTE: a whole step needs no word of bits, so no product waits for a word that is read here.
      if (WHOLE_STEPS) bits.admit(), kv0 = 0;
      if (WHOLE_STEPS && step >= whole_steps) {
        step_word = ld_volatile_shared(smem.step[at.stage]);
        kv0 = first_key(step_word);
        bits.load(smem.places, p, at.stage, warp_row, tile.q0 + row, step_word);
        __syncwarp();  // every lane has read before one of them frees the stage
      }
      if constexpr (SCORES_CHANGE) {
        score_step(
            S_acc, dot, Q_factor, K_scale, change_scores, scoring, smem.places, p, tile, at.stage,
            warp_row, kv0, step_word, unmasked, smem.empty[at.stage]);
        at.advance();
        softmax<false>(state, O_acc, S_acc, P_frag);
      } else {
        if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
        at.advance();
        softmax<false>(
            p, state, O_acc, dot, Q_factor, K_scale, P_frag, bits, tile.q0 + row, kv0, unmasked);
      }
    }
    if (!QUANTIZE_Q && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);

    // The last output, by itself.
    mbarrier_wait_parity(smem.full[at.stage], at.parity);  // V has arrived
    // NOTE: a weight of 0 does not silence a NaN. The first warpgroup's turn comes first.
    if (VARLEN && turn.warpgroup == 0)
      zero_rows<WARPGROUP>(smem.V[at.stage], max(0, p.len_kv - kv0), BLOCK_KV, V_BOXES);
    turn.take();
    start_output(O_acc, P_frag, V_first.stage(at.stage, sizeof(smem.V[0])));
    turn.pass();
    wgmma_wait_group<0>();
    wgmma_use(O_acc);
    if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
    at.advance();
    for (int step = steps; SOME_STEPS && step < tile.steps; ++step) {
      change_scores.skip(smem.places);                       // K of this step came with the last V
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // or an arrival would count before
      if (IN_TURN) turn.take(), turn.pass();
      if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
      at.advance();
    }

    // S6 store
    float inverse_l[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q = tile.q0 + row + h * 8;
      state[h].l = shfl_sum<4>(state[h].l);  // R6
      RowState whole = state[h];             // with the l that O is divided by
      if constexpr (SUM_BOXES) whole.l = O_acc[O_COLS / 2 + 2 * h] / SUMMED;
      if (PIECES && tile.slot >= 0) {  // as it is: merge_pieces.cu divides and stores
        store_piece_row<O_COLS>(
            pieces, tile.slot, row, h, O_acc, {state[h].M, LSE ? state[h].l : whole.l, whole.l});
        continue;
      }
      inverse_l[h] = whole.inverse_l();
      if constexpr (LSE) {
        give_mean_back(state[h], p, quant, tile, q, Q_factor[h], zeros.of_row(h));
        store_lse(p, tile, q, state[h]);
      }
    }
    if (PIECES && tile.slot >= 0) {
      Q_at.advance();
      continue;
    }
    float O_value[O_COLS / 2];  // [O_COLS / 8][4]
#pragma unroll
    for (int i = 0; i < O_COLS / 2; ++i) O_value[i] = O_acc[i] * inverse_l[i / 2 % 2];  // R7
    store_tile<O_STAGED>(smem, p, O_map, tile, warp_row, O_value);
    Q_at.advance();
  }
  if (O_STAGED && lane_id() == 0) cp_async_bulk_wait_group_read();  // before the block's end
  if (turn.warpgroup == 0) turn.take();  // consume the last signal; no warpgroup waits for it
}
