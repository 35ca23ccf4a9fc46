// quantize_values.cuh -- rows of V to 8-bit codes, one scale for each channel of GROUP_V rows.
//
// Attention reads the codes of V by channel: they are transposed here, where a byte is moved
// anyway, and lie in the order in which its lanes read them.
#pragma once

#include "prims/quantize_rows.cuh"

// Groups of V are whole tiles of attention, of 32 keys or more, or all of a head.
constexpr int VALUE_GROUP = GROUP_V < 32 ? 32 : GROUP_V;
constexpr int VALUE_GROUPS = ceil_div(VALUES_PAD, VALUE_GROUP);  // in the keys of a block
constexpr bool WHOLE_VALUE_GROUPS = VALUE_GROUP <= VALUES_PAD;

// Codes of V are INT8, or e4m3 where those of P are: these have no zero points.
constexpr bool VALUES_ARE_FLOATS = P_TYPE == PType::E4M3;
constexpr bool VALUE_ZEROS = ZERO_POINTS && !VALUES_ARE_FLOATS;
using ValueCoding = CodingWith<VALUE_ZEROS>;
using ValueReach = ReachWith<VALUE_ZEROS>;
__device__ __forceinline__ int value_code(float x, const ValueCoding& coding) {
  if constexpr (VALUES_ARE_FLOATS) return code_e4m3(x, coding.inverse);
  return coding.code(x);
}

// A lane takes the keys whose codes are neighbours in their channel, four of them, a word: key
// 8 n + 2 t + j of 16 lies at 4 t + 2 n + j, so that a word holds the keys whose scores one lane of
// attention has of two key tiles (prims/mma.cuh).
constexpr int WORDS = VALUES_PAD / 4;  // of a channel: as many as a warp has lanes
__device__ __forceinline__ int key_of(uint32_t word, uint32_t i) {
  return word / 4 * 16 + word % 4 * 2 + i / 2 * 8 + i % 2;
}

// A block takes VALUES_PAD keys of BLOCK_COLS columns.
constexpr int VALUE_LANES = BLOCK_COLS / VEC;  // per row
constexpr int COL_PARTS = ceil_div(HEAD_DIM, BLOCK_COLS);
constexpr bool WHOLE_COLS = HEAD_DIM % BLOCK_COLS == 0 && BLOCK_COLS % NUM_WARPS == 0;
constexpr int WORDS_PER_PASS = NUM_THREADS / VALUE_LANES;
constexpr int WORD_PASSES = ceil_div(WORDS, WORDS_PER_PASS);
// Column j of the VEC of a lane. In memory that lanes share, columns whose turn comes together lie
// side by side.
__device__ __forceinline__ uint32_t slot_of(uint32_t lane, uint32_t j) {
  return j * VALUE_LANES + lane;
}
// Where a word of its transposed codes lies: the lanes of a warp write to banks of their own.
__device__ __forceinline__ uint32_t tile_index(uint32_t lane, uint32_t j, uint32_t word) {
  return (lane * VEC + j) * WORDS + (word ^ lane * (WARP_SIZE / VALUE_LANES) % WORDS);
}

__device__ __forceinline__ void quantize_values(const QuantizeParams& p, uint32_t block) {
  __shared__ uint32_t tile[BLOCK_COLS * WORDS];  // [BLOCK_COLS, WORDS] of four codes
  __shared__ uint32_t reach[VALUE_GROUPS][ValueReach::SIDES][BLOCK_COLS];
  __shared__ ValueCoding coding[VALUE_GROUPS][BLOCK_COLS];
  __shared__ float mean[BLOCK_COLS];
  const Place at(p, block / COL_PARTS, VALUES_PAD);
  const int col0 = block % COL_PARTS * BLOCK_COLS;
  const uint32_t cols = HEAD_DIM % BLOCK_COLS == 0 ? BLOCK_COLS : min(BLOCK_COLS, HEAD_DIM - col0);
  if (is_empty(p, at, col0, cols)) return;
  const elem_t* X = at.X(p);  // [rows, HEAD_DIM]
  const uint32_t lane = threadIdx.x % VALUE_LANES, word0 = threadIdx.x / VALUE_LANES;
  const bool in_row = lane * VEC < cols;

  Words<elem_t, VEC> x[WORD_PASSES][4];
#pragma unroll
  for (int pass = 0; pass < WORD_PASSES; ++pass)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Past the last key stands the last one again: its group reaches no further with it.
      const int key = min(key_of(word0 + pass * WORDS_PER_PASS, i), at.rows - 1);
      x[pass][i] = {};
      if (in_row)
        x[pass][i] = *reinterpret_cast<const Words<elem_t, VEC>*>(
            X + key * p.X_stride.len + col0 + lane * VEC);
    }
