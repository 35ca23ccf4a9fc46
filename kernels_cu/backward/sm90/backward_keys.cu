// backward_keys -- Hopper form: five products by wgmma, operands by the bulk tensor copy engine.
//
// Idea         Two warpgroups share a block of keys, 64 each. One warp copies the query rows. The
//              products dV += P^T dO and dK += dS^T Q take their left operand from registers. For
//              dQ, dS of both warpgroups goes through shared memory. It is multiplied a step later,
//              so neither warpgroup waits for the other.
// Differs from the portable form: S and dP of a step start together, and P and dS are computed as
//              these products end. Then dQ of the step before, dV and dK start. Meanwhile dQ is
//              added to memory, 16 bytes at a time, in the layout of the accumulators, which
//              sm90/backward_sums.cu converts to rows.
// ORDERED      Blocks of keys add to a tile of dQ in turn, the last keys first: the same bits on
//              every run. The first block stores its part, the last block stores rows. One warp
//              waits for the turn, another passes it on. It waits only for blocks that have begun.
// Scores       Softcap or bias change S during dP, a bias behind a softcap after it. Bits of masks
//              come with Q.
// PERSISTENT   A thread block draws many blocks of keys. The next K and V arrive meanwhile.
// Kept simple  Otherwise no first copies overlap. Packed sequences copy the next one's rows, too.
// Rounding     R9 P from the log-sum-exp, P to 16 bits, R10 dP, R11 dS, dS to 16 bits, R12 the
//              tensor core over query rows, sums of blocks, times scale, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/config.cuh"
#include "prims/io/gradient_sm90.cuh"
#include "prims/schedule/gradient_turns.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/params.cuh"
#include "prims/score/gradient_bias.cuh"
#include "prims/score/score.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute, 64 keys each
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
constexpr int Q_BOXES = BLOCK_Q / BOX_COLS;  // per row of dS^T
// P and dS are made together, once dP is there. Masked scores of HEAD_DIM 64 spill then; of more
// columns they spill otherwise, as do scores with a bias.
constexpr bool CHANGED_SCORES = SOFTCAP || ((MASK || BIAS) && BLOCK_Q == 64);
// The tensor core subtracts dP from Delta. With a mask or BLOCK_Q 128 Delta spilled during S.
constexpr bool FROM_DELTA = BLOCK_Q == 64 && !MASK;
constexpr int KV_STAGES = PERSISTENT ? 2 : 1;
constexpr int PRODUCER_REGISTERS = PERSISTENT ? 40 : 24;
constexpr int CONSUMER_REGISTERS = PERSISTENT ? 232 : 240;

