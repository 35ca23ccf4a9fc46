// prims_cluster -- blocks of a cluster write a row each and read those of all others, four floats
// or two at a time.
#include "prims/instructions/cluster.cuh"

extern "C" __global__ CLUSTER_OF_SPLITS void rows_of_others(
    const float* x,  // [clusters, SPLITS, 64, 4]
    float* y) {      // [clusters, SPLITS (who read), SPLITS (whose), 64, 4]
  __shared__ alignas(16) float row[64][4];
  for (int i = 0; i < 4; ++i) row[threadIdx.x][i] = x[(blockIdx.x * 64 + threadIdx.x) * 4 + i];
  cluster_sync();  // the rows of all blocks are visible
  for (int other = 0; other < SPLITS; ++other) {
    const Vec<float, 4> found = load_from_block(row[63 - threadIdx.x], other);
    for (int i = 0; i < 4; ++i)
      y[((blockIdx.x * SPLITS + other) * 64 + threadIdx.x) * 4 + i] = found.v[i];
  }
  cluster_sync();  // nobody reads this block's row any more
}

extern "C" __global__ CLUSTER_OF_SPLITS void pairs_of_others(
    const float* x,  // [clusters, SPLITS, 64, 2]
    float* y) {      // [clusters, SPLITS (who read), SPLITS (whose), 64, 2]
  __shared__ alignas(8) float row[64][2];
  for (int i = 0; i < 2; ++i) row[threadIdx.x][i] = x[(blockIdx.x * 64 + threadIdx.x) * 2 + i];
  cluster_sync();  // the rows of all blocks are visible
  for (int other = 0; other < SPLITS; ++other) {
    const Vec<float, 2> found = load_from_block(row[63 - threadIdx.x], other);
    for (int i = 0; i < 2; ++i)
      y[((blockIdx.x * SPLITS + other) * 64 + threadIdx.x) * 2 + i] = found.v[i];
  }
  cluster_sync();  // nobody reads this block's row any more
}
