// backward_keys_pair -- all gradients past 128 columns in five products, Hopper form.
//
// Idea         Two blocks of a cluster own 64 keys each and step over the same query rows. In a
//              block, one warpgroup makes dV from S, the other dK from dP. A gradient of 256
//              columns fills half of its registers. Both left operands stay in registers.
//              Each block receives dS of the other one and makes half of the columns of dQ, over
//              all 128 keys. This halves the additions to memory.
// Differs from sm90/backward_keys_wide.cu: warpgroups divide the products, not the rows. Each copy
//              of Q and dO goes to both blocks. No second kernel recomputes S and dP.
// Data flow    P passes as float32 from the first warpgroup to the second, which stores dS. The
//              copy engine brings dS to the other block. dQ of a step is multiplied in the next.
//              The first warpgroup adds it to memory while S of a further step is multiplied.
// ORDERED      Pairs add to a tile of dQ in turn, as in sm90/backward_keys.cu. Each block has the
//              turns of its columns.
// Kept simple  dO has one stage: it is copied during dK, S and dQ.
// Rounding     R9 P from the log-sum-exp, P to 16 bits, R10 dP, R11 dS, dS to 16 bits, R12 the
//              tensor core over query rows, sums of blocks, times scale, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/config.cuh"
#include "prims/instructions/cluster.cuh"
#include "prims/io/gradient_sm90.cuh"
#include "prims/schedule/gradient_turns.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"

constexpr int PAIR = 2;                      // blocks of a cluster
constexpr int BOTH = (1 << PAIR) - 1;        // a bit for each
constexpr int BLOCK_KEYS = BLOCK_KV / PAIR;  // of a block
constexpr int HALF_BOXES = BOXES / PAIR;     // of dQ, one for each warpgroup; of a copy to both
constexpr int CONSUMER_WARPS = 8;            // of a block
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;
using Access = Vec<float, 4>;