struct SharedStorage {
  alignas(1024) elem_t K[KV_STAGES][BOXES][BLOCK_KV * BOX_COLS];
  alignas(1024) elem_t V[KV_STAGES][BOXES][BLOCK_KV * BOX_COLS];
  alignas(1024) elem_t Q[NUM_STAGES][BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t dO[NUM_STAGES][BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t dS[2][Q_BOXES][BLOCK_KV * BOX_COLS];  // transposed: [BLOCK_KV, BLOCK_Q]
  alignas(16) float row_M[NUM_STAGES][BLOCK_Q];
  alignas(16) float delta[NUM_STAGES][BLOCK_Q];
  alignas(16) int32_t coarse[NUM_STAGES][BLOCK_Q / COARSE_ROWS];
  Mbarrier KV_full[KV_STAGES], KV_empty[KV_STAGES];
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];  // Q, dO, M and Delta of a step
  // dS of a step, of all keys. Without dS_empty a warp could store dS while the other warpgroup
  // still multiplies dS of two steps before.
  Mbarrier dS_full[2], dS_empty[2];
  // ORDERED: dQ of a step may be added; it has been; the next block may add. Without `passed` the
  // thread that passes a turn on could fall two turns behind and miss a phase of `added`.
  Mbarrier turn[2], added[2], passed[2];
  TurnAt turn_at[2];     // ORDERED: the step of the turn; in registers NVRTC 13.5 spilled
  int index[KV_STAGES];  // ORDERED, PERSISTENT: place of these keys in the order of beginning
};
constexpr int STEP_WORDS = BLOCK_KV / 16 * 2 * WARP_SIZE;  // of a mask
constexpr int MASK_BYTES = MASK ? STEP_WORDS * sizeof(uint32_t) : 0;
template <bool MASK>
struct MaskedStorage : SharedStorage {};
template <>
struct MaskedStorage<true> : SharedStorage {
  alignas(16) uint32_t bits[NUM_STAGES][STEP_WORDS];
};
using Storage = BiasedStorage<MaskedStorage<MASK>, BIAS_BYTES>;
// NOTE: room to align the base where there is any. A float32 bias of 128 rows leaves none.
constexpr int MOST_BYTES = 227 * 1024;
extern "C" __device__ int smem_bytes =
    sizeof(Storage) + 1024 < MOST_BYTES ? sizeof(Storage) + 1024 : sizeof(Storage);
constexpr int STAGE_BYTES = sizeof(SharedStorage::Q[0]);  // of Q, and of dO

static_assert(ELEM_IS_16_BIT, "gradients are of float16 or bfloat16");
static_assert(
    !PERSISTENT || !(MASK || BIAS || SOFTCAP || VARLEN || BLOCK_MASK),
    "a persistent block is for plain calls: it has no registers for others, or no shared memory");
static_assert(
    !BIAS || BIAS_KIND == BiasKind::DENSE || BIAS_KIND == BiasKind::KEYS,
    "a bias has a number for every key");
static_assert(
    BLOCK_KV == CONSUMERS * 64, "BLOCK_KV must be 128: two warpgroups keep gradients of 64 keys");
static_assert(
    BLOCK_Q == (HEAD_DIM <= 64 ? 128 : 64),
    "BLOCK_Q must be 64, and up to HEAD_DIM 64 128: a warpgroup has 64 x 64 of dQ");
static_assert(HEAD_DIM <= 128, "HEAD_DIM must be at most 128: dK and dV fill the registers");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP, "NUM_WARPS must be 8 that compute and 4 that copy");

// Delta of the rows of accumulators, from which products then subtract dP.
__device__ __forceinline__ void load_delta(
    float (&dP_acc)[BLOCK_Q / 2], const float (&delta_of)[BLOCK_Q]) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; ++n)
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; i += 2)
      ld_volatile_shared_v2(&delta_of[n * 8 + t * 2], dP_acc[i], dP_acc[i + 1]);
}
// Delta of the two rows that this lane has of tile n of eight.
__device__ __forceinline__ Vec<float, 2> delta_pair(const float (&delta_of)[BLOCK_Q], int n) {
  if constexpr (FROM_DELTA) return {};
  return *reinterpret_cast<const Vec<float, 2>*>(&delta_of[n * 8 + lane_id() % 4 * 2]);
}
// dP - Delta of an accumulator.
__device__ __forceinline__ float less_delta(float dP, float delta) {
  return FROM_DELTA ? -dP : dP - delta;  // R11
}

// dQ [64, 64] = dS K over all keys, in the background.
__device__ __forceinline__ void start_across(
    float (&dQ_acc)[QUERY_SUMS], Descriptor64 dS_rows, Descriptor64 K_rows) {
  wgmma_use(dQ_acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_KV / 16; ++k)
    Wgmma<elem_t, 64>::ss_across(
        dQ_acc, dS_rows + k * 16 * BOX_BYTES, K_rows + k * 16 * BOX_BYTES, k > 0);  // R12
  wgmma_commit_group();
}

