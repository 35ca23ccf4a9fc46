// Kernels that run the primitives of prims/io/finite.cuh alone.
#include "prims/io/finite.cuh"

// A thread's eight numbers, rounded one by one and in pairs.
extern "C" __global__ void sums(const float* x, __half* alone, uint32_t* packed) {
  float own[8];
  uint32_t pairs[2][2];
  for (int i = 0; i < 8; ++i) own[i] = x[threadIdx.x * 8 + i];
  pack_sums<__half>(pairs, own);
  for (int i = 0; i < 8; ++i) alone[threadIdx.x * 8 + i] = from_sum<__half>(own[i]);
  for (int i = 0; i < 4; ++i) packed[threadIdx.x * 4 + i] = pairs[i / 2][i % 2];
}