struct SharedStorage {
  alignas(1024) elem_t K[BOXES][BLOCK_KEYS * BOX_COLS];
  alignas(1024) elem_t V[BOXES][BLOCK_KEYS * BOX_COLS];
  alignas(1024) elem_t K_other[HALF_BOXES][BLOCK_KEYS * BOX_COLS];  // columns of this block's dQ
  alignas(1024) elem_t Q[NUM_STAGES][BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t dO[BOXES][BLOCK_Q * BOX_COLS];
  // dS by the block of its keys, transposed: [BLOCK_KEYS, BLOCK_Q]
  alignas(1024) elem_t dS[2][PAIR][BLOCK_KEYS * BOX_COLS];
  alignas(16) float P[BLOCK_Q / 8][WARPGROUP][4];  // in the order of the accumulators
  alignas(16) float row_M[NUM_STAGES][BLOCK_Q];
  alignas(16) float delta[NUM_STAGES][BLOCK_Q];
  alignas(16) int32_t coarse[NUM_STAGES][BLOCK_Q / COARSE_ROWS];
  Mbarrier KV_full;
  // `empty` counts the warps of both blocks: a copy goes to both.
  Mbarrier Q_full[NUM_STAGES], Q_empty[NUM_STAGES];  // and M, Delta and flags of the rows
  Mbarrier dO_full, dO_empty;
  Mbarrier P_full, P_empty;
  // dS of a step, of all keys of the pair. `empty` counts the warps of both blocks: they have
  // multiplied what this block stored, and the copy of it has ended.
  Mbarrier dS_full[2], dS_empty[2];
  // ORDERED, as in sm90/backward_keys.cu: dQ of a step may be added; it has been; the next pair may
  // add. Each block has the turns of its columns.
  Mbarrier turn[2], added[2], passed[2];
  TurnAt turn_at[2];
  int32_t index;  // ORDERED: place of the pair in the order of beginning; of block 0
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base
constexpr int STAGE_BYTES = sizeof(SharedStorage::Q[0]);              // of Q, and of dO
constexpr int WARP_BYTES = 16 * BOX_BYTES;                            // of dS, from one warp

static_assert(ELEM_IS_16_BIT, "gradients are of float16 or bfloat16");
static_assert(
    BLOCK_KV == 128 && BLOCK_Q == 64, "BLOCK_KV must be 128, of both blocks, and BLOCK_Q 64");
static_assert(NUM_STAGES == 2, "NUM_STAGES must be 2, of Q: more do not fit");
static_assert(HEAD_DIM > 128, "HEAD_DIM must be more than 128: sm90/backward_keys.cu is for less");
static_assert(
    !MASK && !SOFTCAP && !BIAS && !BLOCK_MASK && !VARLEN,
    "the pair takes no mask, softcap, bias, block mask or packed sequences");
static_assert(SUMS_DQ, "CFG_DQ must be 1 or 2: the blocks add up dQ");
static_assert(
    NUM_THREADS == WARPGROUP + CONSUMER_WARPS * WARP_SIZE,
    "NUM_WARPS must be 8 that compute and 4 that copy");

// dQ [64, 64] = dS K over the keys of both blocks, in the background.
__device__ __forceinline__ void start_across_both(
    float (&dQ_acc)[QUERY_SUMS], Descriptor dS_own, Descriptor K_own, Descriptor dS_other,
    Descriptor K_other) {
  wgmma_use(dQ_acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_KEYS * BOX_BYTES; k += 16 * BOX_BYTES)
    Wgmma<elem_t, 64>::ss_across(dQ_acc, dS_own + k, K_own + k, k > 0);  // R12
#pragma unroll
  for (int k = 0; k < BLOCK_KEYS * BOX_BYTES; k += 16 * BOX_BYTES)
    Wgmma<elem_t, 64>::ss_across(dQ_acc, dS_other + k, K_other + k, true);  // R12
  wgmma_commit_group();
}

// S4 P of the scores, as it stands in S_acc: rows are keys, from `key` on, columns the query rows
// from q0 on.
__device__ __forceinline__ void weights(
    const AttnParams& p, float (&S_acc)[BLOCK_Q / 2], const float (&row_M)[BLOCK_Q], int q0,
    int key, bool placed) {
  const int t = lane_id() % 4;
  if (!placed)
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 2; ++i)
      if (!admitted(p, q0 + i / 4 * 8 + t * 2 + i % 2, key + i / 2 % 2 * 8)) S_acc[i] = NEG_INF;
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; ++n) {
    using Pair = Vec<float, 2>;  // of the two rows that this lane has of a tile
    const Pair M = *reinterpret_cast<const Pair*>(&row_M[n * 8 + t * 2]);
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; ++i)
      S_acc[i] = probability(S_acc[i], p.scale_log2, M.v[i % 2]);  // R9
  }
}

// Hands P to the other warpgroup, and makes it the left operand of dV.
__device__ __forceinline__ void hand_over(
    const float (&P_acc)[BLOCK_Q / 2], float (&P)[BLOCK_Q / 8][WARPGROUP][4],
    uint32_t (&P_frag)[BLOCK_Q / 16][4]) {
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; ++n) {
    const float* x = P_acc + 4 * n;  // [4]: two rows of key, two of key + 8
    *reinterpret_cast<Access*>(P[n][threadIdx.x % WARPGROUP]) = {{x[0], x[1], x[2], x[3]}};
#pragma unroll
    for (int h = 0; h < 2; ++h)
      P_frag[n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(x[2 * h], x[2 * h + 1]);  // R9
  }
}

// dS in 16 bits, two neighbouring query rows in a register: the left operand of dK.
__device__ __forceinline__ void slopes(
    const float (&P)[BLOCK_Q / 8][WARPGROUP][4], const float (&dP_acc)[BLOCK_Q / 2],
    const float (&delta_of)[BLOCK_Q], uint32_t (&dS_frag)[BLOCK_Q / 16][4]) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; ++n) {
    using Pair = Vec<float, 2>;
    const Pair delta = *reinterpret_cast<const Pair*>(&delta_of[n * 8 + t * 2]);
    const Access weight = *reinterpret_cast<const Access*>(P[n][threadIdx.x % WARPGROUP]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {                // key, then key + 8
      const float* p = weight.v + 2 * h;         // [2]
      const float* dP = dP_acc + 4 * n + 2 * h;  // [2]
      dS_frag[n / 2][n % 2 * 2 + h] =
          pack_rn<elem_t>(p[0] * (dP[0] - delta.v[0]), p[1] * (dP[1] - delta.v[1]));  // R11
    }
  }
}

