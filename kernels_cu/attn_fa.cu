// attn_fa -- fused attention with an online softmax.
//
// Idea         S and P never leave the SM. A row keeps only its running maximum M and its sum l;
//              alpha rescales its output when M grows.
// Differs from attn_unfused: its three kernels are steps S3, S4 and S5 of one loop over keys.
// Kept simple  float32 everywhere. S is a tile in shared memory that all threads access. So there
//              is a barrier between any two steps. In S4 one thread walks each row.
// Rounding     R2 FMA chain over HEAD_DIM, R3 softcap and bias, R4 exp2, R6 alpha, l and the FMA
//              chain over keys, R7 times 1/l and store (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/io/finite.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/io/rope.cuh"
#include "prims/score/score.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int LD = HEAD_DIM | 1;  // odd row length: a column of K falls into 32 different banks

struct SharedStorage {
  float Q[BLOCK_Q * HEAD_DIM];
  float K[BLOCK_KV * LD];
  float V[BLOCK_KV * HEAD_DIM];
  float S[BLOCK_Q * (BLOCK_KV + 1)];  // scores, then probabilities; odd rows for S4
  float alpha[BLOCK_Q];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

static_assert(
    BLOCK_Q <= NUM_THREADS, "BLOCK_Q must be at most NUM_THREADS: S4 takes a thread per row");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa(
    const __grid_constant__ AttnParams call) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = blockIdx.x % q_blocks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [len_q, HEAD_DIM], from row q0
                    + batch * p.Q_stride.batch + head * p.Q_stride.head + q0 * p.Q_stride.len;
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM]
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM]
                    + batch * p.V_stride.batch + head_kv * p.V_stride.head;
  elem_t* O = static_cast<elem_t*>(p.O)  // [len_q, HEAD_DIM], from row q0
              + batch * p.O_stride.batch + head * p.O_stride.head + q0 * p.O_stride.len;
  const Scores scores(p, batch, head);

  // S1 load Q
  load_placed_f32<BLOCK_Q, HEAD_DIM>(
      smem.Q, Q, p.Q_stride.len, p.len_q - q0, p, q0 + p.rope_offset_q, thread_id());

  RowState state;  // of row thread_id(), in the first BLOCK_Q threads
  constexpr int ELEMENTS = ceil_div(BLOCK_Q * HEAD_DIM, NUM_THREADS);  // of O, per thread
  float O_acc[ELEMENTS] = {};
  const KeptKeys keys(p, batch, head, q0, kv_begin(p, q0), kv_end(p, q0, BLOCK_Q));
  for (int number = round_down(keys.begin, BLOCK_KV); number < keys.end; number += BLOCK_KV) {
    const int kv0 = keys.key(number);
    __syncthreads();  // the previous V tile and probabilities are no longer read
    // S2 load K, V
    load_placed_f32<BLOCK_KV, LD>(
        smem.K, K + kv0 * p.K_stride.len, p.K_stride.len, p.len_kv - kv0, p, kv0, thread_id());
    load_tile_f32<BLOCK_KV, HEAD_DIM, HEAD_DIM, VEC>(
        smem.V, V + kv0 * p.V_stride.len, p.V_stride.len, p.len_kv - kv0, thread_id());
    __syncthreads();  // Q, K, V tiles visible to the whole block

    // S3 scores
    for (int i = thread_id(); i < BLOCK_Q * BLOCK_KV; i += NUM_THREADS) {
      const int row = i / BLOCK_KV, key = i % BLOCK_KV;
      float s = 0.0f;
#pragma unroll 8
      for (int d = 0; d < HEAD_DIM; ++d)
        s = fmaf(smem.Q[row * HEAD_DIM + d], smem.K[key * LD + d], s);  // R2

      if constexpr (NATURAL_SCORES) s = scores.of(s * p.scale, q0 + row, kv0 + key);  // R3
      smem.S[row * (BLOCK_KV + 1) + key] = scores.admit(q0 + row, kv0 + key) ? s : NEG_INF;
    }
    __syncthreads();  // the rows of S are complete

    // S4 softmax
    if (thread_id() < BLOCK_Q) {
      float* S = smem.S + thread_id() * (BLOCK_KV + 1);  // [BLOCK_KV]
      float m = NEG_INF;
      for (int key = 0; key < BLOCK_KV; ++key) m = fmaxf(m, S[key]);
      m = row_maximum_of_any_size(m, p.scale_log2);
      smem.alpha[thread_id()] = state.advance(m);
      const float M = state.M_finite();
      for (int key = 0; key < BLOCK_KV; ++key) {
        S[key] = ex2_approx_ftz(exponent(S[key], p.scale_log2, -M, true));  // R4
        state.l += S[key];                                                  // R6
      }
    }
    __syncthreads();  // P and alpha visible to the whole block

    // S5 output
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const int i = min(thread_id() + e * NUM_THREADS, BLOCK_Q * HEAD_DIM - 1);
      const int row = i / HEAD_DIM, d = i % HEAD_DIM;
      O_acc[e] *= smem.alpha[row];  // R6
#pragma unroll 8
      for (int key = 0; key < BLOCK_KV; ++key)
        O_acc[e] =
            fmaf(smem.S[row * (BLOCK_KV + 1) + key], smem.V[key * HEAD_DIM + d], O_acc[e]);  // R6
    }
  }

  // S6 store
  __syncthreads();  // the last alpha is no longer read
  if (thread_id() < BLOCK_Q) {
    smem.alpha[thread_id()] = state.inverse_l();
    if constexpr (LSE)
      if (q0 + thread_id() < p.len_q) lse_of(p, batch_head, head)[q0 + thread_id()] = state.lse();
  }
  __syncthreads();  // 1 / l, in the place of alpha, visible to the whole block
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) {
    const int i = thread_id() + e * NUM_THREADS, row = i / HEAD_DIM, d = i % HEAD_DIM;
    if (i < BLOCK_Q * HEAD_DIM && q0 + row < p.len_q)
      O[row * p.O_stride.len + d] = from_sum<elem_t>(O_acc[e] * smem.alpha[row]);  // R7
  }
}
