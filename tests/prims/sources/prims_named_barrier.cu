// prims_named_barrier -- three warps take turns at one number, six times each: every turn is given by
// one warp, which does not wait, to the next, which does. Each dawdles in turn.
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/warp.cuh"

constexpr int WARPS = 3, ROUNDS = 6;

extern "C" __global__ void turns(const int* start,  // [1]
                                 int* seen) {       // [ROUNDS, 96]: the number in one's turn
  __shared__ int number;
  if (threadIdx.x == 0) number = *start;
  __syncthreads();  // the number is there before anyone counts
  const int warp = warp_id(), mine = 1 + warp, next = 1 + (warp + 1) % WARPS;
  if (warp == WARPS - 1) named_barrier_arrive(next, 2 * WARP_SIZE);  // the first warp begins
  for (int round = 0; round < ROUNDS; ++round) {
    if (round % WARPS == warp) __nanosleep(20000);
    named_barrier_sync(mine, 2 * WARP_SIZE);
    seen[round * blockDim.x + threadIdx.x] = number;
    __syncwarp();  // every lane has read
    if (lane_id() == 0) ++number;
    __syncwarp();  // the number is complete
    named_barrier_arrive(next, 2 * WARP_SIZE);
  }
  if (warp == 0) named_barrier_sync(mine, 2 * WARP_SIZE);  // the last turn given is nobody's
}
