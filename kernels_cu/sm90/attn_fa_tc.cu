// attn_fa_tc -- Hopper form: both products by wgmma, operands by the bulk tensor copy engine.
//
// Idea         Who waits for whom. One warpgroup only copies: TMA fills rings of Q, K and V tiles
//              that mbarriers guard. Three only compute, 64 query rows each, in no order among
//              them: while one is in its softmax the others keep the tensor cores busy.
// Differs from the portable form: registers move from the copying to the computing warpgroups, Q
//              and K are read from shared memory by wgmma itself, P never leaves registers, and a
//              block takes one tile of query rows after another, the next Q already on its way.
// Kept simple  Within a warpgroup each step waits for the one before.
// Tried        Two computing warpgroups, Q K^T of one step beside P V of the step before, with no
//              ordering between them: 0.75 of this form. Descriptors built anew for every wgmma:
//              ten issue slots each, 2 % slower. Tiles in a fixed order: 0.5 to 0.75 under a causal
//              mask, where their work differs. Two chains for each maximum and sum: no change.
//              BLOCK_KV 64: 0.80, 96: 0.93, 112: 0.96; 144 spills. (head_dim 128; see
//              experiments/results/NOTES.md)
// Rounding     R2 tensor core over HEAD_DIM, R4 exp2, R5 P to 16 bits, R6 alpha, l and the tensor
//              core over keys, R7 times 1/l and store (cupyattn/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/named_barrier.cuh"
#include "prims/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/score.cuh"
#include "prims/tile_io.cuh"
#include "prims/tma.cuh"
#include "prims/warp.cuh"
#include "prims/wgmma.cuh"

constexpr int WARPGROUP = 128;                       // threads
constexpr int CONSUMERS = BLOCK_Q / 64;              // warpgroups that compute
constexpr int BOX_COLS = 64;                         // columns per box: 128 bytes, one swizzle
constexpr int BOX_BYTES = 128;                       // per row of a box
constexpr int BOXES = ceil_div(HEAD_DIM, BOX_COLS);  // per row
constexpr int O_COLS =
    HEAD_DIM <= 64 ? 64 : round_up(HEAD_DIM, 32);  // columns of O that are computed
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;
constexpr int64_t L2_SHARE = 32 << 20;  // bytes of K and V that stay in the L2 cache

// Whether Q K^T of a step runs beside P V of the step before: S and P then need registers at once,
// and the two warpgroups that have them must take turns, or they would compute in step and leave
// the tensor cores idle together.
constexpr bool OVERLAP = CONSUMERS == 2;

// The next Q arrives during this one where there is room for two.
constexpr int ROW_BYTES = BOXES * BOX_BYTES;
constexpr int Q_STAGES =
    (2 * BLOCK_Q + 2 * NUM_STAGES * BLOCK_KV) * ROW_BYTES <= 225 * 1024 ? 2 : 1;

