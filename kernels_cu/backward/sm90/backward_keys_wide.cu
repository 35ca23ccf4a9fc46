// backward_keys_wide -- gradients of K and V past 128 columns, Hopper form.
//
// Idea         dK and dV of 64 keys and 256 columns fill the registers of two warpgroups, half of
//              the columns each. In a step, each warpgroup computes P and dS of half of the query
//              rows. The other half comes through shared memory, where all left operands lie.
// Differs from sm90/backward_keys.cu: 64 keys, not 128, and both warpgroups have all of them; P
//              goes through shared memory, too; sm90/backward_queries_wide.cu makes dQ.
// Scores       As in sm90/backward_keys.cu. A bias is copied while S and dP are multiplied. Places
//              clear bits of a mask: score by score, both spilled up to 128 bytes.
// Kept simple  dV and dK of a step and S and dP of the next step are multiplied in sequence. The
//              tensor cores idle while P and dS are computed.
// Rounding     R9 P from the log-sum-exp, P to 16 bits, R10 dP, R11 dS, dS to 16 bits, R12 the
//              tensor core over query rows, times scale, store
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

constexpr int CONSUMERS = 2;  // warpgroups that compute
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
constexpr int HALF_ROWS = BLOCK_Q / 2;  // query rows of a step whose S and dP a warpgroup has
constexpr int HALF_COLS = COLS / 2;     // columns of dK and dV that it has
constexpr int HALF_BOXES = BOXES / 2;
// Places of rows and keys clear bits, and change no score.
constexpr bool PLACES_IN_BITS = BIAS || (MASK && (CAUSAL || (WINDOW && SOFTCAP)));
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;

struct SharedStorage {
  alignas(1024) elem_t K[BOXES][BLOCK_KV * BOX_COLS];
  alignas(1024) elem_t V[BOXES][BLOCK_KV * BOX_COLS];
  alignas(1024) elem_t Q[NUM_STAGES][BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t dO[NUM_STAGES][BOXES][BLOCK_Q * BOX_COLS];
  alignas(1024) elem_t P[BLOCK_KV * BOX_COLS];  // transposed, as dS: [BLOCK_KV, BLOCK_Q]
  alignas(1024) elem_t dS[BLOCK_KV * BOX_COLS];
  alignas(16) float row_M[NUM_STAGES][BLOCK_Q];
  alignas(16) float delta[NUM_STAGES][BLOCK_Q];
  alignas(16) float row_factor[NUM_STAGES][BLOCK_Q];
  alignas(16) int32_t coarse[NUM_STAGES][BLOCK_Q / COARSE_ROWS];
  Mbarrier KV_full;
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];  // Q, dO, M and Delta of a step
  Mbarrier P_full, P_empty;                      // P and dS of a step, of all its rows
};
constexpr int MASK_BYTES = MASK ? MASK_TILE_WORDS * sizeof(uint32_t) : 0;  // of a step
template <bool MASK>
struct MaskedStorage : SharedStorage {};
template <>
struct MaskedStorage<true> : SharedStorage {
  alignas(16) uint32_t bits[NUM_STAGES][MASK_TILE_WORDS];
};
struct Storage : BiasedStorage<MaskedStorage<MASK>, BIAS_BYTES> {
  Mbarrier bias_full;  // of a step, whose S and dP are multiplied before; not used without a bias
};
extern "C" __device__ int smem_bytes = sizeof(Storage) + 1024;  // room to align the base
constexpr int STAGE_BYTES = sizeof(SharedStorage::Q[0]);        // of Q, and of dO

static_assert(ELEM_IS_16_BIT, "gradients are of float16 or bfloat16");
static_assert(
    !BIAS || BIAS_KIND == BiasKind::DENSE || BIAS_KIND == BiasKind::KEYS,
    "a bias has a number for every key");
static_assert(
    BLOCK_KV == 64 && BLOCK_Q == 64, "BLOCK_KV and BLOCK_Q must be 64: a row of P^T is one box");
static_assert(HEAD_DIM > 128, "HEAD_DIM must be more than 128: sm90/backward_keys.cu is for less");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP, "NUM_WARPS must be 8 that compute and 4 that copy");

// D [64, HALF_COLS] += A B of rows A [64, BLOCK_Q] and B [BLOCK_Q, HALF_COLS], in the background.
__device__ __forceinline__ void start_half(
    float (&D_acc)[HALF_COLS / 2], Descriptor A_rows, Descriptor B_columns) {
  wgmma_use(D_acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_Q / 16; ++k)
    Wgmma<elem_t, HALF_COLS>::ss_columns(
        D_acc, A_rows + k * 32, B_columns + k * 16 * BOX_BYTES, true);  // R12
  wgmma_commit_group();
}

