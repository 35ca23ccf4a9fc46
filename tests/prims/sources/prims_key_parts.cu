// prims_key_parts -- which keys of a step share a factor, and how many scales a step has.
#include "prims/codes/key_parts.cuh"
#include "prims/instructions/warp.cuh"

extern "C" __global__ void key_parts(
    int32_t* part,      // [BLOCK_KV]: of every key
    int32_t* counts) {  // [3]: parts, scales, whether each key has its own
  for (int key = lane_id(); key < BLOCK_KV; key += WARP_SIZE) part[key] = part_of(key);
  if (lane_id() == 0) counts[0] = PARTS, counts[1] = SCALES, counts[2] = BY_KEY;
}
