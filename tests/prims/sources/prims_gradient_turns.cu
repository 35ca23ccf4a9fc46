// prims_gradient_turns -- which block of keys begins when, and its turn at each tile of rows.
#include "prims/schedule/gradient_turns.cuh"

constexpr int ROW_TILES = 6;

// A thread takes the block of keys with its number.
extern "C" __global__ void order(
    const __grid_constant__ AttnParams p,
    int32_t* heads,   // [blocks]
    int32_t* keys,    // [blocks], the first of each
    int32_t* before,  // [blocks, ROW_TILES], blocks that add before; -1: it does not add
    int32_t* last) {  // [blocks, ROW_TILES], whether none adds after it
  const int index = threadIdx.x, kv_blocks = ceil_div(p.len_kv, BLOCK_KV);
  const BlockOfKeys own = block_of_keys(index, blockDim.x, kv_blocks, p.len_q);
  heads[index] = own.head, keys[index] = own.kv0;
  for (int tile = 0; tile < ROW_TILES; ++tile) {
    const int q0 = tile * BLOCK_Q, i = index * ROW_TILES + tile;
    if (own.kv0 >= kv_end(p, q0, BLOCK_Q)) continue;
    before[i] = blocks_before(p, 0, own.head, q0, own.kv0, own.reversed);
    last[i] = is_last_turn(p, 0, own.head, q0, own.kv0, own.reversed);
  }
}

// The same blocks of so many keys that there are too many to try each: one thread for every `step`.
extern "C" __global__ void places(
    const __grid_constant__ AttnParams p, int32_t step,
    int32_t* heads,   // [blockDim.x]
    int32_t* keys) {  // [blockDim.x]
  const int kv_blocks = ceil_div(p.len_kv, BLOCK_KV);
  const BlockOfKeys own =
      block_of_keys(threadIdx.x * step, p.heads_kv * kv_blocks, kv_blocks, p.len_q);
  heads[threadIdx.x] = own.head, keys[threadIdx.x] = own.kv0;
}
