// prims_online_softmax -- one row per thread: admit maxima one after the other, add 1 to l each time
// that there is something to add.
#include "prims/score/online_softmax.cuh"

extern "C" __global__ void online_softmax(const float* maxima,  // [4, 32], log2 units
                                          float* alpha,         // [4, 32]
                                          float* M,             // [32]
                                          float* l,             // [32]
                                          float* inverse_l,     // [32]
                                          float* lse) {         // [32]
  const int row = threadIdx.x;
  RowState state;
  for (int step = 0; step < 4; ++step) {
    alpha[step * 32 + row] = state.advance(maxima[step * 32 + row]);
    if (maxima[step * 32 + row] != NEG_INF)
      state.l += ex2_approx_ftz(maxima[step * 32 + row] - state.M_finite());
  }
  M[row] = state.M_finite();
  l[row] = state.l;
  inverse_l[row] = state.inverse_l();
  lse[row] = state.lse();
}
