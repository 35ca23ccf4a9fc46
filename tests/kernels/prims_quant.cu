// prims_quant -- scales and codes, one group per thread.
#include "prims/quant.cuh"
#include "prims/warp.cuh"

extern "C" __global__ void quant(const float* absmax,        // [64]
                                 const float* x,             // [64]
                                 const float* static_scale,  // [64]
                                 uint32_t* bits,             // [64]
                                 uint32_t* bits_max4,        // [64]
                                 float* scales,              // [4, 64]: dynamic, static; inverses
                                 int* codes) {               // [2, 64]: dynamic, static
  const int i = thread_id();
  bits[i] = magnitude_bits(absmax[i]);
  bits_max4[i] = shfl_max<4>(bits[i]);
  const Scale found = scale_of_absmax(bits[i]), given = scale_of_static(static_scale[i]);
  scales[i] = found.scale;
  scales[64 + i] = given.scale;
  scales[128 + i] = found.inverse;
  scales[192 + i] = given.inverse;
  codes[i] = code_s8(x[i], found.inverse);
  codes[64 + i] = code_s8_saturated(x[i], given.inverse);
}

extern "C" __global__ void quant_zero(const float* x,       // [64], groups of 4
                                      float* scales,        // [64]
                                      int* zeros,           // [64]
                                      int* codes,           // [2, 64]: of make, saturated
                                      int* sums) {          // [64]
  const int i = thread_id();
  Reach reach = {};
  reach.admit(x[i]);
  reach = shfl_max<4>(reach);
  Coding coding;
  scales[i] = coding.make(reach.bits);
  zeros[i] = coding.zero;
  codes[i] = coding.code(x[i]);
  codes[64 + i] = reach.is_finite() ? coding.saturated(x[i]) : 0;
  sums[i] = shfl_sum<4>(codes[i]);
}
