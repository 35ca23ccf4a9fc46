// attn_fa_tc -- Hopper form: both products by wgmma, operands by the bulk tensor copy engine.
//
// Idea         Overlap. One warpgroup only copies: TMA fills rings of Q, K and V tiles, guarded by
//              mbarriers. Two or three only compute, 64 query rows each, and take turns. One starts
//              Q K^T of this step and P V of the step before. While these run, the others compute
//              their softmax.
// Differs from the portable form: registers move from the copying to the computing warpgroups.
//              wgmma reads Q and K from shared memory. A block computes one tile of query rows
//              after another, and the next Q is already being copied. O leaves through the place of
//              Q. M is lazy in both, but here rises for all rows of a warp together. Tiles of the
//              last wave are cut along the keys if they are alike, so no block is idle
//              (pieces.cuh).
// Kept simple  A warpgroup runs nothing beside its softmax. Rows of the next packed sequence are
//              copied, too, and become zeros. Warpgroups of a block share blocks of a block mask.
// Scores       Softcap, bias and mask change S before the softmax (score_hook.cuh). A bias comes
//              with K. A mask is bits, read only in steps that it masks in part. A bias of -inf
//              masks NaN: if a sum is NaN, the bias is read again.
// Rounding     R2 tensor core over HEAD_DIM, R3 softcap and bias, R4 exp2, R5 P to 16 bits, R6
//              alpha, l and the tensor core over keys, R7 times 1/l and store (numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/io/output.cuh"
#include "prims/params.cuh"
#include "prims/schedule/pieces.cuh"
#include "prims/score/score.cuh"
#include "prims/score/score_hook.cuh"
#include "prims/io/varlen.cuh"
#include "prims/schedule/work_tile.cuh"

constexpr int WARPGROUP = 128;                       // threads
constexpr int CONSUMERS = BLOCK_Q / 64;              // warpgroups that compute
constexpr int BOX_COLS = 64;                         // columns per box: 128 bytes, one swizzle
constexpr int BOX_BYTES = 128;                       // per row of a box
constexpr int BOXES = ceil_div(HEAD_DIM, BOX_COLS);  // per row
constexpr int O_COLS =
    HEAD_DIM <= 64 ? 64 : round_up(HEAD_DIM, 32);  // columns of O that are computed
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
// Tiles differ in work: blocks take them as they come.
constexpr bool UNEVEN = (CAUSAL && !STACKED) || WINDOW || VARLEN || BLOCK_MASK || SCORES_UNEVEN;
constexpr bool LISTED = BLOCK_MASK || MASKED;  // a list names the steps
constexpr bool PIECES = !UNEVEN;       // or tiles are alike, and tiles of the last wave may be cut
constexpr float LARGEST_SUM = 256.0f;  // 2^LARGEST_EXPONENT, of a lane's weights, or M rises

constexpr int ROW_BYTES = BOXES * BOX_BYTES;
constexpr int Q_STAGES =
    (2 * BLOCK_Q + 2 * NUM_STAGES * BLOCK_KV) * ROW_BYTES + NUM_STAGES * SCORE_STAGE_BYTES <=
            225 * 1024
        ? 2
        : 1;
// O leaves through the place of its Q, unless the next Q has no other place.
constexpr bool O_TAKES_Q = Q_STAGES == 2;

struct SharedStorage {
  alignas(1024) elem_t Q[Q_STAGES][BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t K[NUM_STAGES][BOXES][BLOCK_KV * BOX_COLS];
  alignas(1024) elem_t V[NUM_STAGES][BOXES][BLOCK_KV * BOX_COLS];
  WorkTile tile[Q_STAGES];  // that Q belongs to
  Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];  // K of a step and V of the one before
  int step[NUM_STAGES];                          // of that K; not read unless LISTED
  ScorePlaces<SCORED> places;                    // of what comes with it
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base
constexpr int STAGE_BYTES = sizeof(SharedStorage::K[0]);              // of K, and of V

static_assert(ELEM_IS_16_BIT, "fa_tc multiplies float16 or bfloat16");
static_assert(
    BLOCK_Q == 128 || BLOCK_Q == 192,
    "BLOCK_Q must be 128 or 192: two or three warpgroups of 64 rows fill the registers");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP,
    "NUM_WARPS must be 4 for every 64 rows of BLOCK_Q and 4 that copy");
static_assert(
    CONSUMERS == 2 || HEAD_DIM <= 128,
    "BLOCK_Q must be 128 past HEAD_DIM 128: two warpgroups have registers for O");
