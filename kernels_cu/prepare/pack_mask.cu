// pack_mask.cu -- packs a mask of bytes to bits in the order of wgmma's accumulator. It lists the
// steps over keys of each tile of query rows. For the layout see prims/score/mask_bits.cuh. For a
// mask of rows a block packs one mask tile and step. For a mask of keys one block packs a whole
// row, and never expands it. Tiles are full, mixed or empty. Empty tiles, and tiles that a block
// mask drops, are not listed. The host does not synchronise.
#include "prims/config.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/params.cuh"
#include "prims/score/mask_bits.cuh"

constexpr int OCTETS = BLOCK_KV / 8;
constexpr int PACK_THREADS = BLOCK_Q / MASK_GROUP * WARP_SIZE;
constexpr int KEYS_THREADS = 1024;  // as in cupyattn/plans/scored.py
constexpr uint32_t ONES = 0x01010101u;

// 1 for every byte that is not 0, as NumPy treats such bytes as true.
__device__ __forceinline__ uint32_t truths(uint32_t bytes) {
  bytes |= bytes >> 4 & 0x0f0f0f0fu;
  bytes |= bytes >> 2 & 0x03030303u;
  bytes |= bytes >> 1 & 0x01010101u;
  return bytes & ONES;
}

// Eight neighbouring entries of a row, a byte each. Entries past the last row or key count as
// admitted: the softmax masks such keys, and a row without a key is slow.
struct Octet {
  uint32_t low, high;
  bool some;  // an existing entry is admitted

