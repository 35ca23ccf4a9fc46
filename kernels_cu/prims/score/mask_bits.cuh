// mask_bits.cuh -- a mask as bits, packed once a call by prepare/pack_mask.cu, and the steps over
// keys that it leaves.
//
// A word holds the bits of the BLOCK_KV / 4 scores of a step that a lane has for one row
// (wgmma.cuh). Bit 2 i + j belongs to key 8 i + 2 (lane % 4) + j. With MaskKind::ROWS the words of
// rows g and g + 8 of 16 rows are adjacent, lane by lane. With KEYS a step has words of 4 lanes.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"

constexpr int MASK_GROUP = 16;  // rows of a warp
constexpr int MASK_GROUP_WORDS = MASK_KIND == MaskKind::KEYS ? 4 : 2 * WARP_SIZE;
constexpr int MASK_TILE_WORDS =  // of a mask tile and a step
    MASK_KIND == MaskKind::KEYS ? MASK_GROUP_WORDS : BLOCK_Q / MASK_GROUP * MASK_GROUP_WORDS;
static_assert(
    !SCORED || BLOCK_KV <= 128,
    "BLOCK_KV must be at most 128 with softcap, bias or mask: a word holds a lane's bits of a row");

enum TileClass : uint8_t { EMPTY, MIXED, FULL };
constexpr int LIST_HEAD = 2;  // numbers before the steps of a list

// The mask tile, and the list of steps, of the query rows at q0.
__device__ __forceinline__ int64_t mask_tile(const ScoreParams& s, int batch, int head, int q0) {
  return batch * s.mask_batch + head * s.mask_head + q0 / BLOCK_Q * s.mask_q;
}
__device__ __forceinline__ int64_t step_list(const ScoreParams& s, int batch, int head, int q0) {
  return batch * s.list_batch + head * s.list_head + q0 / BLOCK_Q * s.list_q;
}

// A step as one number: its first key, which is even, and whether its bits are needed. Without a
// mask it is the first key.
__device__ __forceinline__ int first_key(int step) {
  return MASK_KIND == MaskKind::NONE ? step : step & ~1;
}
__device__ __forceinline__ bool is_mixed(int step) {
  return MASK_KIND != MaskKind::NONE && step % 2 != 0;
}

// The steps over keys of a tile of query rows: listed steps with any of the keys [begin, end). Rows
// that attend to no key take one step behind the last key, which is zeros.
struct ListedSteps {
  const int32_t* listed;  // [room], of which count are listed, rising
  int count, room, past;

  __device__ __forceinline__
  ListedSteps(const ScoreParams& s, int batch, int head, int q0, int begin, int end) {
    listed = s.tile_steps + step_list(s, batch, head, q0) * (LIST_HEAD + s.key_tiles);
    count = listed[0], listed += LIST_HEAD;
    room = s.key_tiles;
    past = s.key_tiles * BLOCK_KV;
    if constexpr (CAUSAL || VARLEN) count = count_before(end);
    if constexpr (WINDOW) {
      const int skipped = count_before(begin - BLOCK_KV + 1);
      listed += skipped, count = max(0, count - skipped), room -= skipped;
    }
  }
  // Number of steps that begin before a key.
  __device__ __forceinline__ int count_before(int key) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (listed[middle] / 2 * BLOCK_KV < key)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  __device__ __forceinline__ int steps() const { return max(1, count); }
  // Number of first steps that are whole. Not valid with a window, which skips some.
  // NOTE: read again at each use, because the copying thread has no register for it.
  __device__ __forceinline__ int whole() const { return listed[-1]; }
  // NOTE: this also reads past the last step, where there is room. Then the first step is loaded
  // together with the count.
  __device__ __forceinline__ int operator[](int number) const {
    const int tile = number < room ? listed[number] : 0;
    return number < count ? tile / 2 * BLOCK_KV + tile % 2 : past;
  }
};

// This lane's words from the words of the mask tile. `row` is the first of its warp's 16 rows.
__device__ __forceinline__ void load_mask(uint32_t (&bits)[2], const uint32_t* words, int row) {
  if constexpr (MASK_KIND == MaskKind::KEYS) {
    bits[0] = bits[1] = words[lane_id() % 4];
  } else {
    const auto pair = *reinterpret_cast<const Vec<uint32_t, 2>*>(
        words + row / MASK_GROUP * MASK_GROUP_WORDS + lane_id() * 2);
    bits[0] = pair.v[0], bits[1] = pair.v[1];
  }
}

// Whether bits of a lane admit its score i.
__device__ __forceinline__ bool is_admitted(const uint32_t (&bits)[2], int i) {
  return bits[i / 2 % 2] & 1u << (i / 4 * 2 + i % 2);
}

// The bits of a lane whose key is below `end`; both count from its first key.
__device__ __forceinline__ uint32_t bits_below(int end) {
  const int keys = max(end, 0), count = keys / 8 * 2 + min(keys % 8, 2);
  return count < 32 ? (1u << count) - 1 : ~0u;
}

// R3: -inf for the scores of a lane that its mask does not admit.
// NOTE: word by word, each from its first bit on. Then ptxas makes predicates of seven bits at once
// (R2P): 86 instructions instead of 110 for the 64 scores of BLOCK_KV 128.
__device__ __forceinline__ void apply_mask(
    float (&S_acc)[BLOCK_KV / 2], const uint32_t (&bits)[2]) {
#pragma unroll
  for (int n = 0; n < BLOCK_KV / 2; ++n) {
    const int h = n / (BLOCK_KV / 4), bit = n % (BLOCK_KV / 4), i = bit / 2 * 4 + h * 2 + bit % 2;
    if (!is_admitted(bits, i)) S_acc[i] = NEG_INF;
  }
}
