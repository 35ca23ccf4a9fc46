// prims_p_codes -- P of four numbers a lane as codes, and a product of codes with codes of V.
#include "prims/codes/p_codes.cuh"
#include "prims/instructions/warp.cuh"

extern "C" __global__ void p_codes(
    const float* x,    // [4, 32] weights in units of code 1
    const uint8_t* A,  // [16, 32] codes of P
    const uint8_t* B,  // [8, 32] codes of V
    uint32_t* codes,   // [32], the first in the low byte
    float* C) {        // [16, 8]
  const int lane = lane_id();
  codes[lane] = pack_p_codes(x[lane], x[32 + lane], x[64 + lane], x[96 + lane]);
  const int g = lane_id() / 4, t = lane_id() % 4;
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = *reinterpret_cast<const uint32_t*>(A + (g + i % 2 * 8) * 32 + i / 2 * 16 + 4 * t);
  for (int i = 0; i < 2; ++i)
    b[i] = *reinterpret_cast<const uint32_t*>(B + g * 32 + i * 16 + 4 * t);
  p_sum_t c[4] = {1, 1, 1, 1};
  mma_p_codes(c, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) C[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = float(c[i]);
}
