// prims_quantize_sums -- what the slices of a head come to. SUMS_FIRST: and the published sums of
// all, with the extrema of all in place of the first.
#include "prims/codes/quantize_sums.cuh"

extern "C" __global__ void slices(
    const __grid_constant__ QuantizeParams given,
    elem_t* X,             // [2, 70, 24]
    float* partial_sum,    // [2, 3, 24]
    uint32_t* extrema,     // [2, 3, 2, 24], as ordered_bits
    int32_t* summed,       // [2]
    uint64_t* head_sum) {  // [2, 24]
  QuantizeParams p = given;
  p.head_sum = head_sum;
  p.X = X, p.partial_sum = partial_sum, p.extrema = extrema, p.summed_slices = summed;
  sum_slice<true, false>(p, blockIdx.x);
}
