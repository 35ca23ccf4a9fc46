// backward_weights -- the gradient of the weights of normalised rows, from the sums of blocks.
//
// Idea         A block has 32 channels of one vector of weights, a lane for each. Warps share the
//              sums of blocks out, and are added up last: one order, the same bits on every run.
// Kept simple  Few blocks: the sums are HEAD_DIM numbers for every BLOCK_Q rows.
// Rounding     R14 float32 sums, store
// Mirror       cupyattn.gradients.prepared.back_mirror
// Bound        cupyattn.gradients.prepared.back_bound
#include "prims/config.cuh"
#include "prims/instructions/warp.cuh"

struct WeightSumParams {
  const float* partial_dW;  // [batch, heads, chunks, HEAD_DIM]
  void* dW;                 // [vectors, HEAD_DIM] of bias_t, the type of the weights
  int32_t batch;
  int32_t heads;
  int32_t chunks;
  int32_t vectors;  // heads, or 1 for all
};

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_weights(
    const __grid_constant__ WeightSumParams p) {
  __shared__ float sums[NUM_WARPS][WARP_SIZE];
  const int column_blocks = ceil_div(HEAD_DIM, WARP_SIZE);
  const int vector = blockIdx.x / column_blocks;
  const int col = blockIdx.x % column_blocks * WARP_SIZE + lane_id();
  const int64_t run = p.vectors == 1 ? int64_t(p.heads) * p.chunks : p.chunks;  // sums in a row
  const int64_t stride = int64_t(p.heads) * p.chunks;                           // of a batch entry
  float sum = 0.0f;
  if (col < HEAD_DIM)
    for (int64_t i = warp_id(); i < p.batch * run; i += NUM_WARPS) {
      const int64_t at = i / run * stride + vector * run + i % run;
      sum += p.partial_dW[at * HEAD_DIM + col];  // R14
    }
  sums[warp_id()][lane_id()] = sum;
  __syncthreads();  // sums are visible
  if (warp_id() != 0 || col >= HEAD_DIM) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < NUM_WARPS; ++i) sum += sums[i][lane_id()];                  // R14
  static_cast<bias_t*>(p.dW)[vector * HEAD_DIM + col] = from_float<bias_t>(sum);  // R14
}
