// mma.cuh -- tensor-core instructions of sm_80 and up, named as in PTX.
//
// Fragment layouts, with g = lane / 4, t = lane % 4 and K = 4 E. A 32-bit register holds
// E neighbours along k: E = 2 for 16-bit and 4 for 8-bit elements.
//   A [16, 2K]  a[0] (row g,     k E t)       a[1] (row g + 8, k E t)
//               a[2] (row g,     k K + E t)   a[3] (row g + 8, k K + E t)
//   B [2K, 8]   b[0] (k E t, column g)        b[1] (k K + E t, column g)
//   C [16, 8]   c[0], c[1] (row g, columns 2t, 2t + 1)
//               c[2], c[3] (row g + 8, columns 2t, 2t + 1)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
#pragma once

#include "prims/config.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit elements. Lane i gives the shared address of row i % 8 of matrix i
// / 8. Lane 4 r + c receives elements 2c, 2c + 1 of row r.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// The same, each matrix transposed: lane 4 r + c receives elements r of rows 2c, 2c + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// C [16, 8] += A [16, 16] B [16, 8], float32 accumulation. The element type picks the instruction.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// C [16, 8] += A [16, 32] B [32, 8] over INT8, exact in int32.
__device__ __forceinline__ void mma_m16n8k32_s8(
    int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with A in unsigned INT8.
__device__ __forceinline__ void mma_m16n8k32_u8(
    int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same over e4m3, in compute capability 8.9 and up; the sum keeps about 14 bits.
__device__ __forceinline__ void mma_m16n8k32_e4m3(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as e4m3, rounded to nearest even, x in the low byte; larger numbers saturate to
// E4M3_MAX.
constexpr float E4M3_MAX = 448.0f;
__device__ __forceinline__ uint32_t pack_e4m3(float x, float y) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(y), "f"(x));
  return r;
}

// Four floats as e4m3, x in the lowest byte.
__device__ __forceinline__ uint32_t pack_e4m3(float x, float y, float z, float w) {
  uint32_t r;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(r)
      : "f"(x), "f"(y), "f"(z), "f"(w));
  return r;
}

// Four floats as unsigned bytes, rounded to nearest even, x in the lowest. They saturate at 0 and
// 255, and NaN becomes 0.
__device__ __forceinline__ uint32_t pack_u8(float x, float y, float z, float w) {
  uint32_t r;
  asm("{\n.reg .s32 x, y, z, w;\n"
      "cvt.rni.s32.f32 x, %1;\ncvt.rni.s32.f32 y, %2;\n"
      "cvt.rni.s32.f32 z, %3;\ncvt.rni.s32.f32 w, %4;\n"
      "cvt.pack.sat.u8.s32.b32 w, w, z, 0;\n"
      "cvt.pack.sat.u8.s32.b32 %0, y, x, w;\n}\n"
      : "=r"(r)
      : "f"(x), "f"(y), "f"(z), "f"(w));
  return r;
}

// The same as signed bytes; NaN becomes 0.
__device__ __forceinline__ uint32_t pack_s8(float x, float y, float z, float w) {
  uint32_t r;
  asm("{\n.reg .s32 x, y, z, w;\n"
      "cvt.rni.s32.f32 x, %1;\ncvt.rni.s32.f32 y, %2;\n"
      "cvt.rni.s32.f32 z, %3;\ncvt.rni.s32.f32 w, %4;\n"
      "cvt.pack.sat.s8.s32.b32 w, w, z, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %0, y, x, w;\n}\n"
      : "=r"(r)
      : "f"(x), "f"(y), "f"(z), "f"(w));
  return r;
}

// Two floats rounded to nearest even and packed, x in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_rn(float x, float y);
template <>
__device__ __forceinline__ uint32_t pack_rn<__half>(float x, float y) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
template <>
__device__ __forceinline__ uint32_t pack_rn<__nv_bfloat16>(float x, float y) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}

// The larger of three pairs of 16-bit floats, half by half. None may be negative. Their bits then
// have the same order, with NaN above all.
__device__ __forceinline__ uint32_t max3_packed(uint32_t x, uint32_t y, uint32_t z) {
  return __vimax3_u16x2(x, y, z);
}
// Whether both of such a pair are less than 2^log2.
template <typename T>
__device__ __forceinline__ bool packed_below(uint32_t x, int log2);
template <>
__device__ __forceinline__ bool packed_below<__half>(uint32_t x, int log2) {
  const uint32_t power = (log2 + 15) << 10;  // its bits: numbers from it on set the top bit
  return ((x + (0x8000 - power) * 0x10001) & 0x80008000) == 0;
}
template <>
__device__ __forceinline__ bool packed_below<__nv_bfloat16>(uint32_t x, int log2) {
  const uint32_t power = (log2 + 127) << 7;
  return ((x + (0x8000 - power) * 0x10001) & 0x80008000) == 0;
}
