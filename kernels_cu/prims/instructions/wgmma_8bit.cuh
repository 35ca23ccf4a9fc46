// wgmma_8bit.cuh -- warpgroup matrix instructions (sm_90a) over 8-bit operands: D [64, N] +=
// A [64, 32] B [32, N].
// NOTE: a separate header, because reading it takes 2 % of the compile time of fa_tc, which has no
// such product.
#pragma once

#include "prims/instructions/wgmma.cuh"

// D [64, N] = A [64, 32] B [32, N] (+ D when accumulate) over INT8 codes, exact in int32;
//   ss: A and B in shared memory, both K-major
template <int N>
struct WgmmaS8;

// D [64, N] = A [64, 32] B [32, N] (+ D when accumulate), A unsigned and B signed 8-bit codes,
// exact in int32;
//   rs: A in registers, B in shared memory, K-major
template <int N>
struct WgmmaU8;

// D [64, N] = A [64, 32] B [32, N] (+ D when accumulate) over e4m3; the sum keeps about 14 bits.
//   rs: A in registers, B in shared memory, K-major
template <int N>
struct WgmmaE4m3;

// clang-format off
// As WGMMA_OF: N columns, COUNT accumulators, and the numbers of the further operands.
#define WGMMA_S8(N, COUNT, X0, X1, X2, X3, X4) \
template <> \
struct WgmmaS8<N> { \
  template <int = 0> static __device__ __forceinline__ void ss( \
      int32_t (&c)[COUNT], Descriptor a, Descriptor b, bool accumulate) { \
    asm volatile( \
        "{\n.reg .pred p;\n.reg .b64 a, b;\n" \
        "mov.b64 a, {%" #X0 ", %" #X1 "};\nmov.b64 b, {%" #X2 ", %" #X3 "};\n" \
        "setp.ne.b32 p, %" #X4 ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" NAMES_##COUNT "}, a, b, p;\n}\n" \
        : ACCUMULATORS_##COUNT("+r") \
        : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(int(accumulate))); \
  } \
};
#define WGMMA_RS(NAME, T, R, TYPES, SIGNS, N, COUNT, X0, X1, X2, X3, X4, X5, X6) \
template <> \
struct NAME<N> { \
  template <int = 0> static __device__ __forceinline__ void rs( \
      T (&c)[COUNT], const uint32_t (&a)[4], Descriptor b, bool accumulate) { \
    asm volatile( \
        "{\n.reg .pred p;\n.reg .b64 b;\nmov.b64 b, {%" #X4 ", %" #X5 "};\n" \
        "setp.ne.b32 p, %" #X6 ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " " \
        "{" NAMES_##COUNT "}, {%" #X0 ", %" #X1 ", %" #X2 ", %" #X3 "}, b, p" SIGNS ";\n}\n" \
        : ACCUMULATORS_##COUNT(R) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), \
          "r"(int(accumulate))); \
  } \
};
#define WGMMA_E4M3(...) \
  WGMMA_RS(WgmmaE4m3, float, "+f", "f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__)
WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_E4M3(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69, 70)
#define WGMMA_8(N, COUNT, X0, X1, X2, X3, X4, X5, X6) \
  WGMMA_S8(N, COUNT, X0, X1, X2, X3, X4) \
  WGMMA_RS(WgmmaU8, int32_t, "+r", "s32.u8.s8", "", N, COUNT, X0, X1, X2, X3, X4, X5, X6)
WGMMA_8(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_8(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_8(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_8(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_8(112, 56, 56, 57, 58, 59, 60, 61, 62)
WGMMA_8(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_8(144, 72, 72, 73, 74, 75, 76, 77, 78)
WGMMA_8(160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA_8(176, 88, 88, 89, 90, 91, 92, 93, 94)
WGMMA_8(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_8(224, 112, 112, 113, 114, 115, 116, 117, 118)
WGMMA_8(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef WGMMA_8
#undef WGMMA_E4M3
#undef WGMMA_RS
#undef WGMMA_S8
// clang-format on
