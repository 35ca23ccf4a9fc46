// prims_nibbles -- words of eight 4-bit codes, unpacked: one a thread.
#include "prims/codes/nibbles.cuh"

extern "C" __global__ void nibbles(const uint32_t* words,  // [blockDim.x]
                                   uint32_t* codes) {      // [blockDim.x, 2], four to a word
  const Nibbles unpacked(words[threadIdx.x]);
  codes[threadIdx.x * 2] = unpacked.low;
  codes[threadIdx.x * 2 + 1] = unpacked.high;
}