#pragma unroll 1
  for (uint32_t col = threadIdx.x; col < cols; col += NUM_THREADS) {
    const uint32_t slot = slot_of(col / VEC, col % VEC);
    mean[slot] = channel_mean(p, at, col0 + col);
    ValueReach found = {};
    if constexpr (!WHOLE_VALUE_GROUPS)
      found = channel_reach<VALUE_ZEROS>(p, at, col0 + col, mean[slot]);
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < ValueReach::SIDES; ++i) reach[g][i][slot] = found.bits[i];
  }
  __syncthreads();  // the mean is there, and where maxima begin
#pragma unroll
  for (int pass = 0; pass < WORD_PASSES; ++pass)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[pass][i].use_from_here();
  float shift[VEC];  // of this lane's columns
#pragma unroll
  for (int j = 0; j < VEC; ++j) shift[j] = in_row ? mean[slot_of(lane, j)] : 0.0f;

  if constexpr (WHOLE_VALUE_GROUPS) {
#pragma unroll
    for (int pass = 0; pass < WORD_PASSES; ++pass) {
      const uint32_t word = word0 + pass * WORDS_PER_PASS;
      if (!in_row || word >= WORDS) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        ValueReach found = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) found.admit(__fsub_rn(x[pass][i].element(j), shift[j]));  // R0
        found.raise(&reach[word * 4 / VALUE_GROUP][0][slot_of(lane, j)], BLOCK_COLS);
      }
    }
    __syncthreads();  // every lane has added its maxima before scales are made of them
  }
  const int64_t scale0 = at.first_scale<VALUE_GROUP>(p) * HEAD_DIM + col0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < VALUE_GROUPS * cols; i += NUM_THREADS) {
    const uint32_t group = i / cols, col = i % cols, slot = slot_of(col / VEC, col % VEC);
    uint32_t sides[ValueReach::SIDES];
#pragma unroll
    for (int side = 0; side < ValueReach::SIDES; ++side) sides[side] = reach[group][side][slot];
    ValueCoding own;
    const float scale = own.make(sides, VALUES_ARE_FLOATS ? E4M3_MAX : INT8_MAX);  // R1
    coding[group][slot] = own;
    const int row = group * VALUE_GROUP;
    if (row >= at.rows || (!WHOLE_VALUE_GROUPS && at.row0 > 0)) continue;
    p.scale[scale0 + group * HEAD_DIM + col] = scale;
    if constexpr (VALUE_ZEROS) p.zero[scale0 + group * HEAD_DIM + col] = own.zero;
  }
  __syncthreads();  // the inverses are there before a value is coded with them

#pragma unroll
  for (int pass = 0; pass < WORD_PASSES; ++pass) {
    const uint32_t word = word0 + pass * WORDS_PER_PASS;
    if (!in_row || word >= WORDS) continue;
    uint32_t present = 0;  // past the last key are zeros
#pragma unroll
    for (int i = 0; i < 4; ++i) present |= key_of(word, i) < at.rows ? 0xffu << 8 * i : 0;
    ValueCoding own[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) own[j] = coding[word * 4 / VALUE_GROUP][slot_of(lane, j)];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      int c[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        c[i] = value_code(__fsub_rn(x[pass][i].element(j), shift[j]), own[j]);  // R0, R1
      tile[tile_index(lane, j, word)] = pack_s8x4(c[0], c[1], c[2], c[3]) & present;
    }
  }
  __syncthreads();  // the codes are there before they leave channel by channel
  const uint32_t word = threadIdx.x % WORDS, col1 = threadIdx.x / WORDS;
  int8_t* codes =  // of this lane's word of column col1, from key row0 on
      at.value_codes(p) + int64_t(col0 + col1) * p.padded + word * 4;
#pragma unroll
  for (uint32_t col = 0; col < BLOCK_COLS; col += NUM_WARPS, codes += NUM_WARPS * int64_t(p.padded))
    if (WHOLE_COLS || col1 + col < cols)
      *reinterpret_cast<uint32_t*>(codes) =
          tile[tile_index((col1 + col) / VEC, (col1 + col) % VEC, word)];
}