struct SharedStorage {
  alignas(1024) elem_t Q[Q_STAGES][BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t K[NUM_STAGES][BOXES][BLOCK_KV * BOX_COLS];
  alignas(1024) elem_t V[NUM_STAGES][BOXES][BLOCK_KV * BOX_COLS];
  int tile[Q_STAGES];  // index of the work tile that Q belongs to, -1: there is no more
  Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  Mbarrier K_full[NUM_STAGES], K_empty[NUM_STAGES];
  Mbarrier V_full[NUM_STAGES], V_empty[NUM_STAGES];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base

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
    BLOCK_KV >= 64 && BLOCK_KV <= 256 && BLOCK_KV % 16 == 0,
    "BLOCK_KV must be a multiple of 16 from 64 to 256, the columns of a wgmma");

// A place in a ring of stages, and the parity of the phase that belongs to it.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// One after the other, the computing warpgroups give work to the tensor cores.
struct Turn {
  int consumer;
  __device__ __forceinline__ void take() const { named_barrier_sync(1 + consumer, 2 * WARPGROUP); }
  __device__ __forceinline__ void pass() const {
    named_barrier_arrive(1 + (consumer + 1) % CONSUMERS, 2 * WARPGROUP);
  }
};

// Which query rows of which head. Tiles are handed out as blocks become free: the longest causal
// rows first, and only as many heads at a time as fit their K and V into the L2 cache.
struct WorkTile {
  int q0, head, batch;
  __device__ __forceinline__ WorkTile(const AttnParams& p, int index) {
    const int q_blocks = ceil_div(p.len_q, BLOCK_Q), batch_heads = p.heads * p.batch;
    const int64_t head_bytes = int64_t(p.len_kv) * HEAD_DIM * 2 * sizeof(elem_t);
    const int together = max(1, min(batch_heads, int(L2_SHARE / head_bytes)));
    const int first = index / (together * q_blocks) * together;  // head of this group of heads
    const int here = min(together, batch_heads - first);         // heads in this group
    const int rest = index % (together * q_blocks);
    q0 = (q_blocks - 1 - rest / here) * BLOCK_Q;
    head = (first + rest % here) % p.heads;
    batch = (first + rest % here) / p.heads;
  }
};

// The same in every lane, and known to be: the compiler cannot see through the stages of a ring.
__device__ __forceinline__ Descriptor uniform(Descriptor rows) {
  return {__shfl_sync(FULL_WARP, rows.low, 0), rows.high};
}

// S3 scores: S [64, BLOCK_KV] = Q K^T, in the background.
__device__ __forceinline__ void start_scores(
    float (&S_acc)[BLOCK_KV / 2], Descriptor Q_rows, Descriptor K_rows) {
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
    float (&O_acc)[O_COLS / 2], const uint32_t (&P_frag)[BLOCK_KV / 16][4], Descriptor V_rows) {
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 16; ++k)
    Wgmma<elem_t, O_COLS>::rs(O_acc, P_frag[k], V_rows + k * 16 * BOX_BYTES);  // R6
  wgmma_commit_group();
}

// S4 softmax: scores become weights in place; alpha is what O has to be multiplied by. `q` is the
// first of this lane's two rows, the other is q + 8.
__device__ __forceinline__ void softmax(
    const AttnParams& p, RowState (&state)[2], float (&S_acc)[BLOCK_KV / 2], float (&alpha)[2],
    int q, int kv0, int unmasked) {
  if (kv0 + BLOCK_KV > unmasked || (WINDOW && kv0 < kv_unmasked_begin(p, q, 9))) {
    const int t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 2; ++i)
      if (!admitted(p, q + i / 2 % 2 * 8, kv0 + i / 4 * 8 + t * 2 + i % 2)) S_acc[i] = NEG_INF;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // row, then row + 8
    float m = NEG_INF;
#pragma unroll
    for (int n = 0; n < BLOCK_KV / 8; ++n)
      m = fmaxf(m, fmaxf(S_acc[4 * n + 2 * h], S_acc[4 * n + 2 * h + 1]));
    alpha[h] = state[h].advance(shfl_max<4>(m) * p.scale_log2);
    const float M = state[h].M_finite();
#pragma unroll
    for (int n = 0; n < BLOCK_KV / 8; ++n)
#pragma unroll
      for (int i = 4 * n + 2 * h; i < 4 * n + 2 * h + 2; ++i) {
        S_acc[i] = ex2_approx_ftz(fmaf(S_acc[i], p.scale_log2, -M));  // R4
        state[h].l += S_acc[i];                                       // R6: this lane's part of l
      }
  }
}

