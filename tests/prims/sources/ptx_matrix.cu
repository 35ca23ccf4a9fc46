// ptx_matrix -- tensor-core instructions beside those of prims/instructions/mma.cuh. Operands are placed by hand,
// as the layouts at the top of mma.cuh say.
#include "prims/instructions/mma.cuh"
#include "prims/instructions/warp.cuh"

#define LDMATRIX(SHAPE, N, ...)                                                  \
  do {                                                                           \
    uint32_t r[4] = {};                                                          \
    asm volatile("ldmatrix.sync.aligned.m8n8." SHAPE ".shared.b16 " __VA_ARGS__  \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                \
                 : "r"(address));                                                \
    for (int k = 0; k < N; ++k) y[row++ * WARP_SIZE + lane_id()] = r[k];         \
  } while (0)

extern "C" __global__ void ldmatrix_parts(
    const uint16_t* tile,  // [16, 8]
    uint32_t* y) {         // [6, 32]
  __shared__ alignas(16) uint16_t shared[128];
  for (int i = lane_id(); i < 128; i += WARP_SIZE) shared[i] = tile[i];
  __syncthreads();  // the tile is complete
  // Lanes past the rows in use name the first row.
  const uint32_t address = shared_address(shared + (lane_id() < 16 ? lane_id() : 0) * 8);
  int row = 0;
  LDMATRIX("x1", 1, "{%0}, [%4];");
  LDMATRIX("x1.trans", 1, "{%0}, [%4];");
  LDMATRIX("x2", 2, "{%0, %1}, [%4];");
  LDMATRIX("x2.trans", 2, "{%0, %1}, [%4];");
}

// C [16, 8] = A B + C of 32-bit registers that hold the operands' rows as they lie in memory.
#define MMA(ENTRY, SHAPE, TYPES, ELEMENT, RESULT, CODE, BYTES)                                     \
  extern "C" __global__ void ENTRY(const ELEMENT* A, const ELEMENT* B, RESULT* C) {                \
    constexpr int DEPTH = BYTES / sizeof(ELEMENT), E = 4 / sizeof(ELEMENT);                        \
    const int g = lane_id() / 4, t = lane_id() % 4;                                                \
    uint32_t a[4] = {}, b[2] = {};                                                                 \
    for (int i = 0; i < BYTES / 8; ++i)                                                            \
      a[i] = *reinterpret_cast<const uint32_t*>(A + (g + i % 2 * 8) * DEPTH + i / 2 * 4 * E + E * t); \
    for (int i = 0; i < BYTES / 16; ++i)                                                           \
      b[i] = *reinterpret_cast<const uint32_t*>(B + g * DEPTH + i * 4 * E + E * t);                \
    RESULT c[4];                                                                                   \
    for (int i = 0; i < 4; ++i) c[i] = C[(g + i / 2 * 8) * 8 + 2 * t + i % 2];                     \
    asm volatile("mma.sync.aligned." SHAPE ".row.col." TYPES " "                                   \
        MMA_OPERANDS_##BYTES                                                                       \
        : CODE(c[0]), CODE(c[1]), CODE(c[2]), CODE(c[3])                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                       \
    for (int i = 0; i < 4; ++i) C[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];                     \
  }
#define MMA_OPERANDS_32 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#define MMA_OPERANDS_16 "{%0, %1, %2, %3}, {%4, %5}, {%8}, {%0, %1, %2, %3};"

MMA(mma_k16_f16, "m16n8k16", "f32.f16.f16.f32", uint16_t, float, "+f", 32)
MMA(mma_k16_bf16, "m16n8k16", "f32.bf16.bf16.f32", uint16_t, float, "+f", 32)
MMA(mma_k8_f16, "m16n8k8", "f32.f16.f16.f32", uint16_t, float, "+f", 16)
MMA(mma_k8_bf16, "m16n8k8", "f32.bf16.bf16.f32", uint16_t, float, "+f", 16)
MMA(mma_k8_tf32, "m16n8k8", "f32.tf32.tf32.f32", uint32_t, float, "+f", 32)
MMA(mma_k4_tf32, "m16n8k4", "f32.tf32.tf32.f32", uint32_t, float, "+f", 16)
MMA(mma_k16_s8, "m16n8k16", "s32.s8.s8.s32", uint8_t, int32_t, "+r", 16)
MMA(mma_k32_u8, "m16n8k32", "s32.u8.u8.s32", uint8_t, int32_t, "+r", 32)
MMA(mma_k32_s8_u8, "m16n8k32", "s32.s8.u8.s32", uint8_t, int32_t, "+r", 32)
MMA(mma_k32_u8_s8, "m16n8k32", "satfinite.s32.u8.s8.s32", uint8_t, int32_t, "+r", 32)

#if __CUDA_ARCH__ >= 890
MMA(mma_k32_e4m3, "m16n8k32", "f32.e4m3.e4m3.f32", uint8_t, float, "+f", 32)
MMA(mma_k32_e5m2_e4m3, "m16n8k32", "f32.e5m2.e4m3.f32", uint8_t, float, "+f", 32)
#endif

#if __CUDA_ARCH__ >= 900
#define STMATRIX(SHAPE, ...)                                                           \
  do {                                                                                 \
    asm volatile("stmatrix.sync.aligned.m8n8." SHAPE ".shared.b16 [%0], " __VA_ARGS__  \
                 ::"r"(shared_address(shared[part] + lane_id() * 8)),                  \
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");               \
    ++part;                                                                            \
  } while (0)

extern "C" __global__ void stmatrix(
    const uint32_t* x,  // [4, 32]
    uint16_t* y) {      // [6, 32, 8], ones where nothing is stored
  __shared__ alignas(16) uint16_t shared[6][256];
  for (int i = lane_id(); i < 6 * 256; i += WARP_SIZE) (&shared[0][0])[i] = 1;
  __syncthreads();  // all are ones
  uint32_t r[4];
  for (int k = 0; k < 4; ++k) r[k] = x[k * WARP_SIZE + lane_id()];
  int part = 0;
  STMATRIX("x1", "{%1};");
  STMATRIX("x1.trans", "{%1};");
  STMATRIX("x2", "{%1, %2};");
  STMATRIX("x2.trans", "{%1, %2};");
  STMATRIX("x4", "{%1, %2, %3, %4};");
  STMATRIX("x4.trans", "{%1, %2, %3, %4};");
  __syncthreads();  // all are stored
  for (int i = lane_id(); i < 6 * 256; i += WARP_SIZE) y[i] = (&shared[0][0])[i];
}
#endif