// The bits of this lane: BLOCK_Q / 4 of `key`, then of key + 8. Bit 2 n + i has the query row
// q0 + 8 n + 2 (lane % 4) + i.
struct MaskBits {
  uint32_t words[BLOCK_Q / 64];
};
template <typename Smem>
__device__ __forceinline__ MaskBits load_bits(const Smem& smem, int stage) {
  if constexpr (MASK) {
    using Pair = Vec<uint32_t, 2>;  // of key and key + 8
    const Pair x = reinterpret_cast<const Pair*>(smem.bits[stage])[threadIdx.x - WARPGROUP];
    if constexpr (BLOCK_Q == 64) return {{x.v[0] | x.v[1] << 16}};
    MaskBits bits;
    for (int h = 0; h < BLOCK_Q / 64; ++h) bits.words[h] = x.v[h];
    return bits;
  }
  return {};
}
__device__ __forceinline__ bool is_admitted(const MaskBits& bits, int i) {
  const int bit = i / 2 % 2 * (BLOCK_Q / 4) + i / 4 * 2 + i % 2;
  return !MASK || (bits.words[bit / 32] >> bit % 32 & 1) != 0;
}

// S4 the scores of products S with softcap and mask; of rows and keys as below. They stay in S_acc
// until dP is there.
__device__ __forceinline__ void change(
    const Scores& scores, float (&S_acc)[BLOCK_Q / 2], const MaskBits& bits, int q0, int key,
    bool placed) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < BLOCK_Q / 2; ++i) {
    const int row = q0 + i / 4 * 8 + t * 2 + i % 2;
    const bool admits =
        is_admitted(bits, i) && (placed || admitted_with_bias(scores.p, row, key + i / 2 % 2 * 8));
    S_acc[i] = changed_score(scores.p, S_acc[i], admits);
  }
}

// P and dS in 16 bits, as `slopes` leaves them, of scores that `change` left. Under a softcap they
// have no bias yet, which has no part in its slope.
template <bool ANY_COARSE>
__device__ __forceinline__ void changed_slopes(
    const AttnParams& p, const KeysBias<BIAS_KIND>& bias, const float (&S_acc)[BLOCK_Q / 2],
    const float (&dP_acc)[BLOCK_Q / 2], const float (&row_M)[BLOCK_Q],
    const float (&delta_of)[BLOCK_Q], const float* factors, uint32_t (&P_frag)[BLOCK_Q / 16][4],
    uint32_t (&dS_frag)[BLOCK_Q / 16][4]) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; ++n) {
    using Pair = Vec<float, 2>;  // of the two rows that this lane has of a tile
    const Pair M = *reinterpret_cast<const Pair*>(&row_M[n * 8 + t * 2]);
    const Pair delta = delta_pair(delta_of, n);
    Vec<float, 4> b = {};
    if constexpr (SOFTCAP && BIAS) b = bias.of_rows(n);
    Pair factor = {};
    if constexpr (ANY_COARSE) factor = *reinterpret_cast<const Pair*>(&factors[n * 8 + t * 2]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // key, then key + 8
      Weight of[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * n + 2 * h + i;
        const float S = S_acc[at];
        const float biased = SOFTCAP && BIAS ? biased_in_place(S, b.v[2 * h + i]) : S;
        of[i] = weight_of_changed<ANY_COARSE>(
            p, S, biased, less_delta(dP_acc[at], delta.v[i]), M.v[i], factor.v[i]);
      }
      P_frag[n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(of[0].P, of[1].P);     // R9
      dS_frag[n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(of[0].dS, of[1].dS);  // R11
    }
  }
}

// Scores that the mask or their place excludes become -inf: rows are keys, from `key` on, columns
// the query rows from q0 on.
__device__ __forceinline__ void exclude(
    const Scores& scores, float (&S_acc)[BLOCK_Q / 2], const MaskBits& bits, int q0, int key,
    bool placed) {
  const int t = lane_id() % 4;
  if constexpr (MASK)
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 2; ++i)
      if (!is_admitted(bits, i)) S_acc[i] = NEG_INF;
  if (!placed)
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 2; ++i)
      if (!admitted_with_bias(scores.p, q0 + i / 4 * 8 + t * 2 + i % 2, key + i / 2 % 2 * 8))
        S_acc[i] = NEG_INF;
}

