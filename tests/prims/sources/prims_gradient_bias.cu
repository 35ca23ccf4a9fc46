// prims_gradient_bias -- a bias added to scores whose rows are keys, or query rows: from boxes in
// shared memory, or from memory if all query rows share it.
#include "prims/score/gradient_bias.cuh"

struct Nothing {};
using Storage = BiasedStorage<Nothing, BIAS_BYTES>;

// Index in [BLOCK_KV, BLOCK_Q] of score i of a lane.
__device__ int place(int i) {
  const int key = warp_id() * 16 + lane_id() / 4 + i / 2 % 2 * 8;
  return key * BLOCK_Q + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
}

// Adds the bias of batch entry 1 and head 2.
__device__ void add(const AttnParams& p, const Storage& smem, const float* x, float* S) {
  const int key0 = warp_id() * 16;
  KeysBias<BIAS_KIND> bias(smem, key0, key0 + lane_id() / 4);
  float S_acc[BLOCK_Q / 2];
#pragma unroll
  for (int i = 0; i < BLOCK_Q / 2; ++i) S_acc[i] = x[place(i)];
  bias.load(p, 1, 2);
  bias.add(S_acc, p.scale);
#pragma unroll
  for (int i = 0; i < BLOCK_Q / 2; ++i) S[place(i)] = S_acc[i];
}

extern "C" __global__ void from_boxes(
    const __grid_constant__ AttnParams p,
    const uint8_t* boxes,  // [BIAS_BYTES], as they lie in shared memory
    const float* x,        // [BLOCK_KV, BLOCK_Q]
    float* S) {            // [BLOCK_KV, BLOCK_Q]
  __shared__ Storage smem;
  if constexpr (BOXED_BIAS) {
    uint8_t* shared = reinterpret_cast<uint8_t*>(&smem);
    for (int i = thread_id(); i < BIAS_BYTES; i += NUM_THREADS) shared[i] = boxes[i];
    __syncthreads();  // the boxes are complete
  }
  add(p, smem, x, S);
}

extern "C" __global__ void from_memory(
    const __grid_constant__ AttnParams given,
    const bias_t* bias,  // [2, 3, 1, len_kv], strided
    const float* x,      // [BLOCK_KV, BLOCK_Q]
    float* S) {          // [BLOCK_KV, BLOCK_Q]
  __shared__ Storage smem;
  AttnParams p = given;
  p.bias = bias;
  add(p, smem, x, S);
}

// Index in [BLOCK_Q, BLOCK_KV] of the first score of pair i of a lane.
__device__ int place_of_pair(int i) {
  const int row = warp_id() * 16 + lane_id() / 4 + i % 2 * 8;
  return row * BLOCK_KV + i / 2 * 8 + lane_id() % 4 * 2;
}

// The same for scores whose rows are query rows.
extern "C" __global__ void rows_from_boxes(
    const __grid_constant__ AttnParams p,
    const uint8_t* boxes,  // [BIAS_BYTES], as they lie in shared memory
    const float* x,        // [BLOCK_Q, BLOCK_KV]
    float* S) {            // [BLOCK_Q, BLOCK_KV]
  __shared__ Storage smem;
  uint8_t* shared = reinterpret_cast<uint8_t*>(&smem);
  for (int i = thread_id(); i < BIAS_BYTES; i += NUM_THREADS) shared[i] = boxes[i];
  __syncthreads();  // the boxes are complete
  const RowsBias<BIAS_KIND> bias(shared, warp_id() * 16);
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 4; ++i) {
    const Vec<float, 2> b = bias.pair(i);
    const int at = place_of_pair(i);
    for (int j = 0; j < 2; ++j) S[at + j] = biased_score(x[at + j], p.scale, b.v[j]);
  }
}

// The same for scores whose rows are keys, and a bias of keys.
extern "C" __global__ void keys_from_boxes(
    const __grid_constant__ AttnParams p,
    const uint8_t* boxes,  // [BIAS_BYTES], as they lie in shared memory
    const float* x,        // [BLOCK_KV, BLOCK_Q]
    float* S) {            // [BLOCK_KV, BLOCK_Q]
  __shared__ Storage smem;
  if constexpr (BOXED_BIAS) {
    uint8_t* shared = reinterpret_cast<uint8_t*>(&smem);
    for (int i = thread_id(); i < BIAS_BYTES; i += NUM_THREADS) shared[i] = boxes[i];
    __syncthreads();  // the boxes are complete
    const int key0 = warp_id() * 16;
    KeysBias<BIAS_KIND> bias(smem, key0, key0 + lane_id() / 4);
    bias.load_boxed(smem, key0);
    float S_acc[BLOCK_Q / 2];
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 2; ++i) S_acc[i] = x[place(i)];
    bias.add(S_acc, p.scale);
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 2; ++i) S[place(i)] = S_acc[i];
  }
}