// O to the new maximum.
// NOTE: most steps raise no row's maximum: every alpha is 1 and O stays as it is.
__device__ __forceinline__ void rescale(float (&O_acc)[O_COLS / 2], const float (&alpha)[2]) {
  if (!__any_sync(FULL_WARP, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < O_COLS / 2; ++i) O_acc[i] *= alpha[i / 2 % 2];  // R6
}

// Weights as the left operand of P V: two neighbouring keys in a register.
__device__ __forceinline__ void pack(
    uint32_t (&P_frag)[BLOCK_KV / 16][4], const float (&S_acc)[BLOCK_KV / 2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 4; ++i)
    P_frag[i / 4][i % 4] = pack_rn<elem_t>(S_acc[2 * i], S_acc[2 * i + 1]);  // R5
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_tc(
    const __grid_constant__ AttnParams p, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ ScheduleParams schedule) {
  extern __shared__ unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(
      (reinterpret_cast<uint64_t>(shared_bytes) + 1023) & ~uint64_t(1023));
  // NOTE: the shuffle tells the compiler that all lanes agree, so that what follows from it may
  // live in uniform registers, where wgmma wants its descriptors.
  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
  const int num_tiles = ceil_div(p.len_q, BLOCK_Q) * p.heads * p.batch;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Q_STAGES; ++s) {
      mbarrier_init(smem.Q_full[s], 1);
      mbarrier_init(smem.Q_empty[s], CONSUMERS * 4);  // a lane of every consumer warp
    }
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(smem.K_full[s], 1);
      mbarrier_init(smem.V_full[s], 1);
      mbarrier_init(smem.K_empty[s], CONSUMERS * 4);
      mbarrier_init(smem.V_empty[s], CONSUMERS * 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();       // the barriers are initialised before anyone waits or arrives
  if (warpgroup == 0) {  // ---- the producer, one thread: S1 and S2
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    RingPosition<Q_STAGES> Q_at;
    RingPosition<NUM_STAGES> at;  // of K and V
    while (true) {
      const int index = atomicAdd(schedule.next_tile, 1);
      if (index >= num_tiles) {
        mbarrier_wait_parity(smem.Q_empty[Q_at.stage], Q_at.parity ^ 1);  // the last was read
        smem.tile[Q_at.stage] = -1;
        mbarrier_arrive(smem.Q_full[Q_at.stage]);
        return;
      }
      const WorkTile tile(p, index);
      const int head_kv = tile.head / (p.heads / p.heads_kv);
      const int first = round_down(kv_begin(p, tile.q0), BLOCK_KV);  // key of the first step
      const int num_steps = kv_steps(p, first, tile.q0, BLOCK_Q);
      // S1 load Q
      const auto load_Q = [&] {
        mbarrier_wait_parity(smem.Q_empty[Q_at.stage], Q_at.parity ^ 1);  // this Q was read
        smem.tile[Q_at.stage] = index;
        mbarrier_arrive_expect_tx(smem.Q_full[Q_at.stage], sizeof(smem.Q[0]));
        for (int b = 0; b < BOXES; ++b)
          cp_async_bulk_tensor_4d(
              smem.Q[Q_at.stage][b], Q_map, smem.Q_full[Q_at.stage], b * BOX_COLS, tile.q0,
              tile.head, tile.batch);
        Q_at.advance();
      };
      // NOTE: where there is room for one Q, it waits for the last one, and K goes ahead.
      if (Q_STAGES > 1 || num_steps == 0) load_Q();
      // S2 load K, V
      for (int step = 0; step < num_steps; ++step, at.advance()) {
        mbarrier_wait_parity(smem.K_empty[at.stage], at.parity ^ 1);  // this K is no longer read
        mbarrier_arrive_expect_tx(smem.K_full[at.stage], sizeof(smem.K[0]));
        for (int b = 0; b < BOXES; ++b)
          cp_async_bulk_tensor_4d(
              smem.K[at.stage][b], K_map, smem.K_full[at.stage], b * BOX_COLS,
              first + step * BLOCK_KV, head_kv, tile.batch);
        if (Q_STAGES == 1 && step == 0) load_Q();
        mbarrier_wait_parity(smem.V_empty[at.stage], at.parity ^ 1);  // this V is no longer read
        mbarrier_arrive_expect_tx(smem.V_full[at.stage], sizeof(smem.V[0]));
        for (int b = 0; b < BOXES; ++b)
          cp_async_bulk_tensor_4d(
              smem.V[at.stage][b], V_map, smem.V_full[at.stage], b * BOX_COLS,
              first + step * BLOCK_KV, head_kv, tile.batch);
      }
    }
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int row0 = (warpgroup - 1) * 64;           // first row of this warpgroup in the tile
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see prims/mma.cuh
  const int row = row0 + warp_id() % 4 * 16 + g;   // this lane's rows of the tile: row, row + 8
  const Turn turn = {warpgroup - 1};
  if (OVERLAP && warpgroup == CONSUMERS) turn.pass();  // the first warpgroup begins
  RingPosition<Q_STAGES> Q_at;
  RingPosition<NUM_STAGES> at;  // of K and V
  while (true) {
    // S0 locate
    mbarrier_wait_parity(smem.Q_full[Q_at.stage], Q_at.parity);  // Q has arrived
    const int index = __shfl_sync(FULL_WARP, smem.tile[Q_at.stage], 0);
    if (index < 0) break;
    const WorkTile tile(p, index);
    const int first = round_down(kv_begin(p, tile.q0), BLOCK_KV);  // key of the first step
    const int num_steps = kv_steps(p, first, tile.q0, BLOCK_Q);
    // NOTE: these 64 rows may need fewer keys than the tile: none past the end, fewer under a mask.
    const bool empty = tile.q0 + row0 >= p.len_q;
    const int own_steps = empty ? 0 : kv_steps(p, first, tile.q0 + row0, 64);
    const int unmasked = kv_unmasked_end(p, tile.q0 + row0);
    Descriptor Q_rows = descriptor_k_major(&smem.Q[Q_at.stage][0][row0 * BOX_COLS]);
    if (OVERLAP) Q_rows = uniform(Q_rows);

    RowState state[2];             // of row and row + 8
    float O_acc[O_COLS / 2] = {};  // [O_COLS / 8][4]
    float S_acc[BLOCK_KV / 2];     // [BLOCK_KV / 8][4]
    uint32_t P_frag[BLOCK_KV / 16][4];
    float alpha[2];
    if constexpr (OVERLAP) {
      if (own_steps > 0) {
        const Descriptor K_rows = uniform(descriptor_k_major(smem.K[at.stage][0]));
        mbarrier_wait_parity(smem.K_full[at.stage], at.parity);  // K has arrived
        turn.take();
        wgmma_fence();
        start_scores(S_acc, Q_rows, K_rows);
        turn.pass();
        wgmma_wait_group<0>();
        wgmma_use(S_acc);
        if (lane_id() == 0) mbarrier_arrive(smem.K_empty[at.stage]);
        softmax(p, state, S_acc, alpha, tile.q0 + row, first, unmasked);
        pack(P_frag, S_acc);
      }
      for (int step = 1; step < own_steps; ++step) {  // K of this step, V of the one before
        const RingPosition<NUM_STAGES> V_at = at;
        at.advance();
        const Descriptor K_rows = uniform(descriptor_k_major(smem.K[at.stage][0]));
        const Descriptor V_rows =
            uniform(descriptor_n_major(smem.V[V_at.stage][0], BLOCK_KV * BOX_BYTES));
        mbarrier_wait_parity(smem.K_full[at.stage], at.parity);  // K has arrived
        turn.take();
        wgmma_use(O_acc);
        wgmma_use(P_frag);
        wgmma_fence();
        start_scores(S_acc, Q_rows, K_rows);
        mbarrier_wait_parity(smem.V_full[V_at.stage], V_at.parity);  // V has arrived
        start_output(O_acc, P_frag, V_rows);
        turn.pass();
        wgmma_wait_group<1>();
        wgmma_use(S_acc);
        if (lane_id() == 0) mbarrier_arrive(smem.K_empty[at.stage]);
        softmax(p, state, S_acc, alpha, tile.q0 + row, first + step * BLOCK_KV, unmasked);
        finish(fminf(state[0].l, state[1].l));  // the softmax, beside P V
        wgmma_wait_group<0>();
        wgmma_use(O_acc);
        wgmma_use(P_frag);
        if (lane_id() == 0) mbarrier_arrive(smem.V_empty[V_at.stage]);
        pack(P_frag, S_acc);
        rescale(O_acc, alpha);
      }
      if (lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);
      if (own_steps > 0) {
        const Descriptor V_rows =
            uniform(descriptor_n_major(smem.V[at.stage][0], BLOCK_KV * BOX_BYTES));
        mbarrier_wait_parity(smem.V_full[at.stage], at.parity);  // V has arrived
        wgmma_use(O_acc);
        wgmma_use(P_frag);
        wgmma_fence();
        start_output(O_acc, P_frag, V_rows);
        wgmma_wait_group<0>();
        wgmma_use(O_acc);
        if (lane_id() == 0) mbarrier_arrive(smem.V_empty[at.stage]);
        at.advance();
      }
    } else {
      for (int step = 0; step < own_steps; ++step, at.advance()) {
        mbarrier_wait_parity(smem.K_full[at.stage], at.parity);  // K has arrived
        wgmma_fence();
        start_scores(S_acc, Q_rows, descriptor_k_major(smem.K[at.stage][0]));
        wgmma_wait_group<0>();
        wgmma_use(S_acc);
        if (lane_id() == 0) mbarrier_arrive(smem.K_empty[at.stage]);
        if (step == own_steps - 1 && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);
        softmax(p, state, S_acc, alpha, tile.q0 + row, first + step * BLOCK_KV, unmasked);
        rescale(O_acc, alpha);
        pack(P_frag, S_acc);
        mbarrier_wait_parity(smem.V_full[at.stage], at.parity);  // V has arrived
        wgmma_use(O_acc);
        wgmma_fence();
        start_output(O_acc, P_frag, descriptor_n_major(smem.V[at.stage][0], BLOCK_KV * BOX_BYTES));
        wgmma_wait_group<0>();
        wgmma_use(O_acc);
        if (lane_id() == 0) mbarrier_arrive(smem.V_empty[at.stage]);
      }
      if (own_steps == 0 && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);
    }
    Q_at.advance();
    for (int step = own_steps; step < num_steps; ++step, at.advance()) {  // keys for other rows
      if constexpr (OVERLAP) turn.take(), turn.pass();
      mbarrier_wait_parity(
          smem.K_full[at.stage],
          at.parity);  // an arrival belongs to its own phase
      if (lane_id() == 0) mbarrier_arrive(smem.K_empty[at.stage]);
      mbarrier_wait_parity(smem.V_full[at.stage], at.parity);  // likewise
      if (lane_id() == 0) mbarrier_arrive(smem.V_empty[at.stage]);
    }

    // S6 store
    elem_t* O = static_cast<elem_t*>(p.O)  // [len_q, HEAD_DIM]
                + tile.batch * p.O_stride.batch + tile.head * p.O_stride.head;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state[h].l = shfl_sum<4>(state[h].l);  // R6
      const float inverse_l = state[h].inverse_l();
      const int q = tile.q0 + row + h * 8;
      if (q >= p.len_q) continue;
      if constexpr (LSE)
        if (t == 0)
          p.lse[(int64_t(tile.batch) * p.heads + tile.head) * p.len_q + q] = state[h].lse();
#pragma unroll
      for (int n = 0; n < O_COLS / 8; ++n)
        store_pair(
            O + q * p.O_stride.len, n * 8 + t * 2, O_acc[4 * n + 2 * h] * inverse_l,
            O_acc[4 * n + 2 * h + 1] * inverse_l);  // R7
    }
  }
  if (OVERLAP && turn.consumer == 0) turn.take();  // the last turn passed is nobody's
}
