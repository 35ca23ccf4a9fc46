// wgmma.cuh -- warpgroup matrix instructions (sm_90a): D [64, N] += A [64, 16] B [16, N] by the 128
// threads of a warpgroup, asynchronously. Accumulators and A fragments have the register layout of
// mma.cuh, with rows 16 w to 16 w + 15 in warp w. A descriptor names an operand in shared memory.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "prims/instructions/mma.cuh"

// Orders this thread's register and shared-memory accesses before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most PENDING groups of this warpgroup are still under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of registers that wgmma reads or writes across a wait.
template <int COUNT>
__device__ __forceinline__ void wgmma_use(float (&c)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void wgmma_use(int32_t (&c)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(c[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void wgmma_use(uint32_t (&a)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT * 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}
// A word of shared memory, read here. The compiler may move an ordinary read among the wgmmas
// before it, and the wgmma behind it then waits for it.
__device__ __forceinline__ int ld_volatile_shared(const int& word) {
  int value;
  asm volatile("ld.volatile.shared.s32 %0, [%1];"
               : "=r"(value)
               : "r"(shared_address(&word))
               : "memory");
  return value;
}
// Two floats of shared memory, read here.
__device__ __forceinline__ void ld_volatile_shared_v2(const float* words, float& x, float& y) {
  asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x), "=f"(y)
               : "r"(shared_address(words))
               : "memory");
}
// Registers per thread from here on; every warp of the warpgroup must execute this.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Stores matrices in the layout that ldmatrix_x4 of mma.cuh loads.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Names a tile of rows of 128 bytes in shared memory, swizzled over 128 bytes, with a 1024-byte
// aligned base. Eight rows form an atom, and the next eight follow 1024 bytes later.
// NOTE: the halves are separate because a step along the tile changes only the lower one.
// Descriptors that were built for each instruction took ten issue slots each.
struct Descriptor {
  uint32_t low;   // address / 16, and the distance between atoms along the contiguous axis / 16
  uint32_t high;  // 1024 / 16, and the swizzle
  // The same tile, `bytes` further on.
  __device__ __forceinline__ Descriptor operator+(int bytes) const {
    return {low + (bytes >> 4), high};
  }
  // The tile in another stage of a ring, of `bytes` each.
  __device__ __forceinline__ Descriptor stage(int stage, int bytes) const {
    return {low + stage * (bytes >> 4), high};
  }
};
// The same as one number. A step along the tile is one 64-bit addition, and wgmma takes its result
// as it is. The compiler moves halves into place for every instruction.
// NOTE: kernels that are short of registers spilled with these.
struct Descriptor64 {
  uint64_t bits;
  __device__ __forceinline__ explicit Descriptor64(uint64_t bits) : bits(bits) {}
  __device__ __forceinline__ Descriptor64(Descriptor rows)
      : bits(uint64_t(rows.high) << 32 | rows.low) {}
  __device__ __forceinline__ Descriptor64 operator+(int bytes) const {
    return Descriptor64(bits + uint64_t(bytes >> 4));
  }
  __device__ __forceinline__ Descriptor64 stage(int stage, int bytes) const {
    return Descriptor64(bits + uint32_t(stage * (bytes >> 4)));
  }
};
// The same descriptor, as if it were new. Otherwise the compiler computes the steps along its tile
// before a loop, and moves them into place for every instruction.
__device__ __forceinline__ Descriptor64 in_this_step(Descriptor64 rows) {
  asm volatile("" : "+l"(rows.bits));
  return rows;
}
// The address of a tile as descriptors have it.
// NOTE: in a cluster, the bits from 24 on are the rank of the block, which no field may get.
__device__ __forceinline__ uint32_t descriptor_start(const void* tile) {
  return (shared_address(tile) & 0x3FFFF) >> 4;
}
// An operand whose rows run along k (K-major).
__device__ __forceinline__ Descriptor descriptor_k_major(const void* tile) {
  return {descriptor_start(tile) | 1u << 16, 1u << 30 | 1024 >> 4};
}
// An operand whose rows run along n: the next 64 columns follow `column_bytes` later.
__device__ __forceinline__ Descriptor descriptor_n_major(const void* tile, int column_bytes) {
  return {descriptor_start(tile) | uint32_t(column_bytes >> 4) << 16, 1u << 30 | 1024 >> 4};
}

// Tells the compiler that a descriptor is the same in every lane: it cannot infer this through the
// stages of a ring.
__device__ __forceinline__ Descriptor uniform(Descriptor rows) {
  return {__shfl_sync(FULL_WARP, rows.low, 0), rows.high};
}

// D = A B (+ D when accumulate) over 16-bit elements, float32 accumulation;
//   ss: A and B in shared memory, both K-major
//   ss_minus: the same, but D -= A B; always accumulates
//   ss_columns: the same, but the rows of B along n
//   ss_across: the same, and the rows of A along m
//   rs: A in registers, B in shared memory, its rows along n; always accumulates
template <typename T, int N>
struct Wgmma;

// Accumulators as operands, eight at a time. NAMES_n are %0 to %(n - 1) in the text, and
// ACCUMULATORS_n are their n registers of kind R: "+f" or "+r".
// clang-format off
#define FOUR_ACCUMULATORS(R, i) R(c[i]), R(c[i + 1]), R(c[i + 2]), R(c[i + 3])
#define EIGHT_ACCUMULATORS(R, i) FOUR_ACCUMULATORS(R, i), FOUR_ACCUMULATORS(R, i + 4)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_36 NAMES_32 ", %32, %33, %34, %35"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_68 NAMES_64 ", %64, %65, %66, %67"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_80 NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_128 NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define ACCUMULATORS_8(R) EIGHT_ACCUMULATORS(R, 0)
#define ACCUMULATORS_16(R) ACCUMULATORS_8(R), EIGHT_ACCUMULATORS(R, 8)
#define ACCUMULATORS_24(R) ACCUMULATORS_16(R), EIGHT_ACCUMULATORS(R, 16)
#define ACCUMULATORS_32(R) ACCUMULATORS_24(R), EIGHT_ACCUMULATORS(R, 24)
#define ACCUMULATORS_36(R) ACCUMULATORS_32(R), FOUR_ACCUMULATORS(R, 32)
#define ACCUMULATORS_40(R) ACCUMULATORS_32(R), EIGHT_ACCUMULATORS(R, 32)
#define ACCUMULATORS_48(R) ACCUMULATORS_40(R), EIGHT_ACCUMULATORS(R, 40)
#define ACCUMULATORS_56(R) ACCUMULATORS_48(R), EIGHT_ACCUMULATORS(R, 48)
#define ACCUMULATORS_64(R) ACCUMULATORS_56(R), EIGHT_ACCUMULATORS(R, 56)
#define ACCUMULATORS_68(R) ACCUMULATORS_64(R), FOUR_ACCUMULATORS(R, 64)
#define ACCUMULATORS_72(R) ACCUMULATORS_64(R), EIGHT_ACCUMULATORS(R, 64)
#define ACCUMULATORS_80(R) ACCUMULATORS_72(R), EIGHT_ACCUMULATORS(R, 72)
#define ACCUMULATORS_88(R) ACCUMULATORS_80(R), EIGHT_ACCUMULATORS(R, 80)
#define ACCUMULATORS_96(R) ACCUMULATORS_88(R), EIGHT_ACCUMULATORS(R, 88)
#define ACCUMULATORS_104(R) ACCUMULATORS_96(R), EIGHT_ACCUMULATORS(R, 96)
#define ACCUMULATORS_112(R) ACCUMULATORS_104(R), EIGHT_ACCUMULATORS(R, 104)
#define ACCUMULATORS_120(R) ACCUMULATORS_112(R), EIGHT_ACCUMULATORS(R, 112)
#define ACCUMULATORS_128(R) ACCUMULATORS_120(R), EIGHT_ACCUMULATORS(R, 120)

// One instruction shape: N columns, COUNT = N / 2 accumulators, and the numbers of the operands
// that follow them in the text.
// NOTE: the functions are templates only so that NVRTC leaves the bodies of unused shapes unread.
// Reading them all took a tenth of the compile time of fa_tc.
#define WGMMA_OF(T, TYPE, N, COUNT, X0, X1, X2, X3, X4, X5, X6, X7) \
template <> \
struct Wgmma<T, N> { \
  template <int A_ALONG_M, int B_ALONG_N, int SIGN = 1> \
  static __device__ __forceinline__ void shared( \
      float (&c)[COUNT], Descriptor a, Descriptor b, bool accumulate) { \
    asm volatile( \
        "{\n.reg .pred p;\n.reg .b64 a, b;\n" \
        "mov.b64 a, {%" #X0 ", %" #X1 "};\nmov.b64 b, {%" #X2 ", %" #X3 "};\n" \
        "setp.ne.b32 p, %" #X4 ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " \
        "{" NAMES_##COUNT "}, a, b, p, %" #X7 ", 1, %" #X5 ", %" #X6 ";\n}\n" \
        : ACCUMULATORS_##COUNT("+f") \
        : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(int(accumulate)), \
          "n"(A_ALONG_M), "n"(B_ALONG_N), "n"(SIGN)); \
  } \
  template <int = 0> static __device__ __forceinline__ void rs( \
      float (&c)[COUNT], const uint32_t (&a)[4], Descriptor b) { \
    asm volatile( \
        "{\n.reg .b64 b;\nmov.b64 b, {%" #X4 ", %" #X5 "};\n" \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " \
        "{" NAMES_##COUNT "}, {%" #X0 ", %" #X1 ", %" #X2 ", %" #X3 "}, b, 1, 1, 1, 1;\n}\n" \
        : ACCUMULATORS_##COUNT("+f") \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high)); \
  } \
  template <int A_ALONG_M, int B_ALONG_N, int SIGN = 1> \
  static __device__ __forceinline__ void shared( \
      float (&c)[COUNT], Descriptor64 a, Descriptor64 b, bool accumulate) { \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" #X2 ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " \
        "{" NAMES_##COUNT "}, %" #X0 ", %" #X1 ", p, %" #X5 ", 1, %" #X3 ", %" #X4 ";\n}\n" \
        : ACCUMULATORS_##COUNT("+f") \
        : "l"(a.bits), "l"(b.bits), "r"(int(accumulate)), \
          "n"(A_ALONG_M), "n"(B_ALONG_N), "n"(SIGN)); \
  } \
  template <int = 0> static __device__ __forceinline__ void rs( \
      float (&c)[COUNT], const uint32_t (&a)[4], Descriptor64 b) { \
    asm volatile( \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " \
        "{" NAMES_##COUNT "}, {%" #X0 ", %" #X1 ", %" #X2 ", %" #X3 "}, %" #X4 ", 1, 1, 1, 1;\n" \
        : ACCUMULATORS_##COUNT("+f") \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits)); \
  } \
  template <typename Rows> static __device__ __forceinline__ void ss( \
      float (&c)[COUNT], Rows a, Rows b, bool accumulate) { \
    shared<0, 0>(c, a, b, accumulate); \
  } \
  template <typename Rows> static __device__ __forceinline__ void ss_minus( \
      float (&c)[COUNT], Rows a, Rows b) { \
    shared<0, 0, -1>(c, a, b, true); \
  } \
  template <typename Rows> static __device__ __forceinline__ void ss_columns( \
      float (&c)[COUNT], Rows a, Rows b, bool accumulate) { \
    shared<0, 1>(c, a, b, accumulate); \
  } \
  template <typename Rows> static __device__ __forceinline__ void ss_across( \
      float (&c)[COUNT], Rows a, Rows b, bool accumulate) { \
    shared<1, 1>(c, a, b, accumulate); \
  } \
};
#define WGMMA(...) \
  WGMMA_OF(__half, "f16", __VA_ARGS__) \
  WGMMA_OF(__nv_bfloat16, "bf16", __VA_ARGS__)
WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22, 23)
WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38, 39)
WGMMA(72, 36, 36, 37, 38, 39, 40, 41, 42, 43)
WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46, 47)
WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54, 55)
WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62, 63)
WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70, 71)
WGMMA(136, 68, 68, 69, 70, 71, 72, 73, 74, 75)
WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78, 79)
WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86, 87)
WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94, 95)
WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102, 103)
WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118, 119)
WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134, 135)
#undef WGMMA
#undef WGMMA_OF
// clang-format on
