// prims_work_tile -- every tile of some heads, found by one thread and read by a warp.
#include "prims/schedule/work_tile.cuh"

extern "C" __global__ void tiles(
    const __grid_constant__ AttnParams p,
    int32_t* found) {  // [tiles, 8, lanes]: q0, head, head_kv, batch, steps, first, slot, entry
  __shared__ WorkTile shared;
  const int count = ceil_div(p.len_q, BLOCK_Q) * p.heads * p.batch;
  for (int i = 0; i < count; ++i) {
    if (lane_id() == 0) {
      shared = work_tile<false, 2>(p, Sequences<VARLEN>(p, 0), 0, i);
      shared.steps += 10 + i, shared.first += 20 + i, shared.slot += 1 + i;
    }
    __syncwarp();  // the tile is there
    const WorkTile tile = uniform(shared);
    const int x[8] = {tile.q0,    tile.head,  tile.head_kv, tile.batch,
                      tile.steps, tile.first, tile.slot,    tile.entry()};
    for (int j = 0; j < 8; ++j) found[(i * 8 + j) * WARP_SIZE + lane_id()] = x[j];
    __syncwarp();  // the tile was read
  }
}
