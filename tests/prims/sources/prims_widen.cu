// Every code, four to a word, as float16 or bfloat16.
#include "prims/codes/widen.cuh"

extern "C" __global__ void widen(
    const uint32_t* codes /* [64] */, uint32_t* pairs /* [64, 2] */) {
  uint32_t own[2];
  widen_codes<elem16_t>(own, codes[threadIdx.x]);
  for (int i = 0; i < 2; ++i) pairs[2 * threadIdx.x + i] = own[i];
}
