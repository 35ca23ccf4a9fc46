// prims_score -- which keys a row may attend to, asked one by one and in ranges.
#include "prims/score.cuh"

extern "C" __global__ void score(const __grid_constant__ AttnParams p,
                                 int* may,         // [len_q, len_kv + 8]
                                 int* end,         // [len_q], of the rows [row, row + 4)
                                 int* unmasked) {  // [len_q]
  const int row = threadIdx.x, width = p.len_kv + 8;
  for (int key = 0; key < width; ++key) may[row * width + key] = admitted(p, row, key);
  end[row] = kv_end(p, row, 4);
  unmasked[row] = kv_unmasked(p, row);
}
