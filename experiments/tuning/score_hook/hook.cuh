// hook.cuh -- what happens to the scores of a step between Q K^T and the softmax: softcap, bias,
// mask. HOOK_* macros stand beside the CFG_* of a plain kernel, whose scores stay in units of q.k:
// features.softcap and .bias of config.cuh would turn the softmax to natural units.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/params.cuh"
#include "prims/instructions/warp.cuh"
#include "tanh.cuh"

constexpr bool HOOK_SOFTCAP = HOOK_SOFTCAP_ON;
enum class MaskKind { NONE, ROWS, KEYS };  // KEYS: the same for every query row
constexpr MaskKind HOOK_MASK = MaskKind(HOOK_MASK_KIND);
constexpr bool HOOK_BIAS = HOOK_BIAS_TYPE != 0;
constexpr bool HOOK_BIAS_OF_KEYS = HOOK_BIAS_KEYS;          // the same for every query row
constexpr int BIAS_ROWS = HOOK_BIAS_OF_KEYS ? 1 : BLOCK_Q;  // in a box of 64 keys
constexpr bool HOOK_LOADS_BIAS = HOOK_BIAS_LOADS;           // else only the first that a block adds
using hook_bias_t = DType<HOOK_BIAS ? HOOK_BIAS_TYPE - 1 : 0>::type;  // 1: half, 2: bfloat16

// Bits of a mask, packed once a call (pack_mask): a word holds those of the BLOCK_KV / 4 scores of
// a step that wgmma leaves in a lane for one row; bit 2 i + j is that of key 8 i + 2 (lane % 4) + j.
// ROWS: the words of row g and row g + 8 of 16 rows lie side by side, lane by lane.
constexpr int MASK_GROUP = 16;  // rows of a warp
constexpr int MASK_GROUP_WORDS = HOOK_MASK == MaskKind::ROWS ? 2 * WARP_SIZE : 4;
constexpr int MASK_TILE_WORDS =  // of a tile of query rows and a step
    HOOK_MASK == MaskKind::ROWS ? BLOCK_Q / MASK_GROUP * MASK_GROUP_WORDS : MASK_GROUP_WORDS;
static_assert(BLOCK_KV <= 128, "a lane's bits of one row and one step must fit in a word");

struct HookParams {
  uint32_t* bits;       // [mask batch, mask heads, q_tiles, key_tiles, MASK_TILE_WORDS]
  uint8_t* classes;     // [mask batch, mask heads, q_tiles, key_tiles] of TileClass
  int32_t* steps;       // [mask batch, mask heads, q_tiles, 1 + key_tiles]: how many are not
                        // empty, then 2 * tile of keys + (is it mixed?), rising
  int64_t tiles_batch;  // tiles of query rows from one batch entry or head to the next: 0 where
  int64_t tiles_head;   // the mask is broadcast, and so is tiles_q for KEYS
  int32_t tiles_q;
  int32_t mask_heads;  // pack_mask: how many there are
  int32_t q_tiles;
  int32_t key_tiles;
  int32_t aligned;     // rows of the mask can be read 8 keys at a time
  int32_t bias_batch;  // 1, or 0 where the bias is broadcast
  int32_t bias_head;
  float bias_factor;  // 1 / scale: natural units to those of q.k
  SoftcapParams cap;
};
enum TileClass : uint8_t { EMPTY, MIXED, FULL };

// The tile of query rows at q0, as counted above.
__device__ __forceinline__ int64_t mask_tile(const HookParams& hook, int batch, int head, int q0) {
  return batch * hook.tiles_batch + head * hook.tiles_head + q0 / BLOCK_Q * hook.tiles_q;
}

// The steps over keys that a tile of query rows takes: those that its mask does not leave empty,
// of keys before `end`.
struct MaskSteps {
  const int32_t* listed;  // [count]
  int count, past;

