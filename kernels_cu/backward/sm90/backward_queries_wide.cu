// backward_queries_wide -- the gradient of Q past 128 columns, Hopper form.
//
// Idea         sm90/attn_fa_tc.cu with dS K in the place of P V: a block of query rows stays, and
//              dQ is summed in registers. At 64 rows and 256 columns it fills half of a thread's
//              registers. Q and dO of more rows would leave no room for keys. So both warpgroups
//              have all rows, and each takes every other tile of keys. At the end they add their
//              sums.
// Differs from the portable form: products by wgmma, operands by the copy engine; keys are divided,
//              not rows.
// Scores       As in sm90/backward_keys.cu. A bias comes with K and V.
// Kept simple  A stage belongs to one warpgroup. While it is refilled, the other one multiplies.
// Rounding     R9 P from the log-sum-exp, R10 dP, R11 dS, dS to 16 bits, R12 the tensor core over
//              keys, times scale, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/config.cuh"
#include "prims/io/gradient_sm90.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/params.cuh"
#include "prims/score/gradient_bias.cuh"
#include "prims/score/mask_bits.cuh"
#include "prims/score/score.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute, every other tile of keys each
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
constexpr int HALF_SUMS = COLS / 4;  // of a thread: half of the columns, which it stores
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;

struct SharedStorage {
  alignas(1024) elem_t Q[BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t dO[BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t K[CONSUMERS][BOXES][BLOCK_KV * BOX_COLS];
  alignas(1024) elem_t V[CONSUMERS][BOXES][BLOCK_KV * BOX_COLS];
  Mbarrier Q_full;                             // Q and dO
  Mbarrier full[CONSUMERS], empty[CONSUMERS];  // K and V of a step
};
template <int BYTES>
struct BiasedStages : SharedStorage {
  alignas(1024) unsigned char bias[CONSUMERS][BYTES];  // with K and V of a step
};
template <>
struct BiasedStages<0> : SharedStorage {};
using Storage = BiasedStages<BIAS_BYTES>;
extern "C" __device__ int smem_bytes = sizeof(Storage) + 1024;  // room to align the base

static_assert(ELEM_IS_16_BIT, "gradients are of float16 or bfloat16");
static_assert(
    !BIAS || BIAS_KIND == BiasKind::DENSE || BIAS_KIND == BiasKind::KEYS,
    "a bias has a number for every key");
static_assert(
    BLOCK_Q == 64 && BLOCK_KV == 64,
    "BLOCK_Q and BLOCK_KV must be 64: dQ, S and dP fill registers");
static_assert(
    HEAD_DIM > 128, "HEAD_DIM must be more than 128: sm90/backward_keys.cu makes dQ of less");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP, "NUM_WARPS must be 8 that compute and 4 that copy");

// The boxes of a stage, if a bias has any.
template <typename Smem>
__device__ __forceinline__ unsigned char* bias_boxes(Smem& smem, int stage) {
  if constexpr (BIAS) return smem.bias[stage];
  return nullptr;
}

// The bits of this lane's two rows and the keys of a step, from memory.
template <typename Params>
__device__ __forceinline__ void load_bits(
    uint32_t (&bits)[2], const Params& grad, int64_t batch, int64_t head, int q0, int kv0) {
  if constexpr (MASK) {
    const int64_t tile = batch * grad.mask_batch + head * grad.mask_head + q0 / BLOCK_Q;
    const int64_t step = tile * grad.row_tiles + kv0 / BLOCK_KV;
    load_mask(bits, grad.mask_bits + step * MASK_TILE_WORDS, warp_id() % 4 * 16);
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_queries_wide(
    const __grid_constant__ AttnParams call, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap dO_map,
    const __grid_constant__ KeysParams<MASK> grad BIAS_PARAMETER) {
  extern __shared__ unsigned char shared_bytes[];
  // NOTE: by an offset, so that the compiler still knows that it reads shared memory.
  auto& smem = *reinterpret_cast<Storage*>(shared_bytes + (-shared_address(shared_bytes) & 1023));
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);

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
    for (int s = 0; s < CONSUMERS; ++s) {
      mbarrier_init(smem.full[s], 1);
      mbarrier_init(smem.empty[s], 4);  // a lane of every warp of its warpgroup
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
    RingPosition<CONSUMERS> at;
    for (; number < keys.end; number += BLOCK_KV, at.advance()) {
      const int row = sequences.first_key() + keys.key(number);
      Mbarrier& full = smem.full[at.stage];
      mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // these were read
      mbarrier_arrive_expect_tx(full, 2 * sizeof(smem.K[0]) + COPIED_BIAS);
#pragma unroll 1  // addresses of eight copies at once took more than 24 registers
      for (int b = 0; b < BOXES; ++b) {
        cp_async_bulk_tensor_4d(
            smem.K[at.stage][b], K_map, full, b * BOX_COLS, row, head_kv, entry);
        cp_async_bulk_tensor_4d(
            smem.V[at.stage][b], V_map, full, b * BOX_COLS, row, head_kv, entry);
      }
      if constexpr (BIAS)
        copy_bias_boxes(
            bias_boxes(smem, at.stage), call, BIAS_MAP, full, batch, head, keys.key(number), q0);
    }
    return;
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int own = warpgroup - 1;                                // stage, and half of the columns
  const int warp_row = q0 + warp_id() % 4 * 16;                 // first row of this warp
  const int row = warp_row + lane_id() / 4, t = lane_id() % 4;  // this lane's: row, row + 8
  const Scores scores(p, batch, head);
  const Descriptor Q_rows = uniform(descriptor_k_major(smem.Q[0]));
  const Descriptor dO_rows = uniform(descriptor_k_major(smem.dO[0]));
  const Descriptor K_rows = uniform(descriptor_k_major(smem.K[own][0]));
  const Descriptor V_rows = uniform(descriptor_k_major(smem.V[own][0]));
  const Descriptor K_columns = uniform(descriptor_n_major(smem.K[own][0], BLOCK_KV * BOX_BYTES));
  const RowsBias<BIAS_KIND> bias(bias_boxes(smem, own), warp_row - q0);
  float M[2], delta[2];  // of row and row + 8
  const int64_t padded = padded_row(call, grad, batch, head) + row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    M[h] = grad.row_M[padded + h * 8];
    delta[h] = grad.delta[padded + h * 8];
  }
  const bool coarse = any_coarse<COARSE_ROWS>(grad.coarse + padded / COARSE_ROWS);
  float dQ_acc[COLS / 2] = {};                      // [COLS / 8][4]
  float S_acc[BLOCK_KV / 2], dP_acc[BLOCK_KV / 2];  // [BLOCK_KV / 8][4], then P and dP
  uint32_t dS_frag[BLOCK_KV / 16][4];
  uint32_t parity = 0;  // of the own stage
  const bool steps = number < keys.end;
  if (steps) mbarrier_wait_parity(smem.Q_full, 0);  // Q and dO have arrived
  for (number += own * BLOCK_KV; number < keys.end; number += CONSUMERS * BLOCK_KV, parity ^= 1) {
    const int kv0 = keys.key(number);
    uint32_t bits[2];
    load_bits(bits, grad, batch, head, q0, kv0);
    // S3 scores, and dP
    mbarrier_wait_parity(smem.full[own], parity);  // K and V have arrived
    // NOTE: a weight of 0 does not silence a NaN in the keys of the next sequence.
    if (const int rows = p.len_kv - kv0; VARLEN && rows < BLOCK_KV) {
      zero_rows<WARPGROUP>(smem.K[own], rows, BLOCK_KV);
      zero_rows<WARPGROUP>(smem.V[own], rows, BLOCK_KV);
      named_barrier_sync(1 + own, WARPGROUP);  // all warps multiply these keys
    }
    start_rows<BLOCK_Q, BLOCK_KV>(S_acc, Q_rows, K_rows);    // R9
    start_rows<BLOCK_Q, BLOCK_KV>(dP_acc, dO_rows, V_rows);  // R10

    // S4 P and dS, as their products end
    const bool placed = scores.are_placed(warp_row, 16, kv0, BLOCK_KV);
    wgmma_wait_group<1>();
    wgmma_use(S_acc);
    if constexpr (BIAS && !SOFTCAP)
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 4; ++i) {
        const Vec<float, 2> b = bias.pair(i);
#pragma unroll
        for (int j = 0; j < 2; ++j)
          S_acc[2 * i + j] = biased_score(S_acc[2 * i + j], p.scale, b.v[j]);  // R9
      }
    if constexpr (MASK) apply_mask(S_acc, bits);
    if (!placed)
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 2; ++i)
        if (!admitted(p, row + i / 2 % 2 * 8, kv0 + i / 4 * 8 + t * 2 + i % 2)) S_acc[i] = NEG_INF;
    if constexpr (SOFTCAP)
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 2; ++i)
        S_acc[i] = changed_score(p, S_acc[i], S_acc[i] != NEG_INF);
#pragma unroll
    for (int i = 0; !SOFTCAP && i < BLOCK_KV / 2; ++i)
      S_acc[i] = probability(S_acc[i], p.scale_log2, M[i / 2 % 2]);  // R9
    if (!SOFTCAP && coarse)
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 2; ++i)
        S_acc[i] = normalised(S_acc[i], grad.row_factor[padded + i / 2 % 2 * 8]);  // R9
    wgmma_wait_group<0>();
    wgmma_use(dP_acc);
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 4; ++i) {                 // two neighbouring keys of a row
      const float *P = S_acc + 2 * i, *dP = dP_acc + 2 * i;  // [2]
      const float mean = delta[i % 2];
      if constexpr (SOFTCAP) {
        float dS[2];
        Vec<float, 2> b = {};
        if constexpr (BIAS) b = bias.pair(i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float factor = coarse ? grad.row_factor[padded + i % 2 * 8] : 1.0f;
          const float S = P[j], biased = BIAS ? biased_capped(S, b.v[j]) : S;
          const Weight of =
              coarse ? weight_of_changed<true>(p, S, biased, dP[j] - mean, M[i % 2], factor)
                     : weight_of_changed<false>(p, S, biased, dP[j] - mean, M[i % 2], factor);
          dS[j] = of.dS;
        }
        dS_frag[i / 4][i % 4] = pack_rn<elem_t>(dS[0], dS[1]);  // R11
        continue;
      }
      dS_frag[i / 4][i % 4] = pack_rn<elem_t>(P[0] * (dP[0] - mean), P[1] * (dP[1] - mean));  // R11
    }

    // S5 dQ
    start_columns(dQ_acc, dS_frag, K_columns);  // R12
    wgmma_wait_group<0>();
    wgmma_use(dQ_acc);
    if (lane_id() == 0) mbarrier_arrive(smem.empty[own]);
  }

  // S5 the sum of both, through the place of K: each passes the columns that it does not store
  using Access = Vec<float, 4>;
  auto& handed = *reinterpret_cast<Access(*)[CONSUMERS][HALF_SUMS / 4][WARPGROUP]>(smem.K);
  const int thread = threadIdx.x % WARPGROUP;
  named_barrier_sync(3, CONSUMER_THREADS);  // all keys have been multiplied
#pragma unroll
  for (int n = 0; n < HALF_SUMS / 4; ++n) {
    Access x;
#pragma unroll
    for (int i = 0; i < 4; ++i) x.v[i] = own ? dQ_acc[4 * n + i] : dQ_acc[HALF_SUMS + 4 * n + i];
    handed[own][n][thread] = x;
  }
  named_barrier_sync(3, CONSUMER_THREADS);  // both have handed over
  float sum[HALF_SUMS];                     // [HALF_SUMS / 4][4]
#pragma unroll
  for (int n = 0; n < HALF_SUMS / 4; ++n) {
    const Access x = handed[own ^ 1][n][thread];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum[4 * n + i] = (own ? dQ_acc[HALF_SUMS + 4 * n + i] : dQ_acc[4 * n + i]) + x.v[i];  // R12
  }

  // S6 store
  elem_t* dQ = static_cast<elem_t*>(grad.dQ)  // [len_q, HEAD_DIM]
               + batch * grad.dQ_stride.batch + head * grad.dQ_stride.head +
               sequences.first_row() * grad.dQ_stride.len;
  store_gradient(dQ, grad.dQ_stride.len, row, p.len_q, own * COLS / 2, sum, p.scale);  // R12
}
