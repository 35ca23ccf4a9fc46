// wgmma.cuh -- warpgroup matrix instructions (sm_90a): D [64, N] += A [64, 16] B [16, N] by the
// 128 threads of a warpgroup, in the background. Accumulators and A fragments lie in registers as
// those of mma.cuh do, warp w holding rows 16 w to 16 w + 15; operands in shared memory are named
// by a descriptor. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "prims/mma.cuh"

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
// Keeps the compiler from moving uses of an accumulator across a wait.
template <int COUNT>
__device__ __forceinline__ void wgmma_use(float (&c)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
// Registers per thread from here on; every warp of the warpgroup must say so.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Names a tile of rows of 128 bytes in shared memory, swizzled over 128 bytes, its base 1024-byte
// aligned: 8 rows form an atom, the next 8 rows follow 1024 bytes later.
// NOTE: the halves are kept apart because a step along the tile changes the lower one alone; built
// anew for each instruction, descriptors took ten issue slots apiece.
struct Descriptor {
  uint32_t low;   // address / 16, and the distance between atoms along the contiguous axis / 16
  uint32_t high;  // 1024 / 16, and the swizzle
  // The same tile, `bytes` further on.
  __device__ __forceinline__ Descriptor operator+(int bytes) const {
    return {low + (bytes >> 4), high};
  }
};
// An operand whose rows run along k (K-major).
__device__ __forceinline__ Descriptor descriptor_k_major(const void* tile) {
  return {shared_address(tile) >> 4 | 1u << 16, 1u << 30 | 1024 >> 4};
}
// An operand whose rows run along n: the next 64 columns follow `column_bytes` later.
__device__ __forceinline__ Descriptor descriptor_n_major(const void* tile, int column_bytes) {
  return {shared_address(tile) >> 4 | uint32_t(column_bytes >> 4) << 16, 1u << 30 | 1024 >> 4};
}

// D = A B (+ D when accumulate) over 16-bit elements, float32 accumulation;
//   ss: A and B in shared memory, both K-major
//   rs: A in registers, B in shared memory, its rows along n; always accumulates
template <typename T, int N>
struct Wgmma;

// clang-format off
#define WGMMA_N64(T, TYPE) \
template <> \
struct Wgmma<T, 64> { \
  static __device__ __forceinline__ void ss(float (&c)[32], Descriptor a, Descriptor b, \
                                            bool accumulate) { \
    asm volatile( \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%32, %33};\nmov.b64 b, {%34, %35};\n" \
        "setp.ne.b32 p, %36, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " \
          "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
          "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
          "%30, %31" \
        "}, a, b, p, 1, 1, 0, 0;\n}\n" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
            "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), \
            "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), \
            "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
            "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), \
            "+f"(c[30]), "+f"(c[31]) \
        : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(int(accumulate))); \
  } \
  static __device__ __forceinline__ void rs(float (&c)[32], const uint32_t (&a)[4], \
                                            Descriptor b) { \
    asm volatile( \
        "{\n.reg .b64 b;\nmov.b64 b, {%36, %37};\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " \
          "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
          "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
          "%30, %31" \
        "}, {%32, %33, %34, %35}, b, 1, 1, 1, 1;\n}\n" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
            "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), \
            "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), \
            "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
            "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), \
            "+f"(c[30]), "+f"(c[31]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high)); \
  } \
};
WGMMA_N64(__half, "f16")
WGMMA_N64(__nv_bfloat16, "bf16")
#undef WGMMA_N64

#define WGMMA_N96(T, TYPE) \
template <> \
struct Wgmma<T, 96> { \
  static __device__ __forceinline__ void ss(float (&c)[48], Descriptor a, Descriptor b, \
                                            bool accumulate) { \
    asm volatile( \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%48, %49};\nmov.b64 b, {%50, %51};\n" \
        "setp.ne.b32 p, %52, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n96k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " \
          "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
          "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
          "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
          "%40, %41, %42, %43, %44, %45, %46, %47" \
        "}, a, b, p, 1, 1, 0, 0;\n}\n" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
            "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), \
            "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), \
            "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
            "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), \
            "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), \
            "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), \
            "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]) \
        : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(int(accumulate))); \
  } \
  static __device__ __forceinline__ void rs(float (&c)[48], const uint32_t (&a)[4], \
                                            Descriptor b) { \
    asm volatile( \
        "{\n.reg .b64 b;\nmov.b64 b, {%52, %53};\n" \
        "wgmma.mma_async.sync.aligned.m64n96k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " \
          "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
          "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
          "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
          "%40, %41, %42, %43, %44, %45, %46, %47" \
        "}, {%48, %49, %50, %51}, b, 1, 1, 1, 1;\n}\n" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
            "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), \
            "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), \
            "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
            "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), \
            "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), \
            "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), \
            "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high)); \
  } \
};
WGMMA_N96(__half, "f16")
WGMMA_N96(__nv_bfloat16, "bf16")
#undef WGMMA_N96

#define WGMMA_N128(T, TYPE) \
template <> \
struct Wgmma<T, 128> { \
  static __device__ __forceinline__ void ss(float (&c)[64], Descriptor a, Descriptor b, \
                                            bool accumulate) { \
    asm volatile( \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%64, %65};\nmov.b64 b, {%66, %67};\n" \
        "setp.ne.b32 p, %68, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " \
          "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
          "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
          "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
          "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
          "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
          "%60, %61, %62, %63" \
        "}, a, b, p, 1, 1, 0, 0;\n}\n" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
            "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), \
            "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), \
            "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
            "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), \
            "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), \
            "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), \
            "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), \
            "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), \
            "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), \
            "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]) \
        : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(int(accumulate))); \
  } \
  static __device__ __forceinline__ void rs(float (&c)[64], const uint32_t (&a)[4], \
                                            Descriptor b) { \
    asm volatile( \
        "{\n.reg .b64 b;\nmov.b64 b, {%68, %69};\n" \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " \
          "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
          "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
          "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
          "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
          "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
          "%60, %61, %62, %63" \
        "}, {%64, %65, %66, %67}, b, 1, 1, 1, 1;\n}\n" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
            "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), \
            "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), \
            "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
            "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), \
            "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), \
            "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), \
            "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), \
            "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), \
            "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), \
            "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high)); \
  } \
};
WGMMA_N128(__half, "f16")
WGMMA_N128(__nv_bfloat16, "bf16")
#undef WGMMA_N128

// clang-format on
