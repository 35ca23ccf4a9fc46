// quant.cuh -- symmetric INT8 quantisation of one value, and the parameters of quantize.cu.
// Every operation is one IEEE rounding, named, so that none is contracted and all equal NumPy's:
// cupyattn/quant/quantizers.py does the same, bit for bit.
#pragma once

#include "prims/base.cuh"
#include "prims/params.cuh"

constexpr float INT8_MAX = 127.0f;               // largest code; -128 is not used
constexpr float SCALE_MIN = 0x1p-126f;           // smallest normal float: its inverse is finite
constexpr uint32_t INFINITY_BITS = 0x7f800000u;  // a magnitude from here on is infinite or NaN
constexpr float NOT_A_NUMBER = __builtin_bit_cast(float, 0x7fc00000u);

// cupyattn/quant/plan.py packs it from one table of (name, type); a test compares the two.
struct QuantizeParams {
  const void* X;              // [batch, heads, length, HEAD_DIM], the operand
  int8_t* codes;              // [batch, heads, length, HEAD_DIM], contiguous
  float* scale;               // [batch, heads, groups]
  const float* static_scale;  // [batch, heads, groups], of which scale is a copy; null: dynamic
  uint32_t* absmax;    // [batch, heads, groups], zero at first; null: a block finds it itself
  float* partial_sum;  // [batch, heads, splits, HEAD_DIM]
  float* mean;         // [batch, heads, HEAD_DIM], subtracted from X; null: nothing is
  Strides X_stride;
  int64_t scale_stride_batch;  // of scale, static_scale and absmax; 0 shares one scale
  int64_t scale_stride_head;
  int32_t heads;
  int32_t length;
  int32_t splits;      // slices of the rows that are summed side by side
  int32_t split_rows;  // rows of a slice
};

// |x| as an integer. Floats without sign compare as their bits do; infinity lies above every finite
// number and NaN above infinity, so a maximum of bits keeps what fmaxf would drop.
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

// Maximum over aligned groups of LANES lanes (a power of two); every lane gets the result.
template <int LANES>
__device__ __forceinline__ uint32_t shfl_max(uint32_t x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    x = max(x, __shfl_xor_sync(FULL_WARP, x, offset));
  return x;
}

struct Scale {
  float scale, inverse;
};

// absmax / 127 and 127 / absmax. A group of zeros has scale 1; a scale below SCALE_MIN is raised to
// it; NaN with inverse 0, hence codes 0, where the group holds a NaN or an infinity.
__device__ __forceinline__ Scale scale_of_absmax(uint32_t bits) {
  if (bits >= INFINITY_BITS) return {NOT_A_NUMBER, 0.0f};
  const float raised = fmaxf(__uint_as_float(bits), INT8_MAX * SCALE_MIN);
  return {bits == 0 ? 1.0f : __fdiv_rn(raised, INT8_MAX), __fdiv_rn(INT8_MAX, raised)};
}

// A given scale, or NaN where it is no finite number from SCALE_MIN up.
__device__ __forceinline__ Scale scale_of_static(float scale) {
  const bool usable = scale >= SCALE_MIN && magnitude_bits(scale) < INFINITY_BITS;
  return {usable ? scale : NOT_A_NUMBER, usable ? __fdiv_rn(1.0f, scale) : 0.0f};
}

// R1: the code of x, ties to even. |x| <= absmax makes it 127 at most; a NaN converts to 0.
__device__ __forceinline__ int code_s8(float x, float inverse) {
  return __float2int_rn(__fmul_rn(x, inverse));
}

// The same for a scale that does not come from the data: past 127 it saturates.
__device__ __forceinline__ int code_s8_saturated(float x, float inverse) {
  return min(max(code_s8(x, inverse), -127), 127);
}
