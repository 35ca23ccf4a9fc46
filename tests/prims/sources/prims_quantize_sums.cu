// prims_quantize_sums -- what the slices of a head come to. SUMS_FIRST: and where the first slice
// lay, what all of them do.
#include "prims/codes/quantize_sums.cuh"

extern "C" __global__ void slices(
    const __grid_constant__ QuantizeParams given,
    elem_t* X,           // [2, 70, 24]
    float* partial_sum,  // [2, 3, 24]
    uint32_t* extrema,   // [2, 3, 2, 24], as ordered_bits
    int32_t* summed) {   // [2]
  QuantizeParams p = given;
  p.X = X, p.partial_sum = partial_sum, p.extrema = extrema, p.summed_slices = summed;
  sum_slice<true, false>(p, blockIdx.x);
}