static_assert(
    !STACKED || !(WINDOW || VARLEN || BLOCK_MASK),
    "stacked heads take no window, packed sequences or block mask");
static_assert(
    BLOCK_KV >= 64 && BLOCK_KV <= 256 && BLOCK_KV % 16 == 0,
    "BLOCK_KV must be a multiple of 16 from 64 to 256, the columns of a wgmma");

// S3 scores: S [64, BLOCK_KV] = Q K^T, in the background.
__device__ __forceinline__ void start_scores(
    float (&S_acc)[BLOCK_KV / 2], Descriptor Q_rows, Descriptor K_rows) {
  wgmma_use(S_acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < ceil_div(HEAD_DIM, 16); ++k) {  // 32 bytes of a row, then the next box
    const int box = k / 4, byte = k % 4 * 32;
    Wgmma<elem_t, BLOCK_KV>::ss(
        S_acc, Q_rows + (box * BLOCK_Q * BOX_BYTES + byte),
        K_rows + (box * BLOCK_KV * BOX_BYTES + byte), k > 0);  // R2
  }
  wgmma_commit_group();
}

// S5 output: O [64, O_COLS] += P V, in the background.
__device__ __forceinline__ void start_output(
    float (&O_acc)[O_COLS / 2], uint32_t (&P_frag)[BLOCK_KV / 16][4], Descriptor V_rows) {
  wgmma_use(O_acc);
  wgmma_use(P_frag);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 16; ++k)
    Wgmma<elem_t, O_COLS>::rs(O_acc, P_frag[k], V_rows + k * 16 * BOX_BYTES);  // R6
  wgmma_commit_group();
}

// S4 softmax: weights P of the scores, in 16 bits and two neighbouring keys in a register, the left
// operand of P V. M stays unchanged. It rises to the largest score only if a lane's weights sum to
// more than LARGEST_SUM, or if `rises` is set. Returns whether it rose: O must then be multiplied
// by alpha. `q` is the first of this lane's two rows, the other is q + 8.
__device__ __forceinline__ bool softmax(
    const AttnParams& p, RowState (&state)[2], float (&S_acc)[BLOCK_KV / 2],
    uint32_t (&P_frag)[BLOCK_KV / 16][4], float (&alpha)[2], const WorkTile& tile, int q, int kv0,
    int unmasked, bool rises) {
  if (!ScoreMask::admits_all(p, q, kv0, unmasked)) {
    const ScoreMask mask(p, q, kv0);
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 2; ++i) S_acc[i] = mask.admits(i) ? S_acc[i] : NEG_INF;
  }
  float to_log2 = p.scale_log2;
  float M[2] = {state[0].M, state[1].M};  // -inf: no key yet, and every weight is infinite or NaN
  bool advanced = false, looked_at_bias = false;
  while (true) {
    if (rises && !(BIAS && advanced)) {
      advanced = true;
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // row, then row + 8
        float m = NEG_INF;
#pragma unroll
        for (int n = 0; n < BLOCK_KV / 8; ++n)
          m = fmaxf(m, fmaxf(S_acc[4 * n + 2 * h], S_acc[4 * n + 2 * h + 1]));
        alpha[h] = state[h].advance(row_maximum_of_any_size(shfl_max<4>(m), p.scale_log2));
      }
      subtract_large<BLOCK_KV / 2>(state, S_acc, to_log2, M);
    }
    float sum[2] = {0.0f, 0.0f};  // this lane's part
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 4; ++i) {
      const int h = i % 2;
      const float x = ex2_approx_ftz(exponent(S_acc[2 * i], to_log2, -M[h]));      // R4
      const float y = ex2_approx_ftz(exponent(S_acc[2 * i + 1], to_log2, -M[h]));  // R4
      sum[h] += x, sum[h] += y;                                                    // R6
      P_frag[i / 4][i % 4] = pack_rn<elem_t>(x, y);                                // R5
    }
    if constexpr (BIAS) {
      if (!looked_at_bias && __any_sync(FULL_WARP, isnan(sum[0]) || isnan(sum[1]))) {
        uint32_t bits[2];
        BiasInMemory(p, tile.batch, tile.head).admitted(bits, q, kv0);
        apply_mask(S_acc, bits);
        looked_at_bias = true;
        continue;
      }
    }
    // NOTE: comparisons with NaN are false, so the test is whether the sums are small.
    if (rises || __all_sync(FULL_WARP, sum[0] <= LARGEST_SUM && sum[1] <= LARGEST_SUM)) {
      state[0].l += sum[0], state[1].l += sum[1];  // R6
      return rises;
    }
    rises = true;
  }
}

