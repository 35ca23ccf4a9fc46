// prims_fragment_rows -- in every lane: the largest of a row, a row of O times alpha.
#include "prims/score/fragment_rows.cuh"
#include "prims/instructions/warp.cuh"

extern "C" __global__ void fragment_rows(
    const float* x,   // [WARP_SIZE, 3, 4]
    float* largest,   // [WARP_SIZE, 2]: by other factors for each row and tile
    float* scaled) {  // [WARP_SIZE, 3, 4]: of row g times 1.5
  float S[3][4];
  for (int i = 0; i < 12; ++i) S[i / 4][i % 4] = x[lane_id() * 12 + i];
  auto factor = [&](int h, int n) { return float(3 * h + n + 1); };
  for (int h = 0; h < 2; ++h) find_largest(largest[lane_id() * 2 + h], S, h, factor);
  scale_row(S, 0, 1.5f);
  for (int i = 0; i < 12; ++i) scaled[lane_id() * 12 + i] = S[i / 4][i % 4];
}
