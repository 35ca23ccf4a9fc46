// prims_gradient -- where rows lie that are padded, and the weight of a key from the log-sum-exp.
#include "prims/score/gradient.cuh"

// Of every batch entry and head, one thread each.
extern "C" __global__ void padded(
    const __grid_constant__ AttnParams given, const __grid_constant__ BackwardParams grad,
    const int* cu_seqlens,  // [batch + 1]
    int64_t* first) {       // [batch, heads]
  AttnParams call = given;
  call.cu_seqlens_q = cu_seqlens;
  first[threadIdx.x] = padded_row(call, grad, threadIdx.x / call.heads, threadIdx.x % call.heads);
}

extern "C" __global__ void weights(
    const float* S,    // [32]
    const float* lse,  // [32]
    float* M,          // [32]
    float* P) {        // [32]
  const int i = threadIdx.x;
  M[i] = row_maximum_from(lse[i]);
  P[i] = probability(S[i], 0.5f, M[i]);
}

extern "C" __global__ void rows(
    const float* from,  // [32]
    float* to) {        // [32]
  __shared__ alignas(16) float shared[16];
  load_rows_async<16>(shared, from + 4, threadIdx.x);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();  // the copies of all threads have come
  to[threadIdx.x] = threadIdx.x < 16 ? shared[threadIdx.x] : 0.0f;
}

// Of every block of keys, one thread each: the steps over the rows of the heads 1 and 2.
extern "C" __global__ void row_steps(
    const __grid_constant__ AttnParams p, const __grid_constant__ BackwardParams given,
    const int* kept_rows,  // [heads, kv_blocks, 1 + q_blocks]
    int* heads,            // [kv_blocks, 16]
    int* rows) {           // [kv_blocks, 16]
  BackwardParams grad = given;
  grad.kept_rows = kept_rows;
  const int kv0 = threadIdx.x * BLOCK_KV;
  int i = threadIdx.x * 16;
  for (RowSteps steps(p, grad, 0, 1, 3, kv0); steps.head < 3; steps.advance(p, grad, 0, 3, kv0)) {
    heads[i] = steps.head;
    rows[i++] = steps.q0();
  }
}
