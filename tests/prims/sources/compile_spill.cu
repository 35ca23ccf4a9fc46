// compile_spill -- 128 live values under a launch bound that leaves 32 registers: ptxas must spill.
// add_static beside it takes static shared memory and spills nothing.
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x) {
  float value[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) value[i] = x[i * threadIdx.x];
  __syncthreads();  // all loads come before any store
#pragma unroll
  for (int i = 0; i < 128; ++i) x[i * threadIdx.x + 7] = value[127 - i] * value[i];
}

extern "C" __global__ void add_static(float* x) {
  __shared__ float row[64];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();  // the row is complete before any thread reads its neighbour
  x[threadIdx.x] += row[threadIdx.x ^ 1];
}
