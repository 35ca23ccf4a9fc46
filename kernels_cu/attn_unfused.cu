// attn_unfused -- attention by its definition, a kernel a line: S = Q K^T, P = softmax(S), O = P V.
//
// Idea         The definition. S and P are in global memory, so each step can be examined.
// Differs from nothing: this is the first rung.
// Kept simple  float32 everywhere; a thread computes whole elements; tiles without prefetch.
// Memory       4 batch heads len_q len_kv bytes for S, overwritten by P. VARLEN: with the longest
//              lengths, even for shorter sequences.
// Rounding     R2 FMA chain over HEAD_DIM, R3 S times scale, softcap and bias, R4 exp2, R6 sum
//              of a row, P / l and the FMA chain over keys, R7 store (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/io/rope.cuh"
#include "prims/score/score.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int LD = HEAD_DIM | 1;  // odd row length: a column of K falls into 32 different banks

union SharedStorage {  // one or the other, by kernel
  struct {
    float Q[BLOCK_Q * HEAD_DIM];
    float K[BLOCK_KV * LD];
  } scores;
  struct {
    float P[BLOCK_Q * BLOCK_KV];
    float V[BLOCK_KV * HEAD_DIM];
  } weighted_sum;
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

// S = scale Q K^T, -inf where masked. One block per tile of S.
extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_unfused_scores(
    const __grid_constant__ AttnParams call) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = reinterpret_cast<SharedStorage*>(shared_bytes)->scores;

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int kv_blocks = ceil_div(call.len_kv, BLOCK_KV);
  const int kv0 = blockIdx.x % kv_blocks * BLOCK_KV;
  const int q0 = blockIdx.x / kv_blocks % q_blocks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / kv_blocks / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && (q0 >= p.len_q || kv0 >= p.len_kv)) return;
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [len_q, HEAD_DIM], from row q0
                    + batch * p.Q_stride.batch + head * p.Q_stride.head + q0 * p.Q_stride.len;
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM], from row kv0
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head + kv0 * p.K_stride.len;
  float* S = call.S + batch_head * call.len_q * call.len_kv;  // [len_q, len_kv]
  const Scores scores(p, batch, head);
  const KeptKeys keys(p, batch, head, q0, 0, p.len_kv);
  if (!keys.include(kv0)) {  // neither loaded nor multiplied
    for (int i = thread_id(); i < BLOCK_Q * BLOCK_KV; i += NUM_THREADS) {
      const int row = q0 + i / BLOCK_KV, key = kv0 + i % BLOCK_KV;
      if (row < p.len_q && key < p.len_kv) S[int64_t(row) * call.len_kv + key] = NEG_INF;
    }
    return;
  }

  // S1 load Q, S2 load K
  load_placed_f32<BLOCK_Q, HEAD_DIM>(
      smem.Q, Q, p.Q_stride.len, p.len_q - q0, p, q0 + p.rope_offset_q, thread_id());
  load_placed_f32<BLOCK_KV, LD>(smem.K, K, p.K_stride.len, p.len_kv - kv0, p, kv0, thread_id());
  __syncthreads();  // Q, K tiles visible to the whole block

  // S3 scores
  for (int i = thread_id(); i < BLOCK_Q * BLOCK_KV; i += NUM_THREADS) {
    const int row = i / BLOCK_KV, key = i % BLOCK_KV;
    float s = 0.0f;
#pragma unroll 8
    for (int d = 0; d < HEAD_DIM; ++d)
      s = fmaf(smem.Q[row * HEAD_DIM + d], smem.K[key * LD + d], s);  // R2
    if (q0 + row < p.len_q && kv0 + key < p.len_kv)
      S[int64_t(q0 + row) * call.len_kv + kv0 + key] =
          scores.admit(q0 + row, kv0 + key) ? scores.of(s * p.scale, q0 + row, kv0 + key)  // R3
                                            : NEG_INF;
  }
}

// From here on a largest score stays in natural units.
constexpr float LARGEST_IN_LOG2 = 0x1p126f;

