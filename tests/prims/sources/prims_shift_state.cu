// prims_shift_state -- one row of four lanes that hold alike: admit largest scores one after the
// other, and codes and weights with each; shift whole numbers as far as the last M asks.
#include "prims/score/shift_state.cuh"

extern "C" __global__ void shift_state(const float* largest,  // [STEPS, 32], log2 units, by lane
                                       const float* codes,    // [STEPS, 32], what they come to
                                       const float* weights,  // [STEPS, 32]
                                       const int* x,          // [STEPS, 32]
                                       int* shift,            // [STEPS, 32]
                                       int* y,                // [STEPS, 32]
                                       float* M,              // [STEPS, 32]
                                       float* l,              // [32]
                                       float* inverse_l,      // [32]
                                       float* lse) {          // [32]
  constexpr int STEPS = 6, WATCHED = 4;  // before step WATCHED it is looked at l
  const int lane = threadIdx.x;
  ShiftState state;
  for (int step = 0; step < STEPS; ++step) {
    const int i = step * 32 + lane;
    if (step == WATCHED) state.keep_in_range();
    shift[i] = state.advance(largest[i]);
    y[i] = shifted(x[i], right_shift(shift[i]));
    M[i] = state.M;
    state.l += codes[i];
    state.exact_l += weights[i];
  }
  l[lane] = state.l;
  inverse_l[lane] = state.inverse_l();
  lse[lane] = state.lse();
}
