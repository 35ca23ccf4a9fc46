// prims_mma -- fragments of one warp: ldmatrix, the products, packing. Operands are placed by hand,
// as the layouts at the top of mma.cuh say.
#include "prims/instructions/mma.cuh"
#include "prims/instructions/warp.cuh"

extern "C" __global__ void ldmatrix(
    const uint16_t* tile,    // [16, 16]
    uint32_t* plain,         // [4, 32]
    uint32_t* transposed) {  // [4, 32]
  __shared__ alignas(16) uint16_t shared[256];
  for (int i = lane_id(); i < 256; i += WARP_SIZE) shared[i] = tile[i];
  __syncthreads();  // the tile is complete
  uint32_t r[4];
  ldmatrix_x4(r, shared_address(shared + lane_id() % 16 * 16 + lane_id() / 16 * 8));
  for (int i = 0; i < 4; ++i) plain[i * WARP_SIZE + lane_id()] = r[i];
  ldmatrix_x4_trans(r, shared_address(shared + lane_id() % 16 * 16 + lane_id() / 16 * 8));
  for (int i = 0; i < 4; ++i) transposed[i * WARP_SIZE + lane_id()] = r[i];
}

// The registers of A [16, 2K] and B [8, 2K], both row by row along k; a half row is K elements.
template <typename T>
__device__ void operands(const T* A, const T* B, uint32_t (&a)[4], uint32_t (&b)[2]) {
  constexpr int E = 4 / sizeof(T), K = 4 * E;
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i)
    a[i] = *reinterpret_cast<const uint32_t*>(A + (g + i % 2 * 8) * 2 * K + i / 2 * K + E * t);
  for (int i = 0; i < 2; ++i)
    b[i] = *reinterpret_cast<const uint32_t*>(B + g * 2 * K + i * K + E * t);
}

template <typename T>
__device__ void store(T* C, const T (&c)[4]) {  // [16, 8]
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i) C[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

template <typename T>
__device__ void mma_16bit(const T* A, const T* B, float* C) {
  uint32_t a[4], b[2];
  operands(A, B, a, b);
  float c[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  mma_m16n8k16<T>(c, a, b[0], b[1]);
  store(C, c);
}

extern "C" __global__ void mma_f16(const __half* A, const __half* B, float* C) {
  mma_16bit(A, B, C);  // [16, 16], [8, 16], [16, 8]
}
extern "C" __global__ void mma_bf16(const __nv_bfloat16* A, const __nv_bfloat16* B, float* C) {
  mma_16bit(A, B, C);  // [16, 16], [8, 16], [16, 8]
}
extern "C" __global__ void mma_s8(const int8_t* A, const int8_t* B, int32_t* C) {
  uint32_t a[4], b[2];  // of [16, 32], [8, 32], [16, 8]
  operands(A, B, a, b);
  int32_t c[4] = {1, 1, 1, 1};
  mma_m16n8k32_s8(c, a, b[0], b[1]);
  store(C, c);
}

extern "C" __global__ void mma_u8(const uint8_t* A, const int8_t* B, int32_t* C) {
  uint32_t a[4], b[2];  // of [16, 32], [8, 32], [16, 8]
  operands(reinterpret_cast<const int8_t*>(A), B, a, b);
  int32_t c[4] = {1, 1, 1, 1};
  mma_m16n8k32_u8(c, a, b[0], b[1]);
  store(C, c);
}

extern "C" __global__ void pack(
    const float* x,    // [2, 32]
    uint32_t* f16,     // [32]
    uint32_t* bf16) {  // [32]
  f16[lane_id()] = pack_rn<__half>(x[lane_id()], x[WARP_SIZE + lane_id()]);
  bf16[lane_id()] = pack_rn<__nv_bfloat16>(x[lane_id()], x[WARP_SIZE + lane_id()]);
}

extern "C" __global__ void weights(
    const uint32_t* f16,   // [3, 32] pairs
    const uint32_t* bf16,  // [3, 32] pairs
    uint32_t* largest,     // [32] pairs
    uint32_t* below) {     // [2, 32]
  const int i = lane_id();
  largest[i] = max3_packed(f16[i], f16[WARP_SIZE + i], f16[2 * WARP_SIZE + i]);
  below[i] = packed_below<__half>(f16[i], 8);
  below[WARP_SIZE + i] = packed_below<__nv_bfloat16>(bf16[i], 8);
}