// The bias of a step, once the bias of the step before was read.
template <typename Smem>
__device__ __forceinline__ void copy_bias_alone(
    Smem& smem, const AttnParams& p, const TensorMap& bias_map, uint32_t parity, int batch,
    int head, int kv0, int q0) {
  if constexpr (BIAS) {
    mbarrier_wait_parity(smem.bias_empty, parity ^ 1);
    mbarrier_arrive_expect_tx(smem.bias_full, COPIED_BIAS);
    copy_bias_boxes(smem.bias, p, bias_map, smem.bias_full, batch, head, kv0, q0);
  }
}

// The bits of this lane's two keys and the query rows of its warpgroup.
template <typename Smem>
__device__ __forceinline__ void load_bits(
    uint32_t (&bits)[2], const Smem& smem, int stage, int key0, int half) {
  bits[0] = bits[1] = ~0u;
  if constexpr (MASK) {
    load_mask(bits, smem.bits[stage], key0);
    // NOTE: with places not by a shift, of which ptxas 13.5 makes 32 masks, and spills them.
    for (int h = 0; h < 2; ++h)
      bits[h] =
          PLACES_IN_BITS ? prmt(bits[h], 0, 0x4440 + half) : bits[h] >> half * (HALF_ROWS / 4);
  }
}

// Clears the bits of query rows, from q0 on, that may not attend to this lane's keys by place.
__device__ __forceinline__ void clear_by_place(
    uint32_t (&bits)[2], const AttnParams& p, int q0, int key) {
  const int row = q0 + lane_id() % 4 * 2;  // of this lane's bit 0
#pragma unroll
  for (int h = 0; h < 2; ++h, key += 8) {
    if (key >= p.len_kv) bits[h] = 0;
    if constexpr (BIAS_OF_OTHERS) bits[h] &= bits_below(p.len_q - row);
    if constexpr (CAUSAL) bits[h] &= ~bits_below(key - p.causal_shift - row);
    if constexpr (WINDOW) bits[h] &= bits_below(key - p.window_shift + 1 - row);
  }
}

