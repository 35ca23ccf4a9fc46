// prims_cluster -- blocks of a cluster write a row each and read those of all others, four floats
// or two at a time, or each block passes its rows on to the next.
#include "prims/instructions/cluster.cuh"
#include "prims/instructions/tma.cuh"

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

// Rows by the copy engine, one after the other through the same place. A block stores its next row
// when the block behind it has read the last one.
constexpr int ROWS = 3;
extern "C" __global__ CLUSTER_OF_SPLITS void rows_passed_on(
    const float* x,  // [clusters, SPLITS, ROWS, 64]
    float* y) {      // [clusters, SPLITS (who received), ROWS, 64], each reversed
  __shared__ alignas(16) float row[SPLITS][64];  // by the block that stored it
  __shared__ Mbarrier full, empty;
  const int rank = blockIdx.x % SPLITS, next = (rank + 1) % SPLITS, before = (rank + 3) % SPLITS;
  const int i = threadIdx.x;
  if (i == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 1);
    fence_mbarrier_init();
  }
  cluster_sync();  // the barriers of all blocks are initialised
  for (int r = 0; r < ROWS; ++r) {
    mbarrier_wait_parity(empty, r % 2 ^ 1);  // the next block has read the row before
    row[rank][i] = x[(blockIdx.x * ROWS + r) * 64 + i];
    fence_proxy_async();
    __syncthreads();  // the row is complete
    if (i == 0) {
      mbarrier_arrive_expect_tx(full, sizeof(row[0]));
      cp_async_bulk_to_block(row[rank], sizeof(row[0]), full, next);
    }
    mbarrier_wait_parity(full, r % 2);  // the row of the block before is there
    y[(blockIdx.x * ROWS + r) * 64 + i] = row[before][63 - i];
    __syncthreads();  // all threads have read it
    if (i == 0) mbarrier_arrive_in_block(empty, before);
  }
  cluster_sync();  // no block arrives here any more
}
