// prims_rope -- rows of Q or K turned on their way to shared memory, ROWS_VALID of ROWS rows; what
// lies beyond is NaN in global memory and must be 0 in the tile.
#include "prims/io/rope.cuh"
#include "prims/instructions/warp.cuh"

constexpr int ROWS = 16, ROWS_VALID = 11, LD = HEAD_DIM + 1;

extern "C" __global__ void placed(const __grid_constant__ AttnParams given,
                                  const float* cos,  // [positions, ROPE_TABLE]
                                  const float* sin,  // [positions, ROPE_TABLE]
                                  const elem_t* X,   // [ROWS, HEAD_DIM], rows `stride` apart
                                  const int64_t* stride,
                                  float* tile) {     // [ROWS, LD]
  __shared__ float shared[ROWS * LD];
  AttnParams p = given;
  p.rope_cos = cos, p.rope_sin = sin;
  for (int i = thread_id(); i < ROWS * LD; i += NUM_THREADS) shared[i] = -1.0f;
  __syncthreads();  // the background is there before the tile covers it
  load_placed_f32<ROWS, LD>(shared, X, *stride, ROWS_VALID, p, p.rope_offset_q, thread_id());
  __syncthreads();  // the tile is complete
  for (int i = thread_id(); i < ROWS * LD; i += NUM_THREADS) tile[i] = shared[i];
}
