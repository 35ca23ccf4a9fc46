// prims_tma -- boxes of an array by the copy engine, and what they look like in shared memory:
// swizzled over 128 bytes, zeros for what lies outside the array.
#include "prims/instructions/cluster.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"

constexpr int BOXES = 7, ROWS = 16, BOX_BYTES = ROWS * 128;

extern "C" __global__ void boxes(const __grid_constant__ TensorMap X_map,
                                 const int* at,  // [BOXES, 4]: column, row, head, batch
                                 uint8_t* tile,  // [BOXES, BOX_BYTES]
                                 int* elected) { // [1], lanes that elect_sync chose
  __shared__ alignas(1024) uint8_t shared[BOXES * BOX_BYTES];
  __shared__ Mbarrier full;
  const int lane = lane_id();
  for (int i = lane; i < BOXES * BOX_BYTES; i += WARP_SIZE) shared[i] = 0xff;
  fence_proxy_async();
  if (lane == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();  // background and barrier are there before the copies start
  const bool chosen = elect_sync();
  const unsigned who = __ballot_sync(FULL_WARP, chosen);
  if (lane == 0) *elected = __popc(who);
  if (chosen) {
    mbarrier_arrive_expect_tx(full, BOXES * BOX_BYTES);  // one phase for all of them
    for (int b = 0; b < BOXES; ++b)
      cp_async_bulk_tensor_4d(
          shared + b * BOX_BYTES, X_map, full, at[4 * b], at[4 * b + 1], at[4 * b + 2], at[4 * b + 3]);
  }
  mbarrier_wait_parity(full, 0);  // every box has arrived
  for (int i = lane; i < BOXES * BOX_BYTES; i += WARP_SIZE) tile[i] = shared[i];
}

// The same to both blocks of a cluster, each of which copies every other box.
extern "C" __global__ CLUSTER_OF_SPLITS void boxes_to_both(
    const __grid_constant__ TensorMap X_map,
    const int* at,    // [BOXES, 4]: column, row, head, batch
    uint8_t* tile) {  // [2, BOXES, BOX_BYTES], of either block
  __shared__ alignas(1024) uint8_t shared[BOXES * BOX_BYTES];
  __shared__ Mbarrier full;
  const int lane = lane_id(), rank = blockIdx.x;
  for (int i = lane; i < BOXES * BOX_BYTES; i += WARP_SIZE) shared[i] = 0xff;
  fence_proxy_async();
  if (lane == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  cluster_sync();  // background and barrier of both blocks are there before the copies start
  if (lane == 0) {
    mbarrier_arrive_expect_tx(full, BOXES * BOX_BYTES);  // from both blocks
    for (int b = rank; b < BOXES; b += 2)
      cp_async_bulk_tensor_4d_multicast(
          shared + b * BOX_BYTES, X_map, full, at[4 * b], at[4 * b + 1], at[4 * b + 2],
          at[4 * b + 3], 3);
  }
  mbarrier_wait_parity(full, 0);  // every box has arrived
  for (int i = lane; i < BOXES * BOX_BYTES; i += WARP_SIZE)
    tile[rank * BOXES * BOX_BYTES + i] = shared[i];
  cluster_sync();  // no copy comes here any more
}

// The other way: boxes as they lie in shared memory, to an array. None begins before it.
extern "C" __global__ void stores(const __grid_constant__ TensorMap Y_map,
                                  const int* at,           // [BOXES, 4]: column, row, head, batch
                                  const uint8_t* tile) {   // [BOXES, BOX_BYTES]
  __shared__ alignas(1024) uint8_t shared[BOXES * BOX_BYTES];
  const int lane = lane_id();
  for (int i = lane; i < BOXES * BOX_BYTES; i += WARP_SIZE) shared[i] = tile[i];
  fence_proxy_async();
  __syncthreads();  // the boxes are complete
  if (lane == 0) {
    for (int b = 0; b < BOXES; ++b)
      cp_async_bulk_tensor_4d_store(
          Y_map, shared + b * BOX_BYTES, at[4 * b], at[4 * b + 1], at[4 * b + 2], at[4 * b + 3]);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read();
  }
  __syncthreads();  // all of them have been read
  for (int i = lane; i < BOXES * BOX_BYTES; i += WARP_SIZE) shared[i] = 0xff;
}

// Bytes that lie side by side: elements 8 to 47 of 64, to the place of element 4.
extern "C" __global__ void bytes(const float* from,  // [64]
                                 float* to) {        // [64]
  __shared__ alignas(16) float shared[64];
  __shared__ Mbarrier full;
  const int lane = lane_id();
  for (int i = lane; i < 64; i += WARP_SIZE) shared[i] = -1.0f;
  fence_proxy_async();
  if (lane == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();  // background and barrier are there before the copy starts
  if (lane == 0) {
    mbarrier_arrive_expect_tx(full, 160);
    cp_async_bulk(shared + 4, from + 8, 160, full);
  }
  mbarrier_wait_parity(full, 0);  // the bytes have arrived
  for (int i = lane; i < 64; i += WARP_SIZE) to[i] = shared[i];
}
