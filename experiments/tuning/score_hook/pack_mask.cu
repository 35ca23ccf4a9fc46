// pack_mask -- a mask of bytes as bits in the order of the wgmma accumulator, and which steps over
// keys each tile of query rows takes (hook.cuh has the layout). Of a mask of rows a block packs one
// tile and list_steps follows; of a mask of keys one block does both for a whole row.
#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/instructions/warp.cuh"
#include "hook.cuh"

constexpr int OCTETS = BLOCK_KV / 8;
constexpr int PACK_THREADS = BLOCK_Q / MASK_GROUP * WARP_SIZE;
constexpr int KEYS_THREADS = 256;
constexpr uint32_t ONES = 0x01010101u;

// Eight neighbouring entries of a row, a byte each. Those past the last row or key count as
// admitted: the softmax masks such keys, and a row without a key is slow.
struct Octet {
  uint32_t low, high;
  bool some;  // of those that exist one is admitted

  __device__ __forceinline__
  Octet(const AttnParams& p, const bool* row, bool row_exists, int key, bool aligned)
      : low(ONES), high(ONES), some(false) {
    if (!row_exists || key >= p.len_kv) return;
    if (aligned && key + 8 <= p.len_kv) {
      const auto bytes = *reinterpret_cast<const Vec<uint32_t, 2>*>(row + key);
      low = bytes.v[0], high = bytes.v[1], some = (low | high) != 0;
      return;
    }
    low = high = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool exists = key + i < p.len_kv;
      const bool admitted = exists && row[(key + i) * p.mask_stride.key];
      some |= admitted;
      (i < 4 ? low : high) |= uint32_t(admitted || !exists) << i % 4 * 8;
    }
  }
  __device__ __forceinline__ bool full() const { return low == ONES && high == ONES; }
  // The two entries of a lane t, as bits.
  __device__ __forceinline__ uint32_t pair(int t) const {
    const uint32_t bytes = (t < 2 ? low : high) >> t % 2 * 16;
    return (bytes & 1) | (bytes >> 7 & 2);
  }
};

__device__ __forceinline__ uint8_t tile_class(bool some, bool full) {
  return !some ? EMPTY : full ? FULL : MIXED;
}

// The mask of one of the batch entries and heads that it has.
__device__ __forceinline__ const bool* mask_of(
    const AttnParams& p, const HookParams& hook, int batch_head) {
  return p.mask + batch_head / hook.mask_heads * p.mask_stride.batch +
         batch_head % hook.mask_heads * p.mask_stride.head;
}

extern "C" __global__ __launch_bounds__(PACK_THREADS) void pack_mask(
    const __grid_constant__ AttnParams p, const __grid_constant__ HookParams hook) {
  const int tile = blockIdx.x / hook.key_tiles;  // of query rows, of all batch entries and heads
  const int kv0 = blockIdx.x % hook.key_tiles * BLOCK_KV;
  const int q0 = tile % hook.q_tiles * BLOCK_Q;
  const bool* mask = mask_of(p, hook, tile / hook.q_tiles);  // [len_q, len_kv], strided
  const int t = lane_id() % 4;
  bool some = false, full = true;
  Vec<uint32_t, 2> words;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int q = q0 + warp_id() * MASK_GROUP + lane_id() / 4 + h * 8;
    const bool* row = mask + int64_t(min(q, p.len_q - 1)) * p.mask_stride.row;
    uint32_t x[4] = {};  // what this lane's octets give each lane of the four
#pragma unroll
    for (int j = 0; j < ceil_div(OCTETS, 4); ++j) {
      const int i = j * 4 + t;
      if (i >= OCTETS) continue;
      const Octet octet(p, row, q < p.len_q, kv0 + i * 8, hook.aligned);
      some |= octet.some, full &= octet.full();
#pragma unroll
      for (int to = 0; to < 4; ++to) x[to] |= octet.pair(to) << i * 2;
    }
    shfl_transpose(x);
    words.v[h] = x[0] | x[1] | x[2] | x[3];
  }
  uint32_t* bits = hook.bits + int64_t(blockIdx.x) * MASK_TILE_WORDS;
  *reinterpret_cast<Vec<uint32_t, 2>*>(bits + thread_id() * 2) = words;
  __shared__ bool warp_some[PACK_THREADS / WARP_SIZE], warp_full[PACK_THREADS / WARP_SIZE];
  some = __any_sync(FULL_WARP, some), full = __all_sync(FULL_WARP, full);
  if (lane_id() == 0) warp_some[warp_id()] = some, warp_full[warp_id()] = full;
  __syncthreads();  // all warps have said so
  if (thread_id() != 0) return;
  for (int warp = 1; warp < PACK_THREADS / WARP_SIZE; ++warp)
    some |= warp_some[warp], full &= warp_full[warp];
  hook.classes[blockIdx.x] = tile_class(some, full);
}

// A warp lists the steps of one tile of query rows.
__device__ __forceinline__ void list_of(const HookParams& hook, int64_t tile) {
  const uint8_t* classes = hook.classes + tile * hook.key_tiles;
  int32_t* steps = hook.steps + tile * (1 + hook.key_tiles);
  int count = 0;
  for (int first = 0; first < hook.key_tiles; first += WARP_SIZE) {
    const int key_tile = first + lane_id();
    const int found = key_tile < hook.key_tiles ? classes[key_tile] : EMPTY;
    const uint32_t taken = __ballot_sync(FULL_WARP, found != EMPTY);
    const int before = __popc(taken & ((1u << lane_id()) - 1));
    if (found != EMPTY) steps[1 + count + before] = 2 * key_tile + (found == MIXED);
    count += __popc(taken);
  }
  if (lane_id() == 0) steps[0] = count;
}

extern "C" __global__ __launch_bounds__(WARP_SIZE) void list_steps(
    const __grid_constant__ AttnParams p, const __grid_constant__ HookParams hook) {
  list_of(hook, blockIdx.x);
}

extern "C" __global__ __launch_bounds__(KEYS_THREADS) void pack_keys(
    const __grid_constant__ AttnParams p, const __grid_constant__ HookParams hook) {
  const bool* mask = mask_of(p, hook, blockIdx.x);  // [len_kv], strided
  const int i = lane_id();                          // octet of this lane
  for (int key_tile = warp_id(); key_tile < hook.key_tiles; key_tile += KEYS_THREADS / WARP_SIZE) {
    const Octet octet(p, mask, i < OCTETS, key_tile * BLOCK_KV + i * 8, hook.aligned);
    const int64_t number = int64_t(blockIdx.x) * hook.key_tiles + key_tile;
#pragma unroll
    for (int to = 0; to < 4; ++to) {
      const uint32_t own = i < OCTETS ? octet.pair(to) << i * 2 : 0;
      const uint32_t word =
          shfl_reduce<WARP_SIZE>(own, [](uint32_t a, uint32_t b) { return a | b; });
      if (i == to) hook.bits[number * MASK_TILE_WORDS + to] = word;
    }
    const bool some = __any_sync(FULL_WARP, octet.some), full = __all_sync(FULL_WARP, octet.full());
    if (i == 0) hook.classes[number] = tile_class(some, full);
  }
  __syncthreads();  // all tiles have their class
  if (warp_id() == 0) list_of(hook, blockIdx.x);
}
