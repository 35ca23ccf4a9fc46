// joint_rows.cuh -- rows of a concatenation that is never stored. The first rows of each batch
// entry lie in one tensor, the others in a second tensor, `below`.
#pragma once

#include "prims/config.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
template <bool>
struct JointRowsParams {};
template <>
struct JointRowsParams<true> {
  const void* below;           // [batch, joint_rows - split, columns] of elem_t
  int64_t batch_stride;        // of the first tensor, [batch, split, columns]: elements
  int64_t below_batch_stride;  // elements
  int64_t below_stride;        // from one row to the next
  int32_t split;               // rows of a batch entry in the first tensor
  int32_t joint_rows;          // of a batch entry in both
};

// A row of a tensor whose rows are `stride` elements apart; JOINT_ROWS: of this tensor and `below`.
template <class Params>
__device__ __forceinline__ const elem_t* row_of(
    const Params& p, const void* first, int row, int64_t stride) {
  if constexpr (JOINT_ROWS) {
    const int entry = row / p.joint_rows, own = row % p.joint_rows;
    const bool second = own >= p.split;
    const int64_t batch_stride = second ? p.below_batch_stride : p.batch_stride;
    return static_cast<const elem_t*>(second ? p.below : first) + entry * batch_stride +
           (second ? own - p.split : own) * (second ? p.below_stride : stride);
  } else {
    return static_cast<const elem_t*>(first) + row * stride;
  }
}
