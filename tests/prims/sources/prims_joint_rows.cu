// Kernels that run the primitives of prims/io/joint_rows.cuh alone.
#include "prims/io/joint_rows.cuh"

// The first element of a row for each thread.
extern "C" __global__ void first_elements(
    const __grid_constant__ JointRowsParams<true> given,
    const elem_t* first,    // [batch, split, columns], rows `stride` apart
    const elem_t* below,    // [batch, joint_rows - split, columns]
    const int32_t* stride,  // [1]
    elem_t* found) {        // [rows]
  JointRowsParams<true> p = given;
  p.below = below;
  found[threadIdx.x] = *row_of(p, first, int(threadIdx.x), *stride);
}
