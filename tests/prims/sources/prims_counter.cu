// prims_counter -- warps that come one after the other, the last of the block first, by a counter
// and by the sums that they publish.
#include "prims/schedule/counter.cuh"

extern "C" __global__ void turns(
    int32_t* counter,  // [1]
    int32_t* written,  // [1]
    int32_t* order) {  // [8], the places of the warps as they came
  const int place = 7 - threadIdx.x / 32;
  if (threadIdx.x % 32) return;
  await_count(counter, place);
  order[atomicAdd(written, 1)] = place;
  red_release_add(counter, 1);
}

extern "C" __global__ void sums(uint64_t* published) {  // [8], of the places up to each
  const int place = 7 - threadIdx.x / 32;
  if (threadIdx.x % 32) return;
  const float before = place == 0 ? 0.0f : await_published(&published[place - 1]);
  publish(&published[place], before + place);
}
