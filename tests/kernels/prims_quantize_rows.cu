// prims_quantize_rows -- 29 rows of the second head, less a mean: how far they reach, as whole
// numbers, and the sums of these.
#include "prims/quantize_rows.cuh"

extern "C" __global__ void quantize_rows(
    const __grid_constant__ QuantizeParams given,
    elem_t* X,          // [2, 29, 40]
    float* mean,        // [2, 24]
    int8_t* codes,      // [2, 29, 24]
    int32_t* code_sum,  // [2, 29]
    uint32_t* reach) {  // [29, SIDES]
  QuantizeParams p = given;
  p.X = X, p.mean = mean, p.codes = codes, p.code_sum = code_sum;
  Place at(p, 1, BLOCK_ROWS);
  at.head = at.batch_head = 1;
  Rows rows;
  rows.load(p, at);
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = row_of(pass);
    const Reach found = shfl_max<LANES>(rows.reach(pass));
    int sum = 0;
    if (row < at.rows) {
      for (int i = 0; i < SIDES && lane_in_row() == 0; ++i) reach[row * SIDES + i] = found.bits[i];
      sum = rows.store(at.codes(p) + row * HEAD_DIM, pass, [](float x) { return int(x); });
    }
    store_code_sum(at.code_sum(p), row, at.rows, sum);
  }
}