// P = softmax(S) in place, and lse. One warp per row.
extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_unfused_softmax(
    const __grid_constant__ AttnParams call) {
  // S0 locate
  const int row_blocks = ceil_div(call.len_q, NUM_WARPS);
  const int row = blockIdx.x % row_blocks * NUM_WARPS + warp_id();
  const int64_t batch_head = blockIdx.x / row_blocks;
  const auto& p = of_batch(call, batch_head / call.heads);
  if (row >= p.len_q) return;
  float* S = call.S + (batch_head * call.len_q + row) * call.len_kv;  // [len_kv]

  // S4 softmax: the whole row is known, so its maximum is final
  RowState state;
  float m = NEG_INF;
  for (int key = lane_id(); key < p.len_kv; key += WARP_SIZE) m = fmaxf(m, S[key]);
  m = shfl_max<WARP_SIZE>(m);
  // NOTE: log2(e) times the largest score may overflow, as a caller's S may hold finfo.min.
  const bool natural = !NATURAL_SCORES && m != NEG_INF && fabsf(m) >= LARGEST_IN_LOG2;
  state.M = natural ? m : row_maximum_of_any_size(m, LOG2E);
  const float M = state.M_finite();
  float l = 0.0f;
  for (int key = lane_id(); key < p.len_kv; key += WARP_SIZE) {
    const float x = natural ? (S[key] - M) * LOG2E : exponent(S[key], LOG2E, -M, true);
    const float e = ex2_approx_ftz(x);  // R4
    S[key] = e;
    l += e;  // R6
  }
  state.l = shfl_sum<WARP_SIZE>(l);
  const float inverse_l = state.inverse_l();
  for (int key = lane_id(); key < p.len_kv; key += WARP_SIZE) S[key] *= inverse_l;  // R6: now P
  if constexpr (LSE)
    if (lane_id() == 0)
      lse_of(p, batch_head, batch_head % call.heads)[row] =
          natural ? fmaf(log2f(state.l), LN2, M) : state.lse();
}

// O = P V. One block per tile of query rows.
extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_unfused_weighted_sum(
    const __grid_constant__ AttnParams call) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = reinterpret_cast<SharedStorage*>(shared_bytes)->weighted_sum;

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = blockIdx.x % q_blocks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const float* P = call.S  // [len_q, len_kv], from row q0
                   + (batch_head * call.len_q + q0) * call.len_kv;
  const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM]
                    + batch * p.V_stride.batch + head_kv * p.V_stride.head;
  elem_t* O = static_cast<elem_t*>(p.O)  // [len_q, HEAD_DIM], from row q0
              + batch * p.O_stride.batch + head * p.O_stride.head + q0 * p.O_stride.len;
  const KeptKeys keys(p, batch, head, q0, 0, p.len_kv);

  constexpr int ELEMENTS = ceil_div(BLOCK_Q * HEAD_DIM, NUM_THREADS);  // of O, per thread
  float O_acc[ELEMENTS] = {};
  for (int number = keys.begin; number < keys.end; number += BLOCK_KV) {
    const int kv0 = keys.key(number);
    __syncthreads();  // the previous P, V tiles are no longer read
    // S2 load P, V
    load_tile_f32<BLOCK_KV, HEAD_DIM, HEAD_DIM, VEC>(
        smem.V, V + kv0 * p.V_stride.len, p.V_stride.len, p.len_kv - kv0, thread_id());
    for (int i = thread_id(); i < BLOCK_Q * BLOCK_KV; i += NUM_THREADS) {
      const int row = i / BLOCK_KV, key = i % BLOCK_KV;
      const bool valid = q0 + row < p.len_q && kv0 + key < p.len_kv;
      smem.P[i] = valid ? P[int64_t(row) * call.len_kv + kv0 + key] : 0.0f;
    }
    __syncthreads();  // P, V tiles visible to the whole block

    // S5 output
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const int i = min(thread_id() + e * NUM_THREADS, BLOCK_Q * HEAD_DIM - 1);
      const int row = i / HEAD_DIM, d = i % HEAD_DIM;
#pragma unroll 8
      for (int key = 0; key < BLOCK_KV; ++key)
        O_acc[e] = fmaf(smem.P[row * BLOCK_KV + key], smem.V[key * HEAD_DIM + d], O_acc[e]);  // R6
    }
  }

  // S6 store
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) {
    const int i = thread_id() + e * NUM_THREADS, row = i / HEAD_DIM, d = i % HEAD_DIM;
    if (i < BLOCK_Q * HEAD_DIM && q0 + row < p.len_q)
      O[row * p.O_stride.len + d] = from_float<elem_t>(O_acc[e]);  // R7
  }
}