// O to the new M.
__device__ __forceinline__ void rescale(float (&O_acc)[O_COLS / 2], const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < O_COLS / 2; ++i) O_acc[i] *= alpha[i / 2 % 2];  // R6
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_tc(
    const __grid_constant__ AttnParams call, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap O_map, const __grid_constant__ ScheduleParams schedule,
    const __grid_constant__ PieceParams pieces SCORE_PARAMETERS) {
  extern __shared__ unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(
      (reinterpret_cast<uint64_t>(shared_bytes) + 1023) & ~uint64_t(1023));
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const Scoring<SCORED> scoring SCORE_ARGUMENTS;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Q_STAGES; ++s) {
      mbarrier_init(smem.Q_full[s], 1);
      mbarrier_init(smem.Q_empty[s], CONSUMERS * 4);  // a lane of every consumer warp
    }
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(smem.full[s], 1);
      mbarrier_init(smem.empty[s], CONSUMERS * 4);
    }
    smem.places.init(CONSUMERS * 4);
    fence_mbarrier_init();
  }
  __syncthreads();       // the barriers are initialised before anyone waits or arrives
  if (warpgroup == 0) {  // ---- the producer, one thread: S1 and S2
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    TileRange tiles(call);
    RingPosition<Q_STAGES> Q_at;
    RingPosition<NUM_STAGES> at;  // of K and V
    ScoreLoads<SCORED> load_scores;
    int index = blockIdx.x;
    while (true) {
      const Piece piece(pieces, index, blockIdx.x, gridDim.x);
      const int number_of_tile = PIECES ? piece.tile : index;
      if (!tiles.reach(call, number_of_tile)) {
        mbarrier_wait_parity(smem.Q_empty[Q_at.stage], Q_at.parity ^ 1);  // the last was read
        smem.tile[Q_at.stage] = {{}, -1, 0, 0, 0, 0, -1};
        mbarrier_arrive(smem.Q_full[Q_at.stage]);
        return;
      }
      const Sequences<VARLEN> sequences(call, tiles.sequence);
      const auto& p = of_sequences(call, sequences);
      WorkTile tile = work_tile<UNEVEN, 2 * sizeof(elem_t)>(
          p, sequences, tiles.sequence, number_of_tile - tiles.first);
      const KeptKeys keys(
          p, tile.batch, tile.head, tile.q0, kv_begin(p, tile.q0), kv_end(p, tile.q0, BLOCK_Q));
      int number = round_down(keys.begin, BLOCK_KV);  // of a step, as KeptKeys counts
      tile.steps = max(1, ceil_div(keys.end - number, BLOCK_KV));
      TileSteps<MASKED> listed(scoring, p, tile);
      if (MASKED) tile.steps = listed.steps();
      if constexpr (PIECES) {
        number = piece.first * BLOCK_KV;
        tile.steps = piece.steps, tile.first = piece.first, tile.slot = piece.slot;
      }
      // S1 load Q
      const auto load_Q = [&] {
        mbarrier_wait_parity(smem.Q_empty[Q_at.stage], Q_at.parity ^ 1);  // this Q was read
        smem.tile[Q_at.stage] = tile;
        mbarrier_arrive_expect_tx(smem.Q_full[Q_at.stage], sizeof(smem.Q[0]));
        for (int b = 0; b < BOXES; ++b)
          cp_async_bulk_tensor_4d(
              smem.Q[Q_at.stage][b], Q_map, smem.Q_full[Q_at.stage], b * BOX_COLS,
              tile.first_row() + tile.q0, tile.head, tile.entry());
        Q_at.advance();
      };
      // NOTE: with room for one Q, the copy of Q waits for the last Q to be read, and K goes first.
      if (Q_STAGES > 1) load_Q();
      // S2 load K, V: K of a step, V of the one before
      int kv0 = 0;
      const auto ask = [&] {  // which tile is next
        return int(UNEVEN ? gridDim.x + atomicAdd(schedule.next_tile, 1) : index + gridDim.x);
      };
      int next = 0;
      for (int step = 0; step <= tile.steps; ++step, number += BLOCK_KV, at.advance()) {
        // NOTE: requested here, the tile arrives while the last V waits for its stage. Causal calls
        // without mask or bias would be slower.
        if (SCORES_UNEVEN && step == tile.steps) next = ask();
        const int V_kv0 = kv0;
        // NOTE: rows that keep no block take one step behind the last key, which is zeros. A box of
        // a bias must begin at a multiple of 16 bytes, or it is an illegal instruction.
        kv0 = BLOCK_MASK && number >= keys.end ? round_up(p.len_kv, BLOCK_KV) : keys.key(number);
        const int step_word = MASKED ? listed.take() : kv0;
        if (MASKED) kv0 = first_key(step_word);
        mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // these were read
        if (LISTED) smem.step[at.stage] = step_word;
        mbarrier_arrive_expect_tx(
            smem.full[at.stage], ((step < tile.steps) + (step > 0)) * STAGE_BYTES +
                                     (step < tile.steps ? load_scores.bytes(step_word) : 0));
        for (int b = 0; b < BOXES && step < tile.steps; ++b)
          cp_async_bulk_tensor_4d(
              smem.K[at.stage][b], K_map, smem.full[at.stage], b * BOX_COLS, tile.first_key() + kv0,
              tile.head_kv, tile.entry());
        if (Q_STAGES == 1 && step == 0) load_Q();
        for (int b = 0; b < BOXES && step > 0; ++b)
          cp_async_bulk_tensor_4d(
              smem.V[at.stage][b], V_map, smem.full[at.stage], b * BOX_COLS,
              tile.first_key() + V_kv0, tile.head_kv, tile.entry());
        if (SCORED && step < tile.steps)
          load_scores(scoring, smem.places, at.stage, smem.full[at.stage], tile, step_word);
      }
      index = SCORES_UNEVEN ? next : ask();
    }
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int row0 = (warpgroup - 1) * 64;           // first row of this warpgroup in the tile
  const int warp_row = row0 + warp_id() % 4 * 16;  // and of this warp
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  const int row = warp_row + g;                    // this lane's rows of the tile: row, row + 8
  const Turn<CONSUMERS> turn = {warpgroup - 1};    // at the tensor cores
  if (warpgroup == CONSUMERS) turn.pass();         // the first warpgroup begins
  RingPosition<Q_STAGES> Q_at;
  RingPosition<NUM_STAGES> at;  // of K of a step and V of the one before
  ScoreChange<SCORED> change_scores;
  const Descriptor K_first = uniform(descriptor_k_major(smem.K[0][0]));
  const Descriptor V_first = uniform(descriptor_n_major(smem.V[0][0], BLOCK_KV * BOX_BYTES));

  bool leaving = false;  // the tile before, its O through the place of its Q
  while (true) {
    // S0 locate
    mbarrier_wait_parity(smem.Q_full[Q_at.stage], Q_at.parity);  // Q has arrived, and its tile
    const WorkTile tile = uniform(smem.tile[Q_at.stage]);
    if (tile.q0 < 0) break;
    const auto& p = of_sequences(call, tile);
    // NOTE: all rows of a warp raise M together. Zeros keep rows of the next sequence from doing
    // so.
    if (VARLEN) zero_rows<WARPGROUP>(smem.Q[Q_at.stage], max(row0, p.len_q - tile.q0), row0 + 64);
    int kv0 = round_down(kv_begin(p, tile.q0), BLOCK_KV) + tile.first * BLOCK_KV;
    const int unmasked = kv_unmasked_end(p, tile.q0 + row0);
    const Descriptor Q_rows = uniform(descriptor_k_major(&smem.Q[Q_at.stage][0][row0 * BOX_COLS]));
    RowState state[2];             // of row and row + 8
    float O_acc[O_COLS / 2] = {};  // [O_COLS / 8][4]
    float S_acc[BLOCK_KV / 2];     // [BLOCK_KV / 8][4]
    uint32_t P_frag[BLOCK_KV / 16][4];
    float alpha[2];
    change_scores.begin(p, tile, tile.q0 + row);

    // The first scores, by themselves.
    mbarrier_wait_parity(smem.full[at.stage], at.parity);  // K has arrived
    int step_word = LISTED ? smem.step[at.stage] : 0;
    if (LISTED) kv0 = first_key(step_word);
    turn.take();
    start_scores(S_acc, Q_rows, K_first.stage(at.stage, STAGE_BYTES));
    turn.pass();
    wgmma_wait_group<0>();
    wgmma_use(S_acc);
    change_scores(
        scoring, smem.places, p, S_acc, at.stage, warp_row, tile.q0 + row, step_word,
        smem.empty[at.stage]);  // R3
    at.advance();
    softmax(p, state, S_acc, P_frag, alpha, tile, tile.q0 + row, kv0, unmasked, true);
    if (leaving && lane_id() == 0) {
      cp_async_bulk_wait_group_read();
      mbarrier_arrive(smem.Q_empty[Q_at.stage ^ 1]);
    }

    for (int step = 1; step < tile.steps; ++step) {  // K of this step, V of the one before
      const Descriptor K_rows = K_first.stage(at.stage, STAGE_BYTES);
      const Descriptor V_rows = V_first.stage(at.stage, STAGE_BYTES);
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // K and V have arrived
      step_word = LISTED ? smem.step[at.stage] : 0;
      turn.take();
      start_scores(S_acc, Q_rows, K_rows);
      start_output(O_acc, P_frag, V_rows);
      turn.pass();
      wgmma_wait_group<0>();
      wgmma_use(S_acc);
      wgmma_use(O_acc);
      change_scores(
          scoring, smem.places, p, S_acc, at.stage, warp_row, tile.q0 + row, step_word,
          smem.empty[at.stage]);
      at.advance();
      kv0 = LISTED ? first_key(step_word) : kv0 + BLOCK_KV;
      if (softmax(p, state, S_acc, P_frag, alpha, tile, tile.q0 + row, kv0, unmasked, false))
        rescale(O_acc, alpha);
    }
    if (!O_TAKES_Q && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);

    // The last output, by itself.
    mbarrier_wait_parity(smem.full[at.stage], at.parity);  // V has arrived
    // NOTE: a weight of 0 does not silence a NaN. The first warpgroup's turn comes first.
    if (VARLEN && turn.warpgroup == 0)
      zero_rows<WARPGROUP>(smem.V[at.stage], max(0, p.len_kv - kv0), BLOCK_KV);
    turn.take();
    start_output(O_acc, P_frag, V_first.stage(at.stage, STAGE_BYTES));
    turn.pass();
    wgmma_wait_group<0>();
    wgmma_use(O_acc);
    if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
    at.advance();

    // S6 store
    float inverse_l[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state[h].l = shfl_sum<4>(state[h].l);  // R6
      if (PIECES && tile.slot >= 0) {        // as it is: merge_pieces.cu divides and stores
        store_piece_row<O_COLS>(
            pieces, tile.slot, row, h, O_acc, {state[h].M, state[h].l, state[h].l});
        continue;
      }
      inverse_l[h] = state[h].inverse_l();
      const int q = tile.q0 + row + h * 8;
      if constexpr (LSE)
        if (t == 0 && q < p.len_q)
          lse_of(p, int64_t(tile.batch) * p.heads + tile.head, tile.head)[q] = state[h].lse();
    }
    if (PIECES && tile.slot >= 0) {
      if (O_TAKES_Q && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);
      leaving = false;
      Q_at.advance();
      continue;
    }
#pragma unroll
    for (int i = 0; i < O_COLS / 2; ++i) O_acc[i] *= inverse_l[i / 2 % 2];  // R7
    OutputFragment<O_COLS> O_frag;
    pack_sums<elem_t>(O_frag, O_acc);  // R7
    const int q = tile.q0 + warp_row;
    elem_t* O = static_cast<elem_t*>(p.O)  // [len_q - q, HEAD_DIM]
                + tile.batch * p.O_stride.batch + tile.head * p.O_stride.head + q * p.O_stride.len;
    if constexpr (O_TAKES_Q) {
      // NOTE: Q has been read: the last turn began when all four warps had waited for its products.
      constexpr int BOX = BLOCK_Q * BOX_COLS;
      elem_t* O_rows = &smem.Q[Q_at.stage][0][warp_row * BOX_COLS];  // [BOXES][16, BOX_COLS]
      stage_output<BOX>(O_rows, O_frag);
      send_output<BOX>(
          O, p.O_stride.len, O_rows, p.len_q - q, O_map, tile.first_row() + q, tile.head,
          tile.entry());
      leaving = true;
    } else {
      store_fragment(O, p.O_stride.len, p.len_q - q, O_frag);
    }
    Q_at.advance();
  }
  if (leaving && lane_id() == 0) cp_async_bulk_wait_group_read();  // before the block's end
  if (turn.warpgroup == 0) turn.take();  // consume the last signal; no warpgroup waits for it
}
