// ptx_float -- float32 arithmetic in every rounding mode, flushed and saturated; conversions; and
// the approximate instructions. Rows are in the order of tests/interpret/ptx_cases.py.
#include "prims/base.cuh"

constexpr int COUNT = 256;

#define ROW(TEXT, RESULT, TYPE, ...)                    \
  do {                                                  \
    TYPE r;                                             \
    asm volatile(TEXT : RESULT(r) : __VA_ARGS__);       \
    y[row++ * COUNT + i] = r;                           \
  } while (0)
#define FLOAT1(NAME) ROW(NAME " %0, %1;", "=f", float, "f"(a))
#define FLOAT2(NAME) ROW(NAME " %0, %1, %2;", "=f", float, "f"(a), "f"(b))
#define FLOAT3(NAME) ROW(NAME " %0, %1, %2, %3;", "=f", float, "f"(a), "f"(b), "f"(c))
#define EVERY_ROUNDING(ROW, NAME, TYPE) \
  ROW(NAME ".rn" TYPE);                 \
  ROW(NAME ".rz" TYPE);                 \
  ROW(NAME ".rm" TYPE);                 \
  ROW(NAME ".rp" TYPE)

extern "C" __global__ void arithmetic(
    const float* x,  // [3, COUNT]
    float* y) {      // [rows, COUNT]
  const int i = threadIdx.x;
  const float a = x[i], b = x[COUNT + i], c = x[2 * COUNT + i];
  int row = 0;
  EVERY_ROUNDING(FLOAT2, "add", ".f32");
  EVERY_ROUNDING(FLOAT2, "sub", ".ftz.f32");
  EVERY_ROUNDING(FLOAT2, "mul", ".f32");
  EVERY_ROUNDING(FLOAT2, "mul", ".ftz.f32");
  EVERY_ROUNDING(FLOAT3, "fma", ".f32");
  EVERY_ROUNDING(FLOAT3, "fma", ".ftz.f32");
  EVERY_ROUNDING(FLOAT2, "div", ".f32");
  FLOAT2("add.sat.f32");
  FLOAT2("mul.sat.f32");
  FLOAT3("fma.rn.ftz.sat.f32");
  FLOAT2("min.f32");
  FLOAT2("max.f32");
  FLOAT2("max.ftz.f32");
  FLOAT2("min.NaN.f32");
  FLOAT2("max.NaN.f32");
}

// Square roots and reciprocals, of positive numbers.
extern "C" __global__ void roots(
    const float* x,  // [COUNT]
    float* y) {      // [rows, COUNT]
  const int i = threadIdx.x;
  const float a = x[i];
  int row = 0;
  EVERY_ROUNDING(FLOAT1, "sqrt", ".f32");
  EVERY_ROUNDING(FLOAT1, "rcp", ".f32");
}

#define APPROXIMATION(ENTRY, NAME)                                  \
  extern "C" __global__ void ENTRY(const float* x, float* y) {      \
    const int i = threadIdx.x;                                      \
    const float a = x[i];                                           \
    int row = 0;                                                    \
    FLOAT1(NAME);                                                   \
  }
APPROXIMATION(approximate_ex2, "ex2.approx.f32")
APPROXIMATION(approximate_lg2, "lg2.approx.f32")
APPROXIMATION(approximate_rcp, "rcp.approx.f32")
APPROXIMATION(approximate_sqrt, "sqrt.approx.f32")
APPROXIMATION(approximate_rsqrt, "rsqrt.approx.f32")
APPROXIMATION(approximate_sin, "sin.approx.f32")
APPROXIMATION(approximate_cos, "cos.approx.f32")
APPROXIMATION(approximate_tanh, "tanh.approx.f32")

extern "C" __global__ void approximate_div(const float* x, float* y) {  // [2, COUNT] each
  const int i = threadIdx.x;
  const float a = x[i], b = x[COUNT + i];
  int row = 0;
  FLOAT2("div.approx.f32");
  FLOAT2("div.full.f32");
}

#define TO_16(NAME) ROW(NAME " %0, %1;", "=h", uint16_t, "f"(a))
#define TO_32(NAME) ROW(NAME " %0, %1;", "=r", uint32_t, "f"(a))
#define TO_PAIR(NAME) ROW(NAME " %0, %1, %2;", "=r", uint32_t, "f"(a), "f"(b))

extern "C" __global__ void conversions(
    const float* x,  // [2, COUNT]
    uint32_t* y) {   // [rows, COUNT]
  const int i = threadIdx.x;
  const float a = x[i], b = x[COUNT + i];
  int row = 0;
  TO_16("cvt.rn.f16.f32");
  TO_16("cvt.rz.f16.f32");
  TO_16("cvt.rn.sat.f16.f32");
  TO_16("cvt.rn.bf16.f32");
  TO_16("cvt.rz.bf16.f32");
  TO_PAIR("cvt.rn.f16x2.f32");
  TO_PAIR("cvt.rz.bf16x2.f32");
  TO_PAIR("cvt.rn.relu.f16x2.f32");
  TO_32("cvt.rna.tf32.f32");
  TO_32("cvt.rni.s32.f32");
  TO_32("cvt.rzi.s32.f32");
  TO_32("cvt.rmi.s32.f32");
  TO_32("cvt.rpi.s32.f32");
  TO_32("cvt.rzi.u32.f32");
  TO_32("cvt.rni.ftz.s8.f32");
  TO_32("cvt.rzi.u8.f32");
  const int n = __float_as_int(a);
  ROW("cvt.sat.s8.s32 %0, %1;", "=r", uint32_t, "r"(n));
  ROW("cvt.sat.u8.s32 %0, %1;", "=r", uint32_t, "r"(n));
  ROW("cvt.sat.u16.s32 %0, %1;", "=r", uint32_t, "r"(n));
  ROW("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;", "=r", uint32_t, "r"(n >> 20), "r"(n >> 7),
      "r"(0x12345678));
  ROW("cvt.pack.sat.s16.s32 %0, %1, %2;", "=r", uint32_t, "r"(n >> 8), "r"(n >> 20));
#define FROM_INTEGER(NAME)                                          \
  do {                                                              \
    float r;                                                        \
    asm volatile(NAME " %0, %1;" : "=f"(r) : "r"(n));               \
    y[row++ * COUNT + i] = __float_as_uint(r);                      \
  } while (0)
  EVERY_ROUNDING(FROM_INTEGER, "cvt", ".f32.s32");
  FROM_INTEGER("cvt.rz.f32.u32");
}

#if __CUDA_ARCH__ >= 890
extern "C" __global__ void eight_bits(
    const float* x,  // [2, COUNT]
    uint32_t* y) {   // [rows, COUNT]
  const int i = threadIdx.x;
  const float a = x[i], b = x[COUNT + i];
  int row = 0;
  ROW("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;", "=h", uint16_t, "f"(a), "f"(b));
  ROW("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;", "=h", uint16_t, "f"(a), "f"(b));
  ROW("cvt.rn.satfinite.relu.e4m3x2.f32 %0, %1, %2;", "=h", uint16_t, "f"(a), "f"(b));
  ROW("cvt.rn.f16x2.e4m3x2 %0, %1;", "=r", uint32_t, "h"(static_cast<uint16_t>(i * 257)));
}
#endif
