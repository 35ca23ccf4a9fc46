// base.cuh -- definitions that NVRTC lacks: fixed-width integers, infinity, small integer helpers.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);
constexpr float LOG2E = 1.44269504088896340736f;  // log2(e): natural exponent to base 2
constexpr float LN2 = 0.69314718055994530942f;    // ln(2): base 2 back to natural

constexpr int WARP_SIZE = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;  // every lane takes part

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int round_down(int a, int b) { return a / b * b; }
__host__ __device__ constexpr int power_of_two_from(int n) {
  return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2);
}
__host__ __device__ constexpr int greatest_common_divisor(int a, int b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}

// x, or y if x is infinite or NaN.
__device__ __forceinline__ float finite_or(float x, float y) { return x - x == 0.0f ? x : y; }

// N values that travel as one access of N * sizeof(T) bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Checked only with CUPYATTN_DEBUG=1: prints the place and the sentence, then stops the kernel.
#ifdef CUPYATTN_DEBUG
extern "C" __device__ int printf(const char*, ...);
#define device_assert(condition, sentence)                                        \
  do {                                                                            \
    if (!(condition)) {                                                           \
      printf(                                                                     \
          "%s:%d: block %d thread %d: %s\n", __FILE__, __LINE__, (int)blockIdx.x, \
          (int)threadIdx.x, sentence);                                            \
      __trap();                                                                   \
    }                                                                             \
  } while (0)
#else
#define device_assert(condition, sentence) ((void)0)
#endif
