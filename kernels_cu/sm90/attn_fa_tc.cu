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
constexpr int Q_STAGES = 2;                        // the next Q arrives during this one
constexpr int PRODUCER_REGISTERS = 32;
constexpr int CONSUMER_REGISTERS = 160;
constexpr int64_t L2_SHARE = 32 << 20;  // bytes of K and V that stay in the L2 cache

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
static_assert(HEAD_DIM <= 128, "the Hopper form of fa_tc takes HEAD_DIM up to 128");
static_assert(
    BLOCK_Q == 192, "BLOCK_Q must be 192: three warpgroups of 64 rows fill the registers");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP,
    "NUM_WARPS must be 4 for every 64 rows of BLOCK_Q and 4 that copy");
static_assert(
    BLOCK_KV == 64 || BLOCK_KV == 96 || BLOCK_KV == 128,
    "BLOCK_KV must be 64, 96 or 128, the columns of a wgmma");

// A place in a ring of stages, and the parity of the phase that belongs to it.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
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
  __syncthreads();  // the barriers are initialised before anyone waits or arrives
  RingPosition<Q_STAGES> Q_at;
  RingPosition<NUM_STAGES> at;  // of K and V

  if (warpgroup == 0) {  // ---- the producer, one thread: S1 and S2
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    while (true) {
      const int index = atomicAdd(schedule.next_tile, 1);
      mbarrier_wait_parity(smem.Q_empty[Q_at.stage], Q_at.parity ^ 1);  // this Q is no longer read
      smem.tile[Q_at.stage] = index < num_tiles ? index : -1;
      if (index >= num_tiles) {
        mbarrier_arrive(smem.Q_full[Q_at.stage]);
        return;
      }
      const WorkTile tile(p, index);
      const int head_kv = tile.head / (p.heads / p.heads_kv);
      // S1 load Q
      mbarrier_arrive_expect_tx(smem.Q_full[Q_at.stage], sizeof(smem.Q[0]));
      for (int b = 0; b < BOXES; ++b)
        cp_async_bulk_tensor_4d(
            smem.Q[Q_at.stage][b], Q_map, smem.Q_full[Q_at.stage], b * BOX_COLS, tile.q0, tile.head,
            tile.batch);
      Q_at.advance();
      // S2 load K, V
      const int num_steps = ceil_div(kv_end(p, tile.q0, BLOCK_Q), BLOCK_KV);
      for (int step = 0; step < num_steps; ++step, at.advance()) {
        mbarrier_wait_parity(smem.K_empty[at.stage], at.parity ^ 1);  // this K is no longer read
        mbarrier_arrive_expect_tx(smem.K_full[at.stage], sizeof(smem.K[0]));
        for (int b = 0; b < BOXES; ++b)
          cp_async_bulk_tensor_4d(
              smem.K[at.stage][b], K_map, smem.K_full[at.stage], b * BOX_COLS, step * BLOCK_KV,
              head_kv, tile.batch);
        mbarrier_wait_parity(smem.V_empty[at.stage], at.parity ^ 1);  // this V is no longer read
        mbarrier_arrive_expect_tx(smem.V_full[at.stage], sizeof(smem.V[0]));
        for (int b = 0; b < BOXES; ++b)
          cp_async_bulk_tensor_4d(
              smem.V[at.stage][b], V_map, smem.V_full[at.stage], b * BOX_COLS, step * BLOCK_KV,
              head_kv, tile.batch);
      }
    }
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int row0 = (warpgroup - 1) * 64;           // first row of this warpgroup in the tile
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see prims/mma.cuh
  const int row = row0 + warp_id() % 4 * 16 + g;   // this lane's rows of the tile: row, row + 8
  while (true) {
    // S0 locate
    mbarrier_wait_parity(smem.Q_full[Q_at.stage], Q_at.parity);  // Q has arrived
    const int index = __shfl_sync(FULL_WARP, smem.tile[Q_at.stage], 0);
    if (index < 0) return;
    const WorkTile tile(p, index);
    const int num_steps = ceil_div(kv_end(p, tile.q0, BLOCK_Q), BLOCK_KV);
    // NOTE: these 64 rows may need fewer keys than the tile: none past the end, fewer under a mask.
    const bool empty = tile.q0 + row0 >= p.len_q;
    const int own_steps = empty ? 0 : ceil_div(kv_end(p, tile.q0 + row0, 64), BLOCK_KV);
    const int unmasked = kv_unmasked(p, tile.q0 + row0);
    const Descriptor Q_rows = descriptor_k_major(&smem.Q[Q_at.stage][0][row0 * BOX_COLS]);

    RowState state[2];             // of row and row + 8
    float O_acc[O_COLS / 2] = {};  // [O_COLS / 8][4]
    for (int step = 0; step < own_steps; ++step, at.advance()) {
      // S3 scores
      float S_acc[BLOCK_KV / 2];                               // [BLOCK_KV / 8][4]
      mbarrier_wait_parity(smem.K_full[at.stage], at.parity);  // K has arrived
      const Descriptor K_rows = descriptor_k_major(smem.K[at.stage][0]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < ceil_div(HEAD_DIM, 16); ++k) {  // 32 bytes of a row, then the next box
        const int box = k / 4, byte = k % 4 * 32;
        Wgmma<elem_t, BLOCK_KV>::ss(
            S_acc, Q_rows + (box * BLOCK_Q * BOX_BYTES + byte),
            K_rows + (box * BLOCK_KV * BOX_BYTES + byte), k > 0);  // R2
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();
      wgmma_use(S_acc);
      if (lane_id() == 0) mbarrier_arrive(smem.K_empty[at.stage]);
      if (step == own_steps - 1 && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);

      // S4 softmax
      const int kv0 = step * BLOCK_KV;
      if (kv0 + BLOCK_KV > unmasked) {
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; ++i)
          if (!admitted(p, tile.q0 + row + i / 2 % 2 * 8, kv0 + i / 4 * 8 + t * 2 + i % 2))
            S_acc[i] = NEG_INF;
      }
      float alpha[2];
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
            state[h].l += S_acc[i];  // R6: this lane's part of l
          }
      }
      // NOTE: most steps raise no row's maximum: every alpha is 1 and O stays as it is.
      if (__any_sync(FULL_WARP, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < O_COLS / 2; ++i) O_acc[i] *= alpha[i / 2 % 2];  // R6
      }
      uint32_t P_frag[BLOCK_KV / 16][4];
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 4; ++i)
        P_frag[i / 4][i % 4] = pack_rn<elem_t>(S_acc[2 * i], S_acc[2 * i + 1]);  // R5

      // S5 output
      mbarrier_wait_parity(smem.V_full[at.stage], at.parity);  // V has arrived
      const Descriptor V_rows = descriptor_n_major(smem.V[at.stage][0], BLOCK_KV * BOX_BYTES);
      wgmma_use(O_acc);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_KV / 16; ++k)
        Wgmma<elem_t, O_COLS>::rs(O_acc, P_frag[k], V_rows + k * 16 * BOX_BYTES);  // R6
      wgmma_commit_group();
      wgmma_wait_group<0>();
      wgmma_use(O_acc);
      if (lane_id() == 0) mbarrier_arrive(smem.V_empty[at.stage]);
    }
    if (own_steps == 0 && lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);
    Q_at.advance();
    for (int step = own_steps; step < num_steps; ++step, at.advance()) {  // keys for other rows
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
}
