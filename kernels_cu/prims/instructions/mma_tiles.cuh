// mma_tiles.cuh -- the tiles of an attention kernel in units of mma, for a warp that owns WARP_Q
// query rows.
#pragma once

#include "prims/config.cuh"

constexpr int HEAD_DIM_PAD = round_up(HEAD_DIM, 16);
constexpr int MMA_ROWS = WARP_Q / 16;       // row tiles of 16 per warp
constexpr int MMA_KEYS = BLOCK_KV / 8;      // key tiles of 8 per step
constexpr int MMA_COLS = HEAD_DIM_PAD / 8;  // column tiles of 8 of O

static_assert(
    BLOCK_Q % (16 * NUM_WARPS) == 0,
    "BLOCK_Q / NUM_WARPS must be a multiple of 16, the rows of an mma");
static_assert(BLOCK_KV % 16 == 0, "BLOCK_KV must be a multiple of 16, the depth of an mma");