// S4 P and dS of the scores, transposed and in 16 bits: rows are keys, from `key` on, columns the
// query rows from q0 on. ANY_COARSE: P gets the factors of its rows, too.
template <bool ANY_COARSE>
__device__ __forceinline__ void weights_and_slopes(
    const Scores& scores, const KeysBias<BIAS_KIND>& bias, float (&S_acc)[HALF_ROWS / 2],
    const float (&dP_acc)[HALF_ROWS / 2], const uint32_t (&bits)[2], const float* row_M,
    const float* delta_of, const float* factors, int q0, int key, bool placed,
    uint32_t (&P_frag)[HALF_ROWS / 16][4], uint32_t (&dS_frag)[HALF_ROWS / 16][4]) {
  const int t = lane_id() % 4;
  if constexpr (MASK || PLACES_IN_BITS)
#pragma unroll
    for (int i = 0; i < HALF_ROWS / 2; ++i)
      if (!is_admitted(bits, i)) S_acc[i] = NEG_INF;
  if (!PLACES_IN_BITS && !placed)
#pragma unroll
    for (int i = 0; i < HALF_ROWS / 2; ++i)
      if (!admitted(scores.p, q0 + i / 4 * 8 + t * 2 + i % 2, key + i / 2 % 2 * 8))
        S_acc[i] = NEG_INF;
#pragma unroll
  for (int n = 0; n < HALF_ROWS / 8; ++n) {
    using Pair = Vec<float, 2>;  // of the two rows that this lane has of a tile
    const Pair M = *reinterpret_cast<const Pair*>(&row_M[n * 8 + t * 2]);
    const Pair delta = *reinterpret_cast<const Pair*>(&delta_of[n * 8 + t * 2]);
    Pair factor;
    if constexpr (ANY_COARSE) factor = *reinterpret_cast<const Pair*>(&factors[n * 8 + t * 2]);
    Vec<float, 4> b = {};
    if constexpr (SOFTCAP && BIAS) b = bias.of_rows(n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // key, then key + 8
      float P[2], dS[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * n + 2 * h + i;
        if constexpr (SOFTCAP) {
          const float S = changed_score(scores.p, S_acc[at], S_acc[at] != NEG_INF);
          const float biased = BIAS ? biased_capped(S, b.v[2 * h + i]) : S;
          const Weight of = weight_of_changed<ANY_COARSE>(
              scores.p, S, biased, dP_acc[at] - delta.v[i], M.v[i],
              ANY_COARSE ? factor.v[i] : 1.0f);
          P[i] = of.P, dS[i] = of.dS;
          continue;
        }
        P[i] = probability(S_acc[at], scores.p.scale_log2, M.v[i]);      // R9
        if constexpr (ANY_COARSE) P[i] = normalised(P[i], factor.v[i]);  // R9
        dS[i] = P[i] * (dP_acc[at] - delta.v[i]);                        // R11
      }
      P_frag[n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(P[0], P[1]);     // R9
      dS_frag[n / 2][n % 2 * 2 + h] = pack_rn<elem_t>(dS[0], dS[1]);  // R11
    }
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_keys_wide(
    const __grid_constant__ AttnParams call, const __grid_constant__ TensorMap Q_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap dO_map,
    const __grid_constant__ KeysParams<MASK> grad BIAS_PARAMETER) {
  extern __shared__ unsigned char shared_bytes[];
  // NOTE: by an offset, so that the compiler still knows that it reads shared memory.
  auto& smem = *reinterpret_cast<Storage*>(shared_bytes + (-shared_address(shared_bytes) & 1023));
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);

  // S0 locate
  const int kv_blocks = ceil_div(call.len_kv, BLOCK_KV);
  const int kv0 = blockIdx.x % kv_blocks * BLOCK_KV;  // the first keys have most causal rows
  const int64_t batch_head = blockIdx.x / kv_blocks;
  const int64_t batch = batch_head / call.heads_kv, head_kv = batch_head % call.heads_kv;
  const int entry = VARLEN ? 0 : batch;  // to the copy engine packed sequences are one
  const auto& p = of_batch(call, batch);
  if (VARLEN && kv0 >= p.len_kv) return;
  const Sequences<VARLEN> sequences(call, batch);
  const int group = p.heads / p.heads_kv;
  const int first_head = head_kv * group, last_head = first_head + group;  // of the query heads

  if (threadIdx.x == 0) {
    mbarrier_init(smem.KV_full, 1);
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(smem.full[s], 1);
      mbarrier_init(smem.empty[s], CONSUMERS * 4);  // a lane of every consumer warp
    }
    mbarrier_init(smem.P_full, CONSUMERS * 4);
    mbarrier_init(smem.P_empty, CONSUMERS * 4);
    init_bias(smem, CONSUMERS * 4);
    if (BIAS) mbarrier_init(smem.bias_full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();       // the barriers are initialised before anyone waits or arrives
  if (warpgroup == 0) {  // ---- the producer, one thread: S1 and S2
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= WARP_SIZE || !elect_sync()) return;
    RowSteps steps(p, grad, batch, first_head, last_head, kv0);
    if (steps.head >= last_head) return;
    // S1 load K, V
    mbarrier_arrive_expect_tx(smem.KV_full, 2 * sizeof(smem.K));
    for (int b = 0; b < BOXES; ++b) {
      const int row = sequences.first_key() + kv0;
      cp_async_bulk_tensor_4d(smem.K[b], K_map, smem.KV_full, b * BOX_COLS, row, head_kv, entry);
      cp_async_bulk_tensor_4d(smem.V[b], V_map, smem.KV_full, b * BOX_COLS, row, head_kv, entry);
    }
    // S2 load Q, dO
    RingPosition<NUM_STAGES> at;
    RingPosition<1> bias_at;
    for (; steps.head < last_head; steps.advance(p, grad, batch, last_head, kv0), at.advance()) {
      const int row = sequences.first_row() + steps.q0();
      const int64_t padded = padded_row(call, grad, batch, steps.head) + steps.q0();
      Mbarrier& full = smem.full[at.stage];
      mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // these were read
      mbarrier_arrive_expect_tx(
          full, 2 * STAGE_BYTES + 3 * sizeof(smem.row_M[0]) + sizeof(smem.coarse[0]) + MASK_BYTES);
#pragma unroll(BIAS ? 1 : BOXES)  // addresses of all at once leave none for a bias
      for (int b = 0; b < BOXES; ++b) {
        cp_async_bulk_tensor_4d(
            smem.Q[at.stage][b], Q_map, full, b * BOX_COLS, row, steps.head, entry);
        cp_async_bulk_tensor_4d(
            smem.dO[at.stage][b], dO_map, full, b * BOX_COLS, row, steps.head, entry);
      }
      cp_async_bulk(smem.row_M[at.stage], grad.row_M + padded, sizeof(smem.row_M[0]), full);
      cp_async_bulk(smem.delta[at.stage], grad.delta + padded, sizeof(smem.delta[0]), full);
      cp_async_bulk(
          smem.row_factor[at.stage], grad.row_factor + padded, sizeof(smem.row_factor[0]), full);
      cp_async_bulk(
          smem.coarse[at.stage], grad.coarse + padded / COARSE_ROWS, sizeof(smem.coarse[0]), full);
      copy_bits(smem, grad, at.stage, full, batch, steps.head, kv0, steps.q0());
      copy_bias_alone(smem, call, BIAS_MAP, bias_at.parity, batch, steps.head, kv0, steps.q0());
      bias_at.advance();
    }
    return;
  }

  // ---- the consumers: S3 to S6
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  const int half = warpgroup - 1;              // of the rows of a step, and of the columns
  const int key0 = warp_id() % 4 * 16;         // first key of this warp in the block
  const int key = kv0 + key0 + lane_id() / 4;  // this lane's keys: key, key + 8
  const int row0 = half * HALF_ROWS;           // first row of this warpgroup in the step
  const Descriptor K_rows = uniform(descriptor_k_major(smem.K[0]));
  const Descriptor V_rows = uniform(descriptor_k_major(smem.V[0]));
  const Descriptor Q_first = uniform(descriptor_k_major(&smem.Q[0][0][row0 * BOX_COLS]));
  const Descriptor dO_first = uniform(descriptor_k_major(&smem.dO[0][0][row0 * BOX_COLS]));
  const Descriptor Q_columns =
      uniform(descriptor_n_major(smem.Q[0][half * HALF_BOXES], BLOCK_Q * BOX_BYTES));
  const Descriptor dO_columns =
      uniform(descriptor_n_major(smem.dO[0][half * HALF_BOXES], BLOCK_Q * BOX_BYTES));
  const Descriptor P_rows = uniform(descriptor_k_major(smem.P));
  const Descriptor dS_rows = uniform(descriptor_k_major(smem.dS));
  // Address at which this lane stores the first 16 rows of P^T, swizzled like a box.
  const uint32_t P_corner = shared_address(&smem.P[key0 * BOX_COLS]) + lane_id() % 16 * BOX_BYTES +
                            ((lane_id() / 16 ^ lane_id() % 8) * 16 ^ half * 64);

  KeysBias<BIAS_KIND> bias(smem, key0, key, row0);
  float dK_acc[HALF_COLS / 2] = {}, dV_acc[HALF_COLS / 2] = {};  // [HALF_COLS / 8][4]
  float S_acc[HALF_ROWS / 2], dP_acc[HALF_ROWS / 2];             // [HALF_ROWS / 8][4]
  RingPosition<NUM_STAGES> at, next_at;                          // of the step being summed
  RingPosition<1> P_at;
  RowSteps next(p, grad, batch, first_head, last_head, kv0);
  int head, q0;  // of the step being summed; q0 includes row0

  // S3 scores, and dP, of the next step
  const auto start_scores = [&] {
    mbarrier_wait_parity(smem.full[next_at.stage], next_at.parity);  // Q and dO have arrived
    // NOTE: a weight of 0 does not silence a NaN in the rows of the next sequence.
    if (const int rows = p.len_q - next.q0(); VARLEN && rows < BLOCK_Q) {
      zero_rows<CONSUMER_THREADS>(smem.Q[next_at.stage], rows, BLOCK_Q);
      zero_rows<CONSUMER_THREADS>(smem.dO[next_at.stage], rows, BLOCK_Q);
      named_barrier_sync(1, CONSUMER_THREADS);  // both warpgroups multiply these rows
    }
    start_rows<BLOCK_KV, BLOCK_Q, HALF_ROWS>(
        S_acc, K_rows, Q_first.stage(next_at.stage, STAGE_BYTES));  // R9
    start_rows<BLOCK_KV, BLOCK_Q, HALF_ROWS>(
        dP_acc, V_rows, dO_first.stage(next_at.stage, STAGE_BYTES));  // R10
    next_at.advance();
  };
  const auto end_scores = [&] {
    wgmma_wait_group<0>();
    wgmma_use(S_acc);
    wgmma_use(dP_acc);
    head = next.head, q0 = next.q0() + row0;
    next.advance(p, grad, batch, last_head, kv0);
  };
  // S4 P and dS, for both warpgroups
  const auto exchange = [&] {
    const Scores scores(p, batch, head);
    bool placed = scores.are_placed(q0, HALF_ROWS, kv0 + key0, 16);
    if constexpr (BIAS_OF_OTHERS) placed &= q0 + HALF_ROWS <= p.len_q;
    if (BIAS) mbarrier_wait_parity(smem.bias_full, P_at.parity);  // the bias has arrived
    bias.load_boxed(smem, key0);
    if constexpr (!SOFTCAP) bias.add(S_acc, p.scale);
    uint32_t bits[2];
    load_bits(bits, smem, at.stage, key0, half);
    if (PLACES_IN_BITS && !placed) clear_by_place(bits, p, q0, key);
    uint32_t P_frag[HALF_ROWS / 16][4], dS_frag[HALF_ROWS / 16][4];
    const float *row_M = &smem.row_M[at.stage][row0], *delta = &smem.delta[at.stage][row0];
    // NOTE: with block masks the flags of all rows, or ptxas spills 12 bytes. Otherwise the flags
    // of this half, or it spills 172 bytes in packed sequences with a window.
    constexpr int FLAG_ROWS = BLOCK_MASK ? BLOCK_Q : HALF_ROWS;
    const int flag_row = BLOCK_MASK ? 0 : row0;
    if (any_coarse<FLAG_ROWS>(&smem.coarse[at.stage][flag_row / COARSE_ROWS]))
      weights_and_slopes<true>(
          scores, bias, S_acc, dP_acc, bits, row_M, delta, &smem.row_factor[at.stage][row0], q0,
          key, placed, P_frag, dS_frag);
    else
      weights_and_slopes<false>(
          scores, bias, S_acc, dP_acc, bits, row_M, delta, nullptr, q0, key, placed, P_frag,
          dS_frag);
    mbarrier_wait_parity(smem.P_empty, P_at.parity ^ 1);  // P and dS of the step before were read
#pragma unroll
    for (int k = 0; k < HALF_ROWS / 16; ++k) {
      stmatrix_x4(P_corner ^ k * 32, P_frag[k]);
      stmatrix_x4((P_corner ^ k * 32) + sizeof(smem.P), dS_frag[k]);
    }
    fence_proxy_async();
    __syncwarp();  // the warp's rows are complete, and its bias is added
    if (lane_id() == 0) mbarrier_arrive(smem.P_full);
    if (lane_id() == 0) bias.release(smem);
  };
  // S5 dV, dK
  const auto start_sums = [&] {
    mbarrier_wait_parity(smem.P_full, P_at.parity);  // P and dS of all rows are there
    start_half(dV_acc, P_rows, dO_columns.stage(at.stage, STAGE_BYTES));
    start_half(dK_acc, dS_rows, Q_columns.stage(at.stage, STAGE_BYTES));
  };
  const auto end_sums = [&] {
    wgmma_use(dV_acc);
    wgmma_use(dK_acc);
    if (lane_id() == 0) {
      mbarrier_arrive(smem.P_empty);
      mbarrier_arrive(smem.empty[at.stage]);
    }
    P_at.advance();
    at.advance();
  };

  if (next.head < last_head) {
    mbarrier_wait_parity(smem.KV_full, 0);  // K and V have arrived
    start_scores();
    end_scores();
    while (next.head < last_head) {
      exchange();
      start_sums();
      start_scores();
      wgmma_wait_group<2>();
      end_sums();
      end_scores();
    }
    exchange();
    start_sums();
    wgmma_wait_group<0>();
    end_sums();
  }

  // S6 store
  elem_t* dK = static_cast<elem_t*>(grad.dK)  // [len_kv, HEAD_DIM]
               + batch * grad.dK_stride.batch + head_kv * grad.dK_stride.head +
               sequences.first_key() * grad.dK_stride.len;
  elem_t* dV = static_cast<elem_t*>(grad.dV)  // [len_kv, HEAD_DIM]
               + batch * grad.dV_stride.batch + head_kv * grad.dV_stride.head +
               sequences.first_key() * grad.dV_stride.len;
  const int col = half * HALF_COLS;
  store_gradient(dV, grad.dV_stride.len, key, p.len_kv, col, dV_acc, 1.0f);     // R12
  store_gradient(dK, grad.dK_stride.len, key, p.len_kv, col, dK_acc, p.scale);  // R12
}
