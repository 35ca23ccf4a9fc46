// compile_add -- the smallest module with everything that `cupyattn.compiler` reads from one: a header, a
// macro, shared memory declared by the kernel, a contract.
#include "compile_add.cuh"

static_assert(CFG_COUNT % 32 == 0, "COUNT must be a multiple of 32: a warp adds whole rows");

struct SharedStorage {
  float row[CFG_COUNT];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

extern "C" __global__ void add(const float* x, float* y) {  // (CFG_COUNT), (CFG_COUNT)
  extern __shared__ float row[];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();  // the row is complete before any thread reads its neighbour
  y[threadIdx.x] = row[(threadIdx.x + 1) % CFG_COUNT] + ADDEND;
}
