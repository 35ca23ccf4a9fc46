// score_bias.cuh -- a bias added to the scores of a lane in the layout of wgmma. It comes from
// boxes in shared memory, with one row if the bias is the same for all query rows. If it is the
// same for all keys, it comes from registers.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/params.cuh"

constexpr bool BIAS_IN_RING = BIAS_KIND == BiasKind::DENSE || BIAS_KIND == BiasKind::KEYS;
constexpr int BIAS_BOX_COLS = 128 / int(sizeof(bias_t));  // keys of a box: one swizzle
constexpr int BIAS_BOXES = BIAS_IN_RING ? ceil_div(BLOCK_KV, BIAS_BOX_COLS) : 0;  // of a step
constexpr int BIAS_BOX_ROWS = BIAS_KIND == BiasKind::KEYS ? 1 : BLOCK_Q;
// Bytes from one box to the next: the swizzle goes by addresses and repeats every 1024 bytes.
constexpr int BIAS_BOX_PITCH = round_up(BIAS_BOX_ROWS * 128, 1024);

// Two neighbours of a bias in memory.
template <int BYTES>
struct PairOf {
  using type = uint32_t;
};
template <>
struct PairOf<4> {
  using type = Vec<float, 2>;
};
// The same as numbers.
__device__ __forceinline__ Vec<float, 2> to_floats(uint32_t pair, __half) {
  return {{to_float(__ushort_as_half(pair & 0xffff)), to_float(__ushort_as_half(pair >> 16))}};
}
__device__ __forceinline__ Vec<float, 2> to_floats(uint32_t pair, __nv_bfloat16) {
  return {{__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)}};
}
__device__ __forceinline__ Vec<float, 2> to_floats(Vec<float, 2> pair, float) { return pair; }

// R3: S + factor * bias, from the boxes of a step; `row` is the first of the warp's 16 rows. A
// lane reads the numbers of 32 bits that it adds: ldmatrix would give their neighbours to others.
template <typename T>
__device__ __forceinline__ void add_dense_bias(
    float (&S_acc)[BLOCK_KV / 2], const unsigned char* boxes, int row, float factor) {
  if constexpr (sizeof(T) == 4) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const unsigned char* own = boxes + (row + g) * 128 + t % 2 * 8;
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 4; ++i) {
      const int n = i / 2, chunk = n % 4 * 2 + t / 2;  // 16 bytes; row + 8 has the same swizzle
      const auto b = *reinterpret_cast<const Vec<float, 2>*>(
          own + n / 4 * BIAS_BOX_PITCH + i % 2 * 8 * 128 + (chunk ^ g) * 16);
      float* S = &S_acc[i * 2];  // [2]
      S[0] = fmaf(b.v[0], factor, S[0]), S[1] = fmaf(b.v[1], factor, S[1]);
    }
  } else {
    const int r = row + lane_id() % 16;
    const uint32_t corner = shared_address(boxes) + r * 128 + (lane_id() / 16 ^ r % 8) * 16;
#pragma unroll
    for (int n = 0; n < BLOCK_KV / 8; n += 2) {  // 16 keys
      uint32_t pair[4];  // keys 8 n of row g, of row g + 8; keys 8 n + 8 of row g, of row g + 8
      ldmatrix_x4(pair, (corner + n / 8 * BIAS_BOX_PITCH) ^ n % 8 * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Vec<float, 2> b = to_floats(pair[i], T());
        float* S = &S_acc[(n + i / 2) * 4 + i % 2 * 2];  // [2]
        S[0] = fmaf(b.v[0], factor, S[0]), S[1] = fmaf(b.v[1], factor, S[1]);
      }
    }
  }
}

// The same if all rows share one bias: row 0 of a box, which the swizzle does not change.
template <typename T>
__device__ __forceinline__ void add_key_bias(
    float (&S_acc)[BLOCK_KV / 2], const unsigned char* boxes, float factor) {
  using Pair = typename PairOf<sizeof(T)>::type;
  constexpr int PER_BOX = BIAS_BOX_COLS / 8;
  const unsigned char* own = boxes + lane_id() % 4 * sizeof(Pair);
#pragma unroll
  for (int n = 0; n < BLOCK_KV / 8; ++n) {
    const auto pair = *reinterpret_cast<const Pair*>(
        own + n / PER_BOX * BIAS_BOX_PITCH + n % PER_BOX * 4 * sizeof(Pair));
    const Vec<float, 2> b = to_floats(pair, T());
#pragma unroll
    for (int i = 0; i < 4; ++i) S_acc[n * 4 + i] = fmaf(b.v[i % 2], factor, S_acc[n * 4 + i]);
  }
}

// The same if a row has one bias for all keys: the biases of row g and of row g + 8.
__device__ __forceinline__ void add_row_bias(
    float (&S_acc)[BLOCK_KV / 2], const float (&bias)[2], float factor) {
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i) S_acc[i] = fmaf(bias[i / 2 % 2], factor, S_acc[i]);
}

// The bias of one head in memory: [len_q, len_kv], strided. Not read past the last row and key.
struct BiasInMemory {
  const AttnParams& p;
  const bias_t* first;

  __device__ __forceinline__ BiasInMemory(const AttnParams& p, int batch, int head)
      : p(p),
        first(
            static_cast<const bias_t*>(p.bias) + batch * p.bias_stride.batch +
            head * p.bias_stride.head) {}
  __device__ __forceinline__ float at(int row, int key) const {
    row = min(row, p.len_q - 1), key = min(key, p.len_kv - 1);
    return to_float(first[row * p.bias_stride.row + key * p.bias_stride.key]);
  }
  // The scores of a lane whose bias is not -inf, as bits of a mask (mask_bits.cuh). A bias of -inf
  // masks a key, even if its score is NaN. `q` is the first of the lane's two rows.
  __device__ __forceinline__ void admitted(uint32_t (&bits)[2], int q, int kv0) const {
    bits[0] = bits[1] = 0;
    const int key = kv0 + lane_id() % 4 * 2;
#pragma unroll 1
    for (int i = 0; i < BLOCK_KV / 4; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        bits[h] |= uint32_t(at(q + h * 8, key + i / 2 * 8 + i % 2) != NEG_INF) << i;
  }
};
