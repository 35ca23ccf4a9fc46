// nibbles.cuh -- 4-bit codes, two to a byte, the even column in the low half, as in cupyattn.quant.
#pragma once

#include "prims/config.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct UnpackParams {
  const uint8_t* X;  // [batch, heads, length, ceil(HEAD_DIM / 2)], strided
  int8_t* Y;         // [batch, heads, length, CODES_PITCH], contiguous
  int64_t X_stride_batch, X_stride_head, X_stride_len;
  int32_t heads;
  int32_t length;
};

// The codes of four bytes, the first in the lowest byte: each half keeps its sign.
struct Nibbles {
  uint32_t low, high;  // codes 0 to 3 and 4 to 7
  __device__ __forceinline__ explicit Nibbles(uint32_t packed) {
    const uint32_t even = with_sign(packed & 0x0f0f0f0fu);
    const uint32_t odd = with_sign(packed >> 4 & 0x0f0f0f0fu);
    low = __byte_perm(even, odd, 0x5140);
    high = __byte_perm(even, odd, 0x7362);
  }
  // Bytes of 0 to 15 as -8 to 7: bit 3 goes to bits 4 to 7 as well.
  static __device__ __forceinline__ uint32_t with_sign(uint32_t bytes) {
    return bytes | (bytes & 0x08080808u) * 0x1eu;
  }
};
