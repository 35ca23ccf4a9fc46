// prims_quant -- scales and codes, one group per thread.
#include "prims/codes/quant.cuh"
#include "prims/instructions/warp.cuh"

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

template <int N>
__device__ void read_words(const int8_t* codes, float* numbers) {
  for (int first = N * thread_id(); first < 256; first += N * 32)
    for (int j = 0; j < N; ++j)
      numbers[first + j] = reinterpret_cast<const Words<int8_t, N>*>(codes + first)->element(j);
}

extern "C" __global__ void quant_words(const int8_t* codes,  // [256]
                                       float* numbers) {     // [4, 256]: 1, 2, 4, 8 to an access
  read_words<1>(codes, numbers);
  read_words<2>(codes, numbers + 256);
  read_words<4>(codes, numbers + 512);
  read_words<8>(codes, numbers + 768);
}