// S4 P of the scores, as it stands in S_acc, of rows and keys as above.
__device__ __forceinline__ void weights(
    const Scores& scores, float (&S_acc)[BLOCK_Q / 2], const float (&row_M)[BLOCK_Q], int q0,
    int key, bool placed, const MaskBits& bits) {
  const int t = lane_id() % 4;
  exclude(scores, S_acc, bits, q0, key, placed);
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; ++n) {
    using Pair = Vec<float, 2>;  // of the two rows that this lane has of a tile
    const Pair M = *reinterpret_cast<const Pair*>(&row_M[n * 8 + t * 2]);
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; ++i)
      S_acc[i] = probability(S_acc[i], scores.p.scale_log2, M.v[i % 2]);  // R9
  }
}

// P and dS in 16 bits, two neighbouring query rows in a register: the left operands of dV and dK.
__device__ __forceinline__ void slopes(
    const float (&P_acc)[BLOCK_Q / 2], const float (&dP_acc)[BLOCK_Q / 2],
    const float (&delta_of)[BLOCK_Q], uint32_t (&P_frag)[BLOCK_Q / 16][4],
    uint32_t (&dS_frag)[BLOCK_Q / 16][4]) {
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; ++n) {
    const Vec<float, 2> delta = delta_pair(delta_of, n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {                                  // key, then key + 8
      const float* P = P_acc + 4 * n + 2 * h;                      // [2]
      const float* dP = dP_acc + 4 * n + 2 * h;                    // [2]
      P_frag[n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(P[0], P[1]);  // R9
      dS_frag[n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(
          P[0] * less_delta(dP[0], delta.v[0]), P[1] * less_delta(dP[1], delta.v[1]));  // R11
    }
  }
}

// Stores this warp's rows of dS^T to shared memory, swizzled like a box, from this lane's `corner`.
__device__ __forceinline__ void store_dS(
    uint32_t corner, const uint32_t (&dS_frag)[BLOCK_Q / 16][4]) {
#pragma unroll
  for (int k = 0; k < BLOCK_Q / 16; ++k)
    stmatrix_x4((corner + k / 4 * BLOCK_KV * BOX_BYTES) ^ k % 4 * 32, dS_frag[k]);
  fence_proxy_async();
}

// S0 locate: the block of keys with number `index`, and its query heads.
struct KeysPlace : BlockOfKeys {
  int64_t batch, head_kv;
  int first_head, last_head;
  __device__ __forceinline__
  KeysPlace(const AttnParams& call, int index, int all_blocks, int kv_blocks)
      : BlockOfKeys(block_of_keys(index, all_blocks, kv_blocks, call.len_q)),
        batch(head / call.heads_kv),
        head_kv(head % call.heads_kv) {
    const int group = call.heads / call.heads_kv;
    first_head = head_kv * group, last_head = first_head + group;
  }
};

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_keys(
    const __grid_constant__ AttnParams call, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap dO_map,
    const __grid_constant__ KeysParams<MASK> grad BIAS_PARAMETER) {
  alignas(1024) extern __shared__ unsigned char shared_bytes[];
  // NOTE: by an offset, so that the compiler still knows that it reads shared memory.
  auto& smem = *reinterpret_cast<Storage*>(shared_bytes + (-shared_address(shared_bytes) & 1023));
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);

  if (threadIdx.x == 0) {
    for (int s = 0; s < KV_STAGES; ++s) {
      mbarrier_init(smem.KV_full[s], 1);
      if (PERSISTENT) mbarrier_init(smem.KV_empty[s], CONSUMERS * 4);
    }
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(smem.full[s], 1);
      mbarrier_init(smem.empty[s], CONSUMERS * 4);  // a lane of every consumer warp
    }
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(smem.dS_full[s], CONSUMERS * 4);
      mbarrier_init(smem.dS_empty[s], CONSUMERS * 4);
      mbarrier_init(smem.turn[s], 1);
      mbarrier_init(smem.added[s], CONSUMERS * 4);
      mbarrier_init(smem.passed[s], 1);
    }
    init_bias(smem, CONSUMERS * 4);
    fence_mbarrier_init();
    if (ORDERED) smem.index[0] = atomicAdd(grad.next_block, 1);
  }
  __syncthreads();  // the barriers are initialised before anyone waits or arrives; index is there

  const int kv_blocks = ceil_div(call.len_kv, BLOCK_KV);
  const int all_blocks = PERSISTENT ? call.batch * call.heads_kv * kv_blocks : gridDim.x;
  KeysPlace keys(call, ORDERED ? smem.index[0] : blockIdx.x, all_blocks, kv_blocks);
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    const int warp = warp_id();
    if (warp > (ORDERED ? 2 : 0) || !elect_sync()) return;
    RingPosition<KV_STAGES> kv_at;
    RingPosition<NUM_STAGES> at;
    RingPosition<1> bias_at;
    int index = PERSISTENT ? atomicAdd(grad.next_block, 1) : 0;
    for (;; kv_at.advance()) {
      if constexpr (PERSISTENT) {
        mbarrier_wait_parity(smem.KV_empty[kv_at.stage], kv_at.parity ^ 1);  // these were read
        smem.index[kv_at.stage] = index;
        if (index >= all_blocks) return mbarrier_arrive(smem.KV_full[kv_at.stage]);
        keys = KeysPlace(call, index, all_blocks, kv_blocks);
      }
      const int kv0 = keys.kv0, last_head = keys.last_head;
      const int64_t batch = keys.batch, head_kv = keys.head_kv;
      const auto& p = of_batch(call, batch);
      if (VARLEN && kv0 >= p.len_kv) return;
      const Sequences<VARLEN> sequences(call, batch);
      TurnSteps steps(p, grad, batch, keys.first_head, last_head, kv0, keys.reversed);
      if (!PERSISTENT && steps.head >= last_head) return;
      const int entry = VARLEN ? 0 : batch;  // to the copy engine packed sequences are one
      // ---- behind S5, one thread: after the blocks before, lets this block add, ...
      if (warp == 1) {
        give_turns<1>(smem, call, p, grad, steps, batch, last_head, kv0, sequences.first_row(), 0);
        return;
      }
      // ---- ... and one thread: after this block, lets the next block add
      if (warp == 2) {
        pass_turns<1>(smem, call, p, grad, steps, batch, last_head, kv0, 0);
        return;
      }
      // ---- the producer, one thread: S1 and S2
      // S1 load K, V
      Mbarrier& KV_full = smem.KV_full[kv_at.stage];
      mbarrier_arrive_expect_tx(KV_full, 2 * sizeof(smem.K[0]));
      for (int b = 0; b < BOXES; ++b) {
        const int row = sequences.first_key() + kv0;
        cp_async_bulk_tensor_4d(
            smem.K[kv_at.stage][b], K_map, KV_full, b * BOX_COLS, row, head_kv, entry);
        cp_async_bulk_tensor_4d(
            smem.V[kv_at.stage][b], V_map, KV_full, b * BOX_COLS, row, head_kv, entry);
      }
      // S2 load Q, dO
      for (; steps.head < last_head; steps.advance(p, grad, batch, last_head, kv0), at.advance()) {
        const int row = sequences.first_row() + steps.q0();
        const int64_t padded = padded_row(call, grad, batch, steps.head) + steps.q0();
        Mbarrier& full = smem.full[at.stage];
        mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // these were read
        mbarrier_arrive_expect_tx(
            full, 2 * STAGE_BYTES + 2 * sizeof(smem.row_M[0]) + sizeof(smem.coarse[0]) +
                      MASK_BYTES + BIAS_BYTES);
        for (int b = 0; b < BOXES; ++b) {
          cp_async_bulk_tensor_4d(
              smem.Q[at.stage][b], Q_map, full, b * BOX_COLS, row, steps.head, entry);
          cp_async_bulk_tensor_4d(
              smem.dO[at.stage][b], dO_map, full, b * BOX_COLS, row, steps.head, entry);
        }
        cp_async_bulk(smem.row_M[at.stage], grad.row_M + padded, sizeof(smem.row_M[0]), full);
        cp_async_bulk(smem.delta[at.stage], grad.delta + padded, sizeof(smem.delta[0]), full);
        cp_async_bulk(
            smem.coarse[at.stage], grad.coarse + padded / COARSE_ROWS, sizeof(smem.coarse[0]),
            full);
        copy_bits(smem, grad, at.stage, full, batch, steps.head, kv0, steps.q0());
        copy_bias(smem, call, BIAS_MAP, bias_at.parity, full, batch, steps.head, kv0, steps.q0());
        bias_at.advance();
      }
      if (!PERSISTENT) return;
      index = atomicAdd(grad.next_block, 1);
    }
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int half = warpgroup - 1;                   // of the keys, and of dQ
  const int key0 = half * 64 + warp_id() % 4 * 16;  // first key of this warp in the block
  // Halves of dQ have 64 rows each, of dS, or 64 columns, of K.
  const int Q_half = BLOCK_Q == 128 ? half : 0, K_half = BLOCK_Q == 128 ? 0 : half;
  const Descriptor64 K_first = uniform(descriptor_k_major(&smem.K[0][0][half * 64 * BOX_COLS]));
  const Descriptor64 V_first = uniform(descriptor_k_major(&smem.V[0][0][half * 64 * BOX_COLS]));
  const Descriptor64 Q_first = uniform(descriptor_k_major(smem.Q[0][0]));
  const Descriptor64 dO_first = uniform(descriptor_k_major(smem.dO[0][0]));
  const Descriptor64 Q_columns = uniform(descriptor_n_major(smem.Q[0][0], BLOCK_Q * BOX_BYTES));
  const Descriptor64 dO_columns = uniform(descriptor_n_major(smem.dO[0][0], BLOCK_Q * BOX_BYTES));
  const Descriptor64 dS_first = uniform(descriptor_n_major(smem.dS[0][Q_half], BOX_BYTES));
  const Descriptor64 K_across = uniform(descriptor_n_major(smem.K[0][K_half], BOX_BYTES));
  const uint32_t dS_corner = shared_address(&smem.dS[0][0][key0 * BOX_COLS]) +
                             lane_id() % 16 * BOX_BYTES + (lane_id() / 16 ^ lane_id() % 8) * 16;

  RingPosition<KV_STAGES> kv_at;
  RingPosition<NUM_STAGES> at;
  RingPosition<2> dS_at, dQ_at;  // dS of this step, and of the step whose dQ is next
  for (;; kv_at.advance()) {
    if constexpr (PERSISTENT) {
      mbarrier_wait_parity(smem.KV_full[kv_at.stage], kv_at.parity);  // K and V have arrived
      const int index = uniform(smem.index[kv_at.stage]);
      if (index >= all_blocks) return;
      keys = KeysPlace(call, index, all_blocks, kv_blocks);
    }
    const int kv0 = keys.kv0, last_head = keys.last_head;
    const int64_t batch = keys.batch, head_kv = keys.head_kv;
    const auto& p = of_batch(call, batch);
    if (VARLEN && kv0 >= p.len_kv) return;
    const Sequences<VARLEN> sequences(call, batch);
    TurnSteps steps(p, grad, batch, keys.first_head, last_head, kv0, keys.reversed);
    const int key = kv0 + key0 + lane_id() / 4;  // this lane's keys: key, key + 8
    const Descriptor64 K_rows = K_first.stage(kv_at.stage, sizeof(smem.K[0]));
    const Descriptor64 V_rows = V_first.stage(kv_at.stage, sizeof(smem.V[0]));
    const Descriptor64 K_columns = K_across.stage(kv_at.stage, sizeof(smem.K[0]));
    KeysBias<BIAS_KIND> bias(smem, key0, key);
    float dK_acc[COLS / 2] = {}, dV_acc[COLS / 2] = {};  // [COLS / 8][4]
    float dQ_acc[QUERY_SUMS];                            // of the step before
    float* dQ_sum;  // [QUERY_SUMS / 4, WARPGROUP, 4], destination; not ORDERED

    // S5 dQ, of the step before
    const auto start_dQ = [&] {
      mbarrier_wait_parity(smem.dS_full[dQ_at.stage], dQ_at.parity);  // dS of all keys is there
      start_across(
          dQ_acc, dS_first.stage(dQ_at.stage, sizeof(smem.dS[0])), in_this_step(K_columns));
    };
    const auto end_dQ = [&] {
      wgmma_use(dQ_acc);
      if (lane_id() == 0) mbarrier_arrive(smem.dS_empty[dQ_at.stage]);
      if constexpr (ORDERED) {
        mbarrier_wait_parity(smem.turn[dQ_at.stage], dQ_at.parity);  // the blocks before have added
        const int row = Q_half * 64 + warp_id() % 4 * 16 + lane_id() / 4;
        add_in_turn(
            smem.turn_at[dQ_at.stage], dQ_acc, half, row, K_half * 64, grad.dQ_stride.len, p.scale);
        __syncwarp();  // all lanes have added
        if (lane_id() == 0) mbarrier_arrive(smem.added[dQ_at.stage]);
      } else {
        add_query_sums(dQ_sum, dQ_acc);  // R12
      }
      dQ_at.advance();
    };
    const auto step = [&](bool first) {
      const int q0 = steps.q0();
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // Q and dO have arrived
      // NOTE: a weight of 0 does not silence a NaN in the rows of the next sequence.
      if (const int rows = p.len_q - q0; VARLEN && rows < BLOCK_Q) {
        zero_rows<CONSUMER_THREADS>(smem.Q[at.stage], rows, BLOCK_Q);
        zero_rows<CONSUMER_THREADS>(smem.dO[at.stage], rows, BLOCK_Q);
        named_barrier_sync(1, CONSUMER_THREADS);  // both warpgroups multiply these rows
      }

      // S3 scores, and dP, or Delta - dP
      float S_acc[BLOCK_Q / 2], dP_acc[BLOCK_Q / 2];  // [BLOCK_Q / 8][4]
      const float (&delta)[BLOCK_Q] = smem.delta[at.stage];
      const Descriptor64 dO_rows = dO_first.stage(at.stage, STAGE_BYTES);
      if constexpr (FROM_DELTA) load_delta(dP_acc, delta);
      start_rows<BLOCK_KV, BLOCK_Q>(
          S_acc, in_this_step(K_rows), Q_first.stage(at.stage, STAGE_BYTES));  // R9
      if constexpr (FROM_DELTA)
        start_rows_minus<BLOCK_KV, BLOCK_Q>(dP_acc, in_this_step(V_rows), dO_rows);  // R10
      else
        start_rows<BLOCK_KV, BLOCK_Q>(dP_acc, in_this_step(V_rows), dO_rows);  // R10

      // S4 P and dS, as their products end
      uint32_t P_frag[BLOCK_Q / 16][4], dS_frag[BLOCK_Q / 16][4];
      const Scores scores(p, batch, steps.head);
      bool placed = scores.are_placed(q0, BLOCK_Q, kv0 + key0, 16);
      if constexpr (BIAS_OF_OTHERS) placed &= q0 + BLOCK_Q <= p.len_q;
      const MaskBits bits = load_bits(smem, at.stage);
      bias.load(call, batch, steps.head);
      wgmma_wait_group<1>();
      wgmma_use(S_acc);
      if constexpr (!SOFTCAP) bias.add(S_acc, p.scale);
      if constexpr (CHANGED_SCORES && BIAS && !SOFTCAP) {
        exclude(scores, S_acc, bits, q0, key, placed);
      } else if constexpr (CHANGED_SCORES) {
        change(scores, S_acc, bits, q0, key, placed);
      } else {
        weights(scores, S_acc, smem.row_M[at.stage], q0, key, placed, bits);
        if (any_coarse<BLOCK_Q>(smem.coarse[at.stage]))
          normalise(S_acc, grad.row_factor + padded_row(call, grad, batch, steps.head) + q0);
      }
      wgmma_wait_group<0>();
      wgmma_use(dP_acc);
      if constexpr (CHANGED_SCORES) {
        const float (&M)[BLOCK_Q] = smem.row_M[at.stage];
        if (any_coarse<BLOCK_Q>(smem.coarse[at.stage]))
          changed_slopes<true>(
              p, bias, S_acc, dP_acc, M, delta,
              grad.row_factor + padded_row(call, grad, batch, steps.head) + q0, P_frag, dS_frag);
        else
          changed_slopes<false>(p, bias, S_acc, dP_acc, M, delta, nullptr, P_frag, dS_frag);
      } else {
        slopes(S_acc, dP_acc, delta, P_frag, dS_frag);
      }
      mbarrier_wait_parity(smem.dS_empty[dS_at.stage], dS_at.parity ^ 1);  // the last was read
      store_dS(dS_corner + dS_at.stage * sizeof(smem.dS[0]), dS_frag);
      __syncwarp();  // the warp's rows are complete, and its bias is added
      if (lane_id() == 0) mbarrier_arrive(smem.dS_full[dS_at.stage]);
      if (lane_id() == 0) bias.release(smem);
      dS_at.advance();

      // S5 dV, dK; meanwhile dQ of the step before goes to memory
      if (!first) start_dQ();
      start_columns(dV_acc, P_frag, dO_columns.stage(at.stage, STAGE_BYTES));  // R12
      start_columns(dK_acc, dS_frag, Q_columns.stage(at.stage, STAGE_BYTES));  // R12
      if (!first) {
        wgmma_wait_group<2>();
        end_dQ();
      }
      if (!ORDERED) dQ_sum = query_sums(call, grad, batch, steps.head, q0, half);
      wgmma_wait_group<0>();
      wgmma_use(dV_acc);
      wgmma_use(dK_acc);
      if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
      at.advance();
      steps.advance(p, grad, batch, last_head, kv0);
    };

    if (steps.head < last_head) {
      if (!PERSISTENT) mbarrier_wait_parity(smem.KV_full[0], 0);  // K and V have arrived
      if (const int rows = p.len_kv - kv0; VARLEN && rows < BLOCK_KV) {
        zero_rows<CONSUMER_THREADS>(smem.K[0], rows, BLOCK_KV);
        zero_rows<CONSUMER_THREADS>(smem.V[0], rows, BLOCK_KV);
        named_barrier_sync(1, CONSUMER_THREADS);  // both warpgroups multiply these keys
      }
      step(true);
      while (steps.head < last_head) step(false);
      start_dQ();  // the last dQ, by itself
      wgmma_wait_group<0>();
      end_dQ();
    }
    if constexpr (PERSISTENT) {
      __syncwarp();  // all lanes have read the index, even of keys that no row sees
      if (lane_id() == 0) mbarrier_arrive(smem.KV_empty[kv_at.stage]);
    }

    // S6 store
    elem_t* dK = static_cast<elem_t*>(grad.dK)  // [len_kv, HEAD_DIM]
                 + batch * grad.dK_stride.batch + head_kv * grad.dK_stride.head +
                 sequences.first_key() * grad.dK_stride.len;
    elem_t* dV = static_cast<elem_t*>(grad.dV)  // [len_kv, HEAD_DIM]
                 + batch * grad.dV_stride.batch + head_kv * grad.dV_stride.head +
                 sequences.first_key() * grad.dV_stride.len;
    store_gradient(dV, grad.dV_stride.len, key, p.len_kv, 0, dV_acc, 1.0f);     // R12
    store_gradient(dK, grad.dK_stride.len, key, p.len_kv, 0, dK_acc, p.scale);  // R12
    if (!PERSISTENT) return;
  }
}
