// tile_order.cuh -- order in which the blocks of a persistent kernel begin tiles of query rows.
#pragma once

#include "prims/config.cuh"

constexpr int64_t L2_SHARE = 16 << 20;  // bytes of K and V that stay in the L2 cache

struct TilePlace {
  int q0, batch_head;
};

// Tile `index` among `heads` heads, whose K and V take head_bytes each. If tiles are alike, the
// tiles of a head are consecutive, so concurrent blocks read the same K and V. If they are UNEVEN,
// as many heads at a time as fit into L2_SHARE, with their longest causal rows first.
// NOTE: groups of heads differ in size by one: a small one at the end would leave its longest tiles
// to few blocks (experiments/tuning/tile_order.py).
template <bool UNEVEN>
__device__ __forceinline__ TilePlace place_of(int index, int len_q, int heads, int64_t head_bytes) {
  const uint32_t q_blocks = ceil_div(len_q, BLOCK_Q), head = uint32_t(index) / q_blocks;
  if constexpr (!UNEVEN) return {int(q_blocks - 1 - index % q_blocks) * BLOCK_Q, int(head)};
  const uint32_t groups = ceil_div(heads, max(1, int(L2_SHARE / head_bytes)));
  const uint32_t size = heads / groups, larger = heads % groups;  // so many have one more
  const uint32_t border = larger * (size + 1);                    // they come first
  const bool in_larger = head < border;
  const uint32_t here = size + in_larger;
  const uint32_t first = head - (in_larger ? head : head - border) % here;
  const uint32_t rest = index - first * q_blocks;
  return {int(q_blocks - 1 - rest / here) * BLOCK_Q, int(first + rest % here)};
}