// One lane of a warp for each block: tells both that the warp has read what a barrier guards.
__device__ __forceinline__ void release_to_both(Mbarrier& empty) {
  __syncwarp();  // all lanes have read
  if (lane_id() < PAIR) mbarrier_arrive_in_block(empty, lane_id());
}

extern "C" __global__ __cluster_dims__(PAIR)
    __launch_bounds__(NUM_THREADS, 1) void backward_keys_pair(
        const __grid_constant__ AttnParams call, const __grid_constant__ TensorMap Q_map,
        const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
        const __grid_constant__ TensorMap dO_map, const __grid_constant__ BackwardParams grad) {
  extern __shared__ unsigned char shared_bytes[];
  // NOTE: by an offset, so that the compiler still knows that it reads shared memory.
  auto& smem =
      *reinterpret_cast<SharedStorage*>(shared_bytes + (-shared_address(shared_bytes) & 1023));
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const int rank = blockIdx.x % PAIR, other = rank ^ 1;

  if (threadIdx.x == 0) {
    mbarrier_init(smem.KV_full, 1);
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(smem.Q_full[s], 1);
      mbarrier_init(smem.Q_empty[s], PAIR * CONSUMER_WARPS);
    }
    mbarrier_init(smem.dO_full, 1);
    mbarrier_init(smem.dO_empty, PAIR * CONSUMER_WARPS);
    mbarrier_init(smem.P_full, 4);
    mbarrier_init(smem.P_empty, 4);
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(smem.dS_full[s], 4);
      mbarrier_init(smem.dS_empty[s], PAIR * CONSUMER_WARPS);
      mbarrier_init(smem.turn[s], 1);
      mbarrier_init(smem.added[s], CONSUMER_WARPS);
      mbarrier_init(smem.passed[s], 1);
    }
    fence_mbarrier_init();
    if (ORDERED && rank == 0) smem.index = atomicAdd(grad.next_block, 1);
  }
  // The barriers of both blocks are initialised before anyone waits or arrives; index is there.
  cluster_sync();

  // S0 locate
  const AttnParams& p = call;
  const int kv_pairs = ceil_div(p.len_kv, BLOCK_KV);
  const int index = ORDERED ? uniform(load_from_block(smem.index, 0)) : int(blockIdx.x / PAIR);
  if (ORDERED) __syncthreads();  // all have read, for whom the consumers arrive at the end
  const BlockOfKeys own = block_of_keys(index, gridDim.x / PAIR, kv_pairs, p.len_q);
  const int pair_kv0 = own.kv0, kv0 = pair_kv0 + rank * BLOCK_KEYS;
  const int64_t batch = own.head / p.heads_kv, head_kv = own.head % p.heads_kv;
  const int group = p.heads / p.heads_kv;
  const int first_head = head_kv * group, last_head = first_head + group;  // of the query heads

  // NOTE: the steps of the pair's keys, so that both blocks step over the same rows.
  TurnSteps steps(p, grad, batch, first_head, last_head, pair_kv0, own.reversed);
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    const int warp = warp_id();
    if (warp > (ORDERED ? 2 : 0) || !elect_sync() || steps.head >= last_head) return;
    // ---- behind S5, one thread: after the pairs before, lets this block add, ...
    if (warp == 1) {
      give_turns<PAIR>(smem, call, p, grad, steps, batch, last_head, pair_kv0, 0, rank);
      return;
    }
    // ---- ... and one thread: after this block, lets that of the next pair add
    if (warp == 2) {
      pass_turns<PAIR>(smem, call, p, grad, steps, batch, last_head, pair_kv0, rank);
      return;
    }
    // ---- the producer, one thread: S1 and S2
    // S1 load K, V, and the columns of the other block's K that dQ needs
    mbarrier_arrive_expect_tx(smem.KV_full, sizeof(smem.K) + sizeof(smem.V) + sizeof(smem.K_other));
    for (int b = 0; b < BOXES; ++b) {
      cp_async_bulk_tensor_4d(smem.K[b], K_map, smem.KV_full, b * BOX_COLS, kv0, head_kv, batch);
      cp_async_bulk_tensor_4d(smem.V[b], V_map, smem.KV_full, b * BOX_COLS, kv0, head_kv, batch);
    }
    for (int b = 0; b < HALF_BOXES; ++b)
      cp_async_bulk_tensor_4d(
          smem.K_other[b], K_map, smem.KV_full, (rank * HALF_BOXES + b) * BOX_COLS,
          pair_kv0 + other * BLOCK_KEYS, head_kv, batch);
    // S2 load Q, dO: this block copies half of the columns to both
    RingPosition<NUM_STAGES> at;
    RingPosition<1> dO_at;
    for (; steps.head < last_head; steps.advance(p, grad, batch, last_head, pair_kv0)) {
      const int q0 = steps.q0();
      const int64_t padded = padded_row(call, grad, batch, steps.head) + q0;
      Mbarrier& full = smem.Q_full[at.stage];
      mbarrier_wait_parity(smem.Q_empty[at.stage], at.parity ^ 1);  // both blocks have read it
      mbarrier_arrive_expect_tx(
          full, STAGE_BYTES + 2 * sizeof(smem.row_M[0]) + sizeof(smem.coarse[0]));
#pragma unroll 1
      for (int b = rank * HALF_BOXES; b < (rank + 1) * HALF_BOXES; ++b)
        cp_async_bulk_tensor_4d_multicast(
            smem.Q[at.stage][b], Q_map, full, b * BOX_COLS, q0, steps.head, batch, BOTH);
      cp_async_bulk(smem.row_M[at.stage], grad.row_M + padded, sizeof(smem.row_M[0]), full);
      cp_async_bulk(smem.delta[at.stage], grad.delta + padded, sizeof(smem.delta[0]), full);
      cp_async_bulk(
          smem.coarse[at.stage], grad.coarse + padded / COARSE_ROWS, sizeof(smem.coarse[0]), full);
      mbarrier_wait_parity(smem.dO_empty, dO_at.parity ^ 1);  // both blocks have read it
      mbarrier_arrive_expect_tx(smem.dO_full, STAGE_BYTES);
#pragma unroll 1
      for (int b = rank * HALF_BOXES; b < (rank + 1) * HALF_BOXES; ++b)
        cp_async_bulk_tensor_4d_multicast(
            smem.dO[b], dO_map, smem.dO_full, b * BOX_COLS, q0, steps.head, batch, BOTH);
      at.advance();
      dO_at.advance();
    }
    return;
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int half = warpgroup - 1;              // 0: of P and dV, 1: of dS and dK; and of dQ
  const int box = rank * HALF_BOXES + half;    // of dQ
  const int key0 = warp_id() % 4 * 16;         // first key of this warp in the block
  const int key = kv0 + key0 + lane_id() / 4;  // this lane's keys: key, key + 8
  const bool works = steps.head < last_head;
  const Descriptor Q_first = uniform(descriptor_k_major(smem.Q[0][0]));
  const Descriptor Q_columns = uniform(descriptor_n_major(smem.Q[0][0], BLOCK_Q * BOX_BYTES));
  const Descriptor dO_rows = uniform(descriptor_k_major(smem.dO[0]));
  const Descriptor dO_columns = uniform(descriptor_n_major(smem.dO[0], BLOCK_Q * BOX_BYTES));
  const Descriptor dS_own = uniform(descriptor_n_major(smem.dS[0][rank], BOX_BYTES));
  const Descriptor dS_other = uniform(descriptor_n_major(smem.dS[0][other], BOX_BYTES));
  const Descriptor K_own = uniform(descriptor_n_major(smem.K[box], BOX_BYTES));
  const Descriptor K_other = uniform(descriptor_n_major(smem.K_other[half], BOX_BYTES));
  RingPosition<NUM_STAGES> at;  // of the step, in Q
  RingPosition<1> one;          // of the step, in dO and P
  RingPosition<2> dQ_at;        // of the next dQ, in dS
  float dQ_acc[QUERY_SUMS];

  // S5 dQ of the earliest step without it
  const auto start_dQ = [&] {
    mbarrier_wait_parity(smem.dS_full[dQ_at.stage], dQ_at.parity);  // dS of both blocks is there
    constexpr int SLOT = sizeof(smem.dS[0]);
    start_across_both(
        dQ_acc, dS_own.stage(dQ_at.stage, SLOT), K_own, dS_other.stage(dQ_at.stage, SLOT), K_other);
  };
  const auto end_dQ = [&] {
    wgmma_use(dQ_acc);
    release_to_both(smem.dS_empty[dQ_at.stage]);
    if (!ORDERED) dQ_at.advance();  // else the stage is the turn's, too
  };
  const auto add_dQ = [&](float* sums) {
    if constexpr (ORDERED) {
      mbarrier_wait_parity(smem.turn[dQ_at.stage], dQ_at.parity);  // pairs before have added
      const int row = warp_id() % 4 * 16 + lane_id() / 4;
      if (box < QUERY_SUMS_BOXES)
        add_in_turn(
            smem.turn_at[dQ_at.stage], dQ_acc, box, row, box * 64, grad.dQ_stride.len, p.scale);
      __syncwarp();  // all lanes have added
      if (lane_id() == 0) mbarrier_arrive(smem.added[dQ_at.stage]);
      dQ_at.advance();
    } else {
      if (box < QUERY_SUMS_BOXES) add_query_sums(sums, dQ_acc);  // R12
    }
  };
  const auto sums_of_step = [&] {
    return query_sums(call, grad, batch, steps.head, steps.q0(), box);
  };
  // S6 store
  const auto store = [&](void* gradient, const Strides& stride, const float (&acc)[COLS / 2],
                         float scale) {
    elem_t* rows = static_cast<elem_t*>(gradient)  // [len_kv, HEAD_DIM]
                   + batch * stride.batch + head_kv * stride.head;
    store_gradient(rows, stride.len, key, p.len_kv, 0, acc, scale);  // R12
  };

  if (half == 0) {
    const Descriptor K_rows = uniform(descriptor_k_major(smem.K[0]));
    float dV_acc[COLS / 2] = {};  // [COLS / 8][4]
    float S_acc[BLOCK_Q / 2];     // [BLOCK_Q / 8][4], then P
    uint32_t P_frag[BLOCK_Q / 16][4];
    float* sums;  // [QUERY_SUMS], where the next dQ is added

    // S3 scores
    const auto start_scores = [&] {
      mbarrier_wait_parity(smem.Q_full[at.stage], at.parity);  // Q has arrived
      start_rows<BLOCK_KEYS, BLOCK_Q>(S_acc, K_rows, Q_first.stage(at.stage, STAGE_BYTES));  // R9
    };
    // S4 P, and S5 dV
    const auto end_scores = [&] {
      wgmma_use(S_acc);
      const Scores scores(p, batch, steps.head);
      const int q0 = steps.q0();
      weights(
          p, S_acc, smem.row_M[at.stage], q0, key, scores.are_placed(q0, BLOCK_Q, kv0 + key0, 16));
      if (any_coarse<BLOCK_Q>(smem.coarse[at.stage]))
        normalise(S_acc, grad.row_factor + padded_row(call, grad, batch, steps.head) + q0);
      release_to_both(smem.Q_empty[at.stage]);
      at.advance();
      mbarrier_wait_parity(smem.P_empty, one.parity ^ 1);  // P of the step before was read
      hand_over(S_acc, smem.P, P_frag);
      __syncwarp();  // the warp's P is complete
      if (lane_id() == 0) mbarrier_arrive(smem.P_full);
      mbarrier_wait_parity(smem.dO_full, one.parity);      // dO has arrived
      start_columns(dV_acc, P_frag, uniform(dO_columns));  // R12
      one.advance();
      sums = sums_of_step();
      steps.advance(p, grad, batch, last_head, pair_kv0);
    };
    const auto end_dV = [&] {
      wgmma_use(dV_acc);
      release_to_both(smem.dO_empty);
    };
    if (works) {
      mbarrier_wait_parity(smem.KV_full, 0);  // K and V have arrived
      start_scores();
      wgmma_wait_group<0>();
      end_scores();
      wgmma_wait_group<0>();
      end_dV();
      float* before = nullptr;  // [QUERY_SUMS]
      while (steps.head < last_head) {
        start_scores();
        if (before != nullptr) add_dQ(before);
        before = sums;
        wgmma_wait_group<0>();
        end_scores();
        start_dQ();
        wgmma_wait_group<1>();
        end_dV();
        wgmma_wait_group<0>();
        end_dQ();
      }
      if (before != nullptr) add_dQ(before);
      start_dQ();
      wgmma_wait_group<0>();
      end_dQ();
      add_dQ(sums);
    }
    cluster_arrive();
    store(grad.dV, grad.dV_stride, dV_acc, 1.0f);
  } else {
    const Descriptor V_rows = uniform(descriptor_k_major(smem.V[0]));
    // Address at which this lane stores the first 16 rows of dS^T, swizzled like a box.
    elem_t* dS_rows = &smem.dS[0][rank][key0 * BOX_COLS];  // [16, BLOCK_Q], of this warp
    const uint32_t dS_corner = shared_address(dS_rows) + lane_id() % 16 * BOX_BYTES +
                               (lane_id() / 16 ^ lane_id() % 8) * 16;
    float dK_acc[COLS / 2] = {};  // [COLS / 8][4]
    float dP_acc[BLOCK_Q / 2];    // [BLOCK_Q / 8][4]
    uint32_t dS_frag[BLOCK_Q / 16][4];
    RingPosition<2> dS_at;
    float* sums;  // [QUERY_SUMS], where the next dQ is added

    // S3 dP
    const auto start_slopes = [&] {
      mbarrier_wait_parity(smem.dO_full, one.parity);                              // dO has arrived
      start_rows<BLOCK_KEYS, BLOCK_Q>(dP_acc, uniform(V_rows), uniform(dO_rows));  // R10
    };
    // S4 dS
    const auto end_slopes = [&] {
      wgmma_use(dP_acc);
      release_to_both(smem.dO_empty);
      mbarrier_wait_parity(smem.Q_full[at.stage], at.parity);  // Q and Delta have arrived
      mbarrier_wait_parity(smem.P_full, one.parity);           // P of this step is there
      slopes(smem.P, dP_acc, smem.delta[at.stage], dS_frag);
      __syncwarp();  // all lanes have read P
      if (lane_id() == 0) mbarrier_arrive(smem.P_empty);
      one.advance();
    };
    const auto share_slopes = [&] {
      constexpr int SLOT = sizeof(smem.dS[0]);
      Mbarrier& full = smem.dS_full[dS_at.stage];
      mbarrier_wait_parity(smem.dS_empty[dS_at.stage], dS_at.parity ^ 1);  // both multiplied it
#pragma unroll
      for (int k = 0; k < BLOCK_Q / 16; ++k)
        stmatrix_x4((dS_corner + dS_at.stage * SLOT) ^ k * 32, dS_frag[k]);
      fence_proxy_async();
      __syncwarp();  // the warp's rows are complete
      if (lane_id() == 0) {
        mbarrier_arrive_expect_tx(full, WARP_BYTES);  // of the other block's warp
        cp_async_bulk_to_block(
            dS_rows + dS_at.stage * (SLOT / sizeof(elem_t)), WARP_BYTES, full, other);
      }
      dS_at.advance();
    };
    // S5 dK
    const auto start_dK = [&] {
      start_columns(dK_acc, dS_frag, Q_columns.stage(at.stage, STAGE_BYTES));  // R12
      sums = sums_of_step();
      steps.advance(p, grad, batch, last_head, pair_kv0);
    };
    const auto end_dK = [&] {
      wgmma_use(dK_acc);
      release_to_both(smem.Q_empty[at.stage]);
      at.advance();
    };
    if (works) {
      mbarrier_wait_parity(smem.KV_full, 0);  // K and V have arrived
      start_slopes();
      wgmma_wait_group<0>();
      end_slopes();
      float* before = nullptr;  // [QUERY_SUMS]
      while (true) {
        share_slopes();
        start_dK();
        if (before != nullptr) add_dQ(before);
        if (steps.head == last_head) break;
        before = sums;
        start_slopes();
        wgmma_wait_group<1>();
        end_dK();
        start_dQ();
        wgmma_wait_group<1>();
        end_slopes();
        wgmma_wait_group<0>();
        end_dQ();
      }
      start_dQ();
      wgmma_wait_group<1>();
      end_dK();
      wgmma_wait_group<0>();
      end_dQ();
      add_dQ(sums);
    }
    cluster_arrive();
    store(grad.dK, grad.dK_stride, dK_acc, p.scale);
  }
  cluster_wait();  // the other block no longer arrives here, nor copies from or to here
}
