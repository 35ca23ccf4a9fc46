// prims_tile_order -- where every tile of some heads lies, where they differ in work and not.
#include "prims/schedule/tile_order.cuh"
#include "prims/instructions/warp.cuh"

extern "C" __global__ void places(
    const int64_t* given,  // [3]: query rows, heads, bytes of K and V of a head
    int32_t* uneven,       // [tiles, 2]: first row, head
    int32_t* even) {       // [tiles, 2]
  const int len_q = given[0], heads = given[1];
  for (int i = lane_id(); i < heads * ceil_div(len_q, BLOCK_Q); i += WARP_SIZE) {
    const TilePlace a = place_of<true>(i, len_q, heads, given[2]);
    const TilePlace b = place_of<false>(i, len_q, heads, given[2]);
    uneven[2 * i] = a.q0, uneven[2 * i + 1] = a.batch_head;
    even[2 * i] = b.q0, even[2 * i + 1] = b.batch_head;
  }
}
