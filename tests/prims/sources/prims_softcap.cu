// prims_softcap -- softcap of four scores in every lane, a warp for each row of scores.
#include "prims/score/softcap.cuh"

constexpr int SCORES = 4;  // of a lane

extern "C" __global__ void capped(
    const __grid_constant__ ScoreParams s,
    const float* x,  // [gridDim.x, WARP_SIZE, SCORES]
    float* y,        // [gridDim.x, WARP_SIZE, SCORES]
    float* sign) {   // [gridDim.x, WARP_SIZE, SCORES], 0 of a NaN
  const int first = (blockIdx.x * WARP_SIZE + lane_id()) * SCORES;
  float S[SCORES];
  for (int i = 0; i < SCORES; ++i) S[i] = x[first + i];
  softcap(s, S);
  for (int i = 0; i < SCORES; ++i) {
    y[first + i] = S[i];
    sign[first + i] = isnan(S[i]) ? 0.0f : copysignf(1.0f, S[i]);
  }
}
