// prims_mask_bits -- packed masks applied to scores, the parts of a step, the steps of a list.
#include "prims/score/mask_bits.cuh"

constexpr int HEADS = 2, TILES = 2;  // of a batch entry; of query rows

// A block for each batch entry, head, tile of query rows and step.
extern "C" __global__ void masked(
    const __grid_constant__ ScoreParams s,
    const uint32_t* bits,  // [mask tiles, key_tiles, MASK_TILE_WORDS]
    const float* x,        // [BLOCK_Q, BLOCK_KV]
    float* S) {            // [gridDim.x, BLOCK_Q, BLOCK_KV]
  const int step = blockIdx.x % s.key_tiles, tile = blockIdx.x / s.key_tiles;
  const int head = tile / TILES % HEADS, batch = tile / TILES / HEADS;
  const int64_t place = mask_tile(s, batch, head, tile % TILES * BLOCK_Q) * s.key_tiles + step;
  const int row = warp_id() * MASK_GROUP + lane_id() / 4, col = lane_id() % 4 * 2;
  float S_acc[BLOCK_KV / 2];
  uint32_t own[2];
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i)
    S_acc[i] = x[(row + i / 2 % 2 * 8) * BLOCK_KV + i / 4 * 8 + col + i % 2];
  load_mask(own, bits + place * MASK_TILE_WORDS, warp_id() * MASK_GROUP);
  apply_mask(S_acc, own);
  S += int64_t(blockIdx.x) * BLOCK_Q * BLOCK_KV;
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i)
    S[(row + i / 2 % 2 * 8) * BLOCK_KV + i / 4 * 8 + col + i % 2] = S_acc[i];
}

extern "C" __global__ void parts(
    const int32_t* step, int32_t* first, int32_t* mixed) {  // [blockDim.x], each
  first[threadIdx.x] = first_key(step[threadIdx.x]);
  mixed[threadIdx.x] = is_mixed(step[threadIdx.x]);
}

// A thread for each tile of query rows. Past its last step there is one that holds no key.
extern "C" __global__ void steps(
    const __grid_constant__ ScoreParams given,
    int32_t* listed,       // [lists, 2 + key_tiles]
    const int32_t* place,  // [blockDim.x, 5]: batch, head, first row, range of keys
    int32_t* count,        // [blockDim.x]
    int32_t* taken) {      // [blockDim.x, key_tiles + 1], as numbers
  ScoreParams s = given;
  s.tile_steps = listed;
  const int32_t* at = place + threadIdx.x * 5;
  const ListedSteps list(s, at[0], at[1], at[2], at[3], at[4]);
  count[threadIdx.x] = list.steps();
  for (int i = 0; i <= s.key_tiles; ++i) taken[threadIdx.x * (s.key_tiles + 1) + i] = list[i];
}
