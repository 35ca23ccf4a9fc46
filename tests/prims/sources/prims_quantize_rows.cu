// prims_quantize_rows -- 29 rows of the second head, less a mean: how far they and their groups
// reach, they as whole numbers, and the sums of these.
#include "prims/codes/quantize_rows.cuh"

extern "C" __global__ void quantize_rows(
    const __grid_constant__ QuantizeParams given,
    elem_t* X,                // [2, 29, 40]
    float* mean,              // [2, 24]
    int8_t* codes,            // [2, 29, 32], of which 24 columns are codes
    int32_t* code_sum,        // [2, 29]
    uint32_t* reach,          // [29, SIDES]
    uint32_t* group_reach) {  // [2, SIDES]
  QuantizeParams p = given;
  p.X = X, p.codes = codes, p.code_sum = code_sum;
  using Whole = Cut<BLOCK_Q, GROUP_Q, 1, true>;
  Place at(p, 1, Whole::ROWS);
  __shared__ uint32_t of_groups[Whole::GROUPS * SIDES];
  __shared__ float of_head[HEAD_DIM];
  if (thread_id() < Whole::GROUPS * SIDES) of_groups[thread_id()] = 0;
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS)
    of_head[col] = mean[HEAD_DIM + col];
  Rows<Whole> rows;
  rows.load(p, at);
  __syncthreads();
  rows.begin(of_head, p, at);
  for (int pass = 0; pass < Whole::PASSES; ++pass) {
    const Reach found = shfl_max<LANES>(rows.reach(pass));
    if (row_of(pass) < at.rows && lane_in_row() == 0)
      for (int i = 0; i < SIDES; ++i) reach[row_of(pass) * SIDES + i] = found.bits[i];
  }
  rows.raise(of_groups);
  __shared__ Coding coding[Whole::GROUPS];
  if (thread_id() < Whole::GROUPS) coding[thread_id()] = {}, coding[thread_id()].inverse = 1.0f;
  __syncthreads();  // scales are there before a row is coded with them
  rows.store<false>(p, at, coding);
  __syncthreads();  // and the reach of the groups before it leaves
  if (thread_id() < Whole::GROUPS * SIDES) group_reach[thread_id()] = of_groups[thread_id()];
}