  __device__ __forceinline__ MaskSteps(const HookParams& hook, int64_t tile, int end) {
    if constexpr (HOOK_MASK == MaskKind::NONE) return;
    listed = hook.steps + tile * (1 + hook.key_tiles);
    count = *listed++;
    past = 2 * hook.key_tiles;
    if constexpr (CAUSAL) {
      int low = 0;
      while (low < count) {
        const int middle = (low + count) / 2;
        if (listed[middle] / 2 * BLOCK_KV < end)
          low = middle + 1;
        else
          count = middle;
      }
    }
  }
  // Rows that attend to nothing get one step from behind the last key: zeros.
  __device__ __forceinline__ int steps() const { return max(1, count); }
  __device__ __forceinline__ int operator[](int step) const {
    return step < count ? listed[step] : past;
  }
};

// A step as it lies in the ring: its first key, a multiple of 16, and whether its mask is mixed.
__device__ __forceinline__ int packed_step(int listed) {
  return listed / 2 * BLOCK_KV + listed % 2;
}

// S4 before the softmax: scores that the mask does not admit, of the rows of a lane.
__device__ __forceinline__ void apply_mask(
    float (&S_acc)[BLOCK_KV / 2], const uint32_t (&bits)[2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i)
    if (!(bits[i / 2 % 2] & 1u << (i / 4 * 2 + i % 2))) S_acc[i] = NEG_INF;
}

// The words of this lane, `group` being that of the 16 rows of its warp in the tile.
__device__ __forceinline__ void load_mask(
    uint32_t (&bits)[2], const uint32_t* tile_bits, int group) {
  if constexpr (HOOK_MASK == MaskKind::ROWS) {
    const auto pair = *reinterpret_cast<const Vec<uint32_t, 2>*>(
        tile_bits + group * MASK_GROUP_WORDS + lane_id() * 2);
    bits[0] = pair.v[0], bits[1] = pair.v[1];
  } else {
    bits[0] = bits[1] = tile_bits[lane_id() % 4];
  }
}

__device__ __forceinline__ Vec<float, 2> to_float2(uint32_t pair, __half) {
  return {{to_float(__ushort_as_half(pair & 0xffff)), to_float(__ushort_as_half(pair >> 16))}};
}
__device__ __forceinline__ Vec<float, 2> to_float2(uint32_t pair, __nv_bfloat16) {
  return {{__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)}};
}

// Bytes from one box of 64 keys to the next: boxes are swizzled over 128 bytes by their addresses.
constexpr int BIAS_BOX = BIAS_ROWS * 128 < 1024 ? 1024 : BIAS_ROWS * 128;

// R3: S + bias / scale. `row` is the first of the 16 rows of this warp.
__device__ __forceinline__ void add_bias(
    float (&S_acc)[BLOCK_KV / 2], const unsigned char* boxes, int row, float factor) {
  if constexpr (HOOK_BIAS_OF_KEYS) {  // row 0 of a box, which the swizzle leaves as it is
    const unsigned char* own = boxes + lane_id() % 4 * 4;
#pragma unroll
    for (int n = 0; n < BLOCK_KV / 8; ++n) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(own + n / 8 * BIAS_BOX + n % 8 * 16);
      const Vec<float, 2> b = to_float2(pair, hook_bias_t());
#pragma unroll
      for (int i = 0; i < 4; ++i) S_acc[n * 4 + i] = fmaf(b.v[i % 2], factor, S_acc[n * 4 + i]);
    }
    return;
  }
  const int r = row + lane_id() % 16;
  const uint32_t corner = shared_address(boxes) + r * 128 + (lane_id() / 16 ^ r % 8) * 16;
#pragma unroll
  for (int n = 0; n < BLOCK_KV / 8; n += 2) {  // 16 keys
    uint32_t pair[4];  // keys 8 n of row g, of row g + 8; keys 8 n + 8 of row g, of row g + 8
    ldmatrix_x4(pair, (corner + n / 8 * BIAS_BOX) ^ n % 8 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Vec<float, 2> b = to_float2(pair[i], hook_bias_t());
      float* S = &S_acc[(n + i / 2) * 4 + i % 2 * 2];
      S[0] = fmaf(b.v[0], factor, S[0]), S[1] = fmaf(b.v[1], factor, S[1]);
    }
  }
}
