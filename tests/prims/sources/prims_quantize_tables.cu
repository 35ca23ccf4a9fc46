// prims_quantize_tables -- rows of two passes, rotated by tables in shared memory. The rows of the
// tables are requested in the opposite order.
#include "prims/codes/quantize_tables.cuh"

extern "C" __global__ void rotate(
    const float* cos,  // [16, HEAD_DIM]
    const float* sin,  // [16, HEAD_DIM]
    const float* X,    // [16, HEAD_DIM]
    float* Y) {        // [16, HEAD_DIM]
  constexpr int PASSES = 2, LAST = PASSES * ROWS_PER_PASS - 1;
  static_assert(LAST == 15);
  __shared__ SharedTables<PASSES> tables;
  PrepareParams<true> p = {};
  p.cos = cos, p.sin = sin;
  for (int pass = 0; pass < PASSES; ++pass)
    tables.request(Preparation(p, 0, 0, 0), pass, [](int row) { return LAST - row; });
  cp_async_commit_group();
  tables.await();
  for (int pass = 0; pass < PASSES; ++pass) {
    PreparedRow row;
    row.load(X + row_of(pass) * HEAD_DIM);
    tables.turn(row, pass);
    for (int access = 0; access < LANE_ACCESSES; ++access)
      for (int j = 0; j < VEC; ++j)
        Y[row_of(pass) * HEAD_DIM + col_of(access) + j] = row.element(access, j);
  }
}
