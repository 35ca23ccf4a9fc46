// warpgroups.cuh -- how the Hopper forms of fa_int8 divide a block: one warpgroup copies, two
// or three compute 64 query rows each.
#pragma once

#include "prims/config.cuh"
#include "prims/score/score_hook.cuh"

constexpr int WARPGROUP = 128;           // threads
constexpr int CONSUMERS = BLOCK_Q / 64;  // warpgroups that compute
constexpr int CONSUMER_WARPS = CONSUMERS * 4;
constexpr int O_COLS =
    HEAD_DIM <= 64 ? 64 : round_up(HEAD_DIM, 32);  // columns of O that are computed
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
// Tiles differ in work, so blocks take the next tile when they are free.
constexpr bool UNEVEN = CAUSAL || WINDOW || VARLEN || BLOCK_MASK || SCORES_UNEVEN;
constexpr bool LISTED = BLOCK_MASK || MASKED;  // a list names the steps

static_assert(
    BLOCK_Q == 128 || BLOCK_Q == 192,
    "BLOCK_Q must be 128 or 192: two or three warpgroups of 64 rows fill the registers");
static_assert(
    NUM_THREADS == (CONSUMERS + 1) * WARPGROUP,
    "NUM_WARPS must be 4 for every 64 rows of BLOCK_Q and 4 that copy");
static_assert(
    CONSUMERS == 2 || HEAD_DIM <= 128,
    "BLOCK_Q must be 128 past HEAD_DIM 128: two warpgroups have registers for O");
static_assert(
    BLOCK_KV >= 64 && BLOCK_KV <= 256 && BLOCK_KV % 16 == 0,
    "BLOCK_KV must be a multiple of 16 from 64 to 256, the columns of a wgmma");
