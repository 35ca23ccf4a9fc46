// mma_tiles.cuh -- the tiles of an attention kernel in units of mma, for a warp with WARP_Q query
// rows. Also rows of 8-bit codes of Q and K.
#pragma once

#include "prims/config.cuh"

constexpr int HEAD_DIM_PAD = round_up(HEAD_DIM, 16);
constexpr int MMA_ROWS = WARP_Q / 16;       // row tiles of 16 per warp
constexpr int MMA_KEYS = BLOCK_KV / 8;      // key tiles of 8 per step
constexpr int MMA_COLS = HEAD_DIM_PAD / 8;  // column tiles of 8 of O

constexpr int CODES_PAD = round_up(HEAD_DIM, 32);  // bytes per row of codes
constexpr int CODE_CHUNKS = CODES_PAD / 16;        // 16-byte chunks per row of codes
// Codes per global access: as many bytes as an access of O, if rows allow it.
constexpr int CODE_VEC = VEC > 1 && HEAD_DIM % (2 * VEC) == 0 ? 2 * VEC : VEC;

static_assert(
    BLOCK_Q % (16 * NUM_WARPS) == 0,
    "BLOCK_Q / NUM_WARPS must be a multiple of 16, the rows of an mma");
static_assert(BLOCK_KV % 16 == 0, "BLOCK_KV must be a multiple of 16, the depth of an mma");