  __device__ __forceinline__
  Octet(const AttnParams& p, const bool* row, bool row_exists, int key, bool aligned)
      : low(ONES), high(ONES), some(false) {
    if (!row_exists || key >= p.len_kv) return;
    if (aligned && key + 8 <= p.len_kv) {
      const auto bytes = *reinterpret_cast<const Vec<uint32_t, 2>*>(row + key);
      low = truths(bytes.v[0]), high = truths(bytes.v[1]), some = (low | high) != 0;
      return;
    }
    low = high = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool exists = key + i < p.len_kv;
      const auto bytes = reinterpret_cast<const uint8_t*>(row);
      const bool admitted = exists && bytes[(key + i) * p.mask_stride.key] != 0;
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

// The mask of one of its batch entries and heads: [len_q, len_kv], strided.
__device__ __forceinline__ const bool* mask_of(
    const AttnParams& p, const ScoreParams& s, int batch_head) {
  return p.mask + batch_head / s.mask_heads * p.mask_stride.batch +
         batch_head % s.mask_heads * p.mask_stride.head;
}

extern "C" __global__ __launch_bounds__(PACK_THREADS) void pack_mask(
    const __grid_constant__ AttnParams p, const __grid_constant__ ScoreParams s) {
  const int tile = blockIdx.x / s.key_tiles;  // mask tile
  const int kv0 = blockIdx.x % s.key_tiles * BLOCK_KV;
  const int q0 = tile % s.mask_rows * BLOCK_Q;
  const bool* mask = mask_of(p, s, tile / s.mask_rows);  // [len_q, len_kv], strided
  const int t = lane_id() % 4;
  bool some = false, full = true;
  Vec<uint32_t, 2> words;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int q = q0 + warp_id() * MASK_GROUP + lane_id() / 4 + h * 8;
    const bool* row =  // [len_kv], strided
        mask + int64_t(min(q, p.len_q - 1)) * p.mask_stride.row;
    uint32_t x[4] = {};  // bits of this lane's octets for each of the four lanes
#pragma unroll
    for (int j = 0; j < ceil_div(OCTETS, 4); ++j) {
      const int i = j * 4 + t;
      if (i >= OCTETS) continue;
      const Octet octet(p, row, q < p.len_q, kv0 + i * 8, s.mask_aligned);
      some |= octet.some, full &= octet.full();
#pragma unroll
      for (int to = 0; to < 4; ++to) x[to] |= octet.pair(to) << i * 2;
    }
    shfl_transpose(x);
    words.v[h] = x[0] | x[1] | x[2] | x[3];
  }
  uint32_t* bits = s.mask_bits + int64_t(blockIdx.x) * MASK_TILE_WORDS;  // [MASK_TILE_WORDS]
  *reinterpret_cast<Vec<uint32_t, 2>*>(bits + thread_id() * 2) = words;
  __shared__ bool warp_some[PACK_THREADS / WARP_SIZE], warp_full[PACK_THREADS / WARP_SIZE];
  some = __any_sync(FULL_WARP, some), full = __all_sync(FULL_WARP, full);
  if (lane_id() == 0) warp_some[warp_id()] = some, warp_full[warp_id()] = full;
  __syncthreads();  // every warp's two answers are in shared memory before thread 0 reads them
  if (thread_id() != 0) return;
  for (int warp = 1; warp < PACK_THREADS / WARP_SIZE; ++warp)
    some |= warp_some[warp], full &= warp_full[warp];
  s.tile_classes[blockIdx.x] = tile_class(some, full);
}

// A warp lists the steps of the tiles of query rows that share list number `list`.
__device__ __forceinline__ void make_list(const AttnParams& p, const ScoreParams& s, int64_t list) {
  const int q0 = list % s.list_rows * BLOCK_Q;
  const int head = list / s.list_rows % s.list_heads, batch = list / s.list_rows / s.list_heads;
  const uint8_t* classes =  // [key_tiles]
      s.tile_classes + mask_tile(s, batch, head, q0) * s.key_tiles;
  const KeptKeys kept(p, batch, head, q0, 0, p.len_kv);
  int32_t* steps = s.tile_steps + list * (LIST_HEAD + s.key_tiles);  // [LIST_HEAD + key_tiles]
  int count = 0, whole = 0;
  bool all_whole = true;
  for (int first = 0; first < s.key_tiles; first += WARP_SIZE) {
    const int key_tile = first + lane_id();
    int found = key_tile < s.key_tiles ? classes[key_tile] : EMPTY;
    if (BLOCK_MASK && found != EMPTY && !kept.include(key_tile * BLOCK_KV)) found = EMPTY;
    const uint32_t taken = __ballot_sync(FULL_WARP, found != EMPTY);
    const int before = __popc(taken & ((1u << lane_id()) - 1));
    if (found != EMPTY) steps[LIST_HEAD + count + before] = 2 * key_tile + (found == MIXED);
    // Whole ones admit every key, and each of their places holds one.
    const uint32_t others = __ballot_sync(
        FULL_WARP, found == MIXED || (found == FULL && (key_tile + 1) * BLOCK_KV > p.len_kv));
    if (all_whole) whole += __popc(taken & (others ? (others & -others) - 1 : ~0u));
    all_whole &= others == 0;
    count += __popc(taken);
  }
  // Kernels take one step even if none is listed, and read two places ahead. Hence up to three
  // places behind the last step are read. No step is made of them.
  const int at = count + lane_id();
  if (lane_id() < 3 && at < s.key_tiles) steps[LIST_HEAD + at] = 0;
  if (lane_id() == 0) steps[0] = count, steps[1] = whole;
}

extern "C" __global__ __launch_bounds__(WARP_SIZE) void list_steps(
    const __grid_constant__ AttnParams p, const __grid_constant__ ScoreParams s) {
  make_list(p, s, blockIdx.x);
}

extern "C" __global__ __launch_bounds__(KEYS_THREADS) void pack_keys(
    const __grid_constant__ AttnParams p, const __grid_constant__ ScoreParams s) {
  const bool* mask = mask_of(p, s, blockIdx.x);  // [len_kv], strided
  const int i = lane_id();                       // octet of this lane
  for (int key_tile = warp_id(); key_tile < s.key_tiles; key_tile += KEYS_THREADS / WARP_SIZE) {
    const Octet octet(p, mask, i < OCTETS, key_tile * BLOCK_KV + i * 8, s.mask_aligned);
    const int64_t number = int64_t(blockIdx.x) * s.key_tiles + key_tile;
#pragma unroll
    for (int to = 0; to < 4; ++to) {
      const uint32_t word = __reduce_or_sync(FULL_WARP, i < OCTETS ? octet.pair(to) << i * 2 : 0);
      if (i == to) s.mask_bits[number * MASK_TILE_WORDS + to] = word;
    }
    const bool some = __any_sync(FULL_WARP, octet.some), full = __all_sync(FULL_WARP, octet.full());
    if (i == 0) s.tile_classes[number] = tile_class(some, full);
  }
  if constexpr (BLOCK_MASK) return;  // list_steps follows, with a list for each tile of query rows
  __syncthreads();                   // every step has its class before the list is made
  if (warp_id() == 0) make_list(p, s, blockIdx.x);
}
