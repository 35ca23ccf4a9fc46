// prims_rcp -- one reciprocal per thread, and its sign: that of zero counts.
#include "prims/instructions/rcp.cuh"

extern "C" __global__ void reciprocal(
    const float* x, float* y, float* sign) {  // [blockDim.x], each
  const float inverse = rcp_approx_ftz(x[threadIdx.x]);
  y[threadIdx.x] = inverse;
  sign[threadIdx.x] = isnan(inverse) ? 0.0f : copysignf(1.0f, inverse);
}
