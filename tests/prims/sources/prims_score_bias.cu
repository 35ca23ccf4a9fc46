// prims_score_bias -- a bias added to the scores of a step: from boxes in shared memory, by rows;
// and which scores a bias in memory admits.
#include "prims/score/score_bias.cuh"

constexpr int ROWS = 16, BOX_BYTES = BIAS_BOXES * BIAS_BOX_PITCH;

// Index in [BLOCK_Q, BLOCK_KV] of score i of a lane.
__device__ int place(int i) {
  const int row = warp_id() * ROWS + lane_id() / 4 + i / 2 % 2 * 8;
  return row * BLOCK_KV + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
}

extern "C" __global__ void from_boxes(
    const float* factor,   // [1]
    const uint8_t* boxes,  // [BOX_BYTES], as they lie in shared memory
    const float* x,        // [BLOCK_Q, BLOCK_KV]
    float* S) {            // [BLOCK_Q, BLOCK_KV]
  __shared__ alignas(1024) uint8_t shared[BOX_BYTES];
  for (int i = thread_id(); i < BOX_BYTES; i += NUM_THREADS) shared[i] = boxes[i];
  __syncthreads();  // the boxes are complete
  float S_acc[BLOCK_KV / 2];
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i) S_acc[i] = x[place(i)];
  if constexpr (BIAS_KIND == BiasKind::KEYS)
    add_key_bias<bias_t>(S_acc, shared, *factor);
  else
    add_dense_bias<bias_t>(S_acc, shared, warp_id() * ROWS, *factor);
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i) S[place(i)] = S_acc[i];
}

extern "C" __global__ void by_rows(
    const float* factor,  // [1]
    const float* bias,    // [BLOCK_Q]
    const float* x,       // [BLOCK_Q, BLOCK_KV]
    float* S) {           // [BLOCK_Q, BLOCK_KV]
  const int row = warp_id() * ROWS + lane_id() / 4;
  const float own[2] = {bias[row], bias[row + 8]};
  float S_acc[BLOCK_KV / 2];
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i) S_acc[i] = x[place(i)];
  add_row_bias(S_acc, own, *factor);
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i) S[place(i)] = S_acc[i];
}

// Of batch entry 1 and head 2, from row 0 on. Rows and keys past the end read nothing.
extern "C" __global__ void in_memory(
    const __grid_constant__ AttnParams given,
    const bias_t* bias,  // [2, 3, len_q, len_kv], strided
    const int32_t* kv0,  // [1]
    uint32_t* bits) {    // [NUM_THREADS, 2]
  AttnParams p = given;
  p.bias = bias;
  uint32_t own[2];
  BiasInMemory(p, 1, 2).admitted(own, warp_id() * ROWS + lane_id() / 4, *kv0);
  bits[thread_id() * 2] = own[0], bits[thread_id() * 2 + 1] = own[1];
}
