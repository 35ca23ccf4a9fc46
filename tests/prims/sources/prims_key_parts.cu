// prims_key_parts -- which keys of a step share a factor, how many scales a step has, and scales of
// parts once those that are NaN are spared.
#include "prims/codes/key_parts.cuh"
#include "prims/instructions/warp.cuh"

extern "C" __global__ void key_parts(
    int32_t* part,    // [BLOCK_KV]: of every key
    int32_t* counts,  // [3]: parts, scales, whether each key has its own
    float* scale) {   // [at least PARTS]
  for (int key = lane_id(); key < BLOCK_KV; key += WARP_SIZE) part[key] = part_of(key);
  if (lane_id() > 0) return;
  counts[0] = PARTS, counts[1] = SCALES, counts[2] = BY_KEY;
  float part_scale[PARTS];
  for (int i = 0; i < PARTS; ++i) part_scale[i] = scale[i];
  spare_masked(part_scale);
  for (int i = 0; i < PARTS; ++i) scale[i] = part_scale[i];
}
