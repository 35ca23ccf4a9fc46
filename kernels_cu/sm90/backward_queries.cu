// backward_queries -- Hopper form: the gradient of Q where it must have the same bits on every run.
//
// Idea         sm90/attn_fa_tc.cu with dS K in the place of P V: a block of query rows stays, 64 of
//              them in each of two warpgroups, one warp brings the keys, and dQ is summed in
//              registers from the first key to the last.
// Differs from the portable form: products by wgmma, operands by the copy engine.
// Kept simple  A warpgroup waits for its own products: the other one has the tensor cores then.
// Rounding     R9 P from the log-sum-exp, R10 dP, R11 dS, dS to 16 bits, R12 the tensor core over
//              keys, times scale, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/config.cuh"
#include "prims/gradient_sm90.cuh"
#include "prims/named_barrier.cuh"
#include "prims/params.cuh"
#include "prims/score.cuh"
#include "prims/tma.cuh"
#include "prims/varlen.cuh"
#include "prims/warp.cuh"
#include "prims/wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute, 64 query rows each
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;

struct SharedStorage {
  alignas(1024) elem_t Q[BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t dO[BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t K[NUM_STAGES][BOXES][BLOCK_KV * BOX_COLS];
  alignas(1024) elem_t V[NUM_STAGES][BOXES][BLOCK_KV * BOX_COLS];
  Mbarrier Q_full;                               // Q and dO
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];  // K and V of a step
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base
constexpr int STAGE_BYTES = sizeof(SharedStorage::K[0]);              // of K, and of V

static_assert(ELEM_IS_16_BIT, "gradients are of float16 or bfloat16");
static_assert(
    BLOCK_Q == CONSUMERS * 64, "BLOCK_Q must be 128: two warpgroups keep dQ of 64 query rows");
static_assert(ROW_PAD % BLOCK_Q == 0, "BLOCK_Q must divide ROW_PAD, to which rows are padded");
static_assert(
    BLOCK_KV >= 64 && BLOCK_KV <= 128 && BLOCK_KV % 16 == 0,
    "BLOCK_KV must be a multiple of 16 from 64 to 128, the columns of a wgmma");
static_assert(HEAD_DIM <= 128, "HEAD_DIM must be at most 128: dQ, S and dP fill the registers");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP, "NUM_WARPS must be 8 that compute and 4 that copy");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_queries(
    const __grid_constant__ AttnParams call, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap dO_map, const __grid_constant__ BackwardParams grad) {
  extern __shared__ unsigned char shared_bytes[];
  auto& smem =
      *reinterpret_cast<SharedStorage*>(shared_bytes + (-shared_address(shared_bytes) & 1023));
  // NOTE: the shuffle tells the compiler that all lanes agree, so that what follows from it may
  // live in uniform registers, where wgmma wants its descriptors.
  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = (q_blocks - 1 - blockIdx.x % q_blocks) * BLOCK_Q;  // longest causal rows first
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const int entry = VARLEN ? 0 : batch;  // to the copy engine packed sequences are one
  const auto& p = of_batch(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const Sequences<VARLEN> sequences(call, batch);
  const int head_kv = head / (p.heads / p.heads_kv);
  const KeptKeys keys(p, batch, head, q0, kv_begin(p, q0), kv_end(p, q0, BLOCK_Q));
  int number = round_down(keys.begin, BLOCK_KV);  // of a step, as KeptKeys counts

  if (threadIdx.x == 0) {
    mbarrier_init(smem.Q_full, 1);
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(smem.full[s], 1);
      mbarrier_init(smem.empty[s], CONSUMERS * 4);  // a lane of every consumer warp
    }
    fence_mbarrier_init();
  }
  __syncthreads();       // the barriers are initialised before anyone waits or arrives
  if (warpgroup == 0) {  // ---- the producer, one thread: S1 and S2
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= WARP_SIZE || !elect_sync() || number >= keys.end) return;
    // S1 load Q, dO
    mbarrier_arrive_expect_tx(smem.Q_full, 2 * sizeof(smem.Q));
    for (int b = 0; b < BOXES; ++b) {
      const int row = sequences.first_row() + q0;
      cp_async_bulk_tensor_4d(smem.Q[b], Q_map, smem.Q_full, b * BOX_COLS, row, head, entry);
      cp_async_bulk_tensor_4d(smem.dO[b], dO_map, smem.Q_full, b * BOX_COLS, row, head, entry);
    }
    // S2 load K, V
    RingPosition<NUM_STAGES> at;
    for (; number < keys.end; number += BLOCK_KV, at.advance()) {
      const int row = sequences.first_key() + keys.key(number);
      Mbarrier& full = smem.full[at.stage];
      mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // these were read
      mbarrier_arrive_expect_tx(full, 2 * STAGE_BYTES);
      for (int b = 0; b < BOXES; ++b) {
        cp_async_bulk_tensor_4d(
            smem.K[at.stage][b], K_map, full, b * BOX_COLS, row, head_kv, entry);
        cp_async_bulk_tensor_4d(
            smem.V[at.stage][b], V_map, full, b * BOX_COLS, row, head_kv, entry);
      }
    }
    return;
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int row0 = (warpgroup - 1) * 64;                // first row of this warpgroup in the block
  const int warp_row = q0 + row0 + warp_id() % 4 * 16;  // of this warp
  const int row = warp_row + lane_id() / 4, t = lane_id() % 4;  // this lane's: row, row + 8
  const Scores scores(p, batch, head);
  const Descriptor Q_rows = uniform(descriptor_k_major(&smem.Q[0][row0 * BOX_COLS]));
  const Descriptor dO_rows = uniform(descriptor_k_major(&smem.dO[0][row0 * BOX_COLS]));
  const Descriptor K_first = uniform(descriptor_k_major(smem.K[0][0]));
  const Descriptor V_first = uniform(descriptor_k_major(smem.V[0][0]));
  const Descriptor K_columns = uniform(descriptor_n_major(smem.K[0][0], BLOCK_KV * BOX_BYTES));
  float M[2], delta[2];  // of row and row + 8
  const int64_t padded = padded_row(call, grad, batch, head) + row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    M[h] = grad.row_M[padded + h * 8];
    delta[h] = grad.delta[padded + h * 8];
  }
  float dQ_acc[COLS / 2] = {};                      // [COLS / 8][4]
  float S_acc[BLOCK_KV / 2], dP_acc[BLOCK_KV / 2];  // [BLOCK_KV / 8][4], then P and dP
  uint32_t dS_frag[BLOCK_KV / 16][4];
  RingPosition<NUM_STAGES> at;
  if (number < keys.end) mbarrier_wait_parity(smem.Q_full, 0);  // Q and dO have arrived
  for (; number < keys.end; number += BLOCK_KV, at.advance()) {
    const int kv0 = keys.key(number);
    // S3 scores, and dP
    mbarrier_wait_parity(smem.full[at.stage], at.parity);  // K and V have arrived
    // NOTE: a weight of 0 does not silence a NaN in the keys of the next sequence.
    if (const int rows = p.len_kv - kv0; VARLEN && rows < BLOCK_KV) {
      zero_rows<CONSUMER_THREADS>(smem.K[at.stage], rows, BLOCK_KV);
      zero_rows<CONSUMER_THREADS>(smem.V[at.stage], rows, BLOCK_KV);
      named_barrier_sync(1, CONSUMER_THREADS);  // both warpgroups multiply these keys
    }
    start_rows<BLOCK_Q, BLOCK_KV>(S_acc, Q_rows, K_first.stage(at.stage, STAGE_BYTES));    // R9
    start_rows<BLOCK_Q, BLOCK_KV>(dP_acc, dO_rows, V_first.stage(at.stage, STAGE_BYTES));  // R10

    // S4 P and dS, as their products end
    const bool products = scores.are_products(warp_row, 16, kv0, BLOCK_KV);
    wgmma_wait_group<1>();
    wgmma_use(S_acc);
    if (!products)
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 2; ++i)
        if (!scores.admit(row + i / 2 % 2 * 8, kv0 + i / 4 * 8 + t * 2 + i % 2)) S_acc[i] = NEG_INF;
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 2; ++i)
      S_acc[i] = probability(S_acc[i], p.scale_log2, M[i / 2 % 2]);  // R9
    wgmma_wait_group<0>();
    wgmma_use(dP_acc);
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 4; ++i) {                 // two neighbouring keys of a row
      const float *P = S_acc + 2 * i, *dP = dP_acc + 2 * i;  // [2]
      const float mean = delta[i % 2];
      dS_frag[i / 4][i % 4] = pack_rn<elem_t>(P[0] * (dP[0] - mean), P[1] * (dP[1] - mean));  // R11
    }

    // S5 dQ
    start_columns(dQ_acc, dS_frag, K_columns.stage(at.stage, STAGE_BYTES));  // R12
    wgmma_wait_group<0>();
    wgmma_use(dQ_acc);
    if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
  }

  // S6 store
  elem_t* dQ = static_cast<elem_t*>(grad.dQ)  // [len_q, HEAD_DIM]
               + batch * grad.dQ_stride.batch + head * grad.dQ_stride.head +
               sequences.first_row() * grad.dQ_stride.len;
  store_gradient(dQ, grad.dQ_stride.len, row, p.len_q, 0, dQ_acc, p.scale);  // R12
}
