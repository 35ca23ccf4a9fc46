// prims_config -- what the CFG_* macros become, and the conversions of the storage type.
#include "prims/config.cuh"

extern "C" __global__ void config(const float* x,   // [64]
                                  int* constants,   // [21]
                                  float* rounded) { // [64]
  const int values[] = {BLOCK_Q, BLOCK_KV, NUM_WARPS, NUM_STAGES, NUM_THREADS, WARP_Q, HEAD_DIM,
                        CAUSAL, LSE, VEC, GROUP_Q, GROUP_KV, WINDOW, SOFTCAP, MASK, BIAS,
                        NATURAL_SCORES, sizeof(bias_t), ROPE, ROPE_INTERLEAVED, VARLEN};
  if (threadIdx.x < 21) constants[threadIdx.x] = values[threadIdx.x];
  rounded[threadIdx.x] = to_float(from_float<elem_t>(x[threadIdx.x]));
}
