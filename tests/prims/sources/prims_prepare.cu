// prims_prepare -- rows normalised and turned by the lanes that share them, of a block of rows from
// row 3 of the second head on; and the sum of the squares of 64 numbers, neighbours first.
#include "prims/io/prepare.cuh"

constexpr int ROWS = 11, ROW0 = 3;

extern "C" __global__ void prepared(const __grid_constant__ NormParams given,
                                    const float* cos,     // [positions, ROPE_TABLE]
                                    const float* sin,     // [positions, ROPE_TABLE]
                                    const float* weight,  // [2, HEAD_DIM]
                                    const float* factor,  // [ROW0 + ROWS]
                                    const elem_t* X,      // [ROWS, HEAD_DIM], from ROW0 on
                                    elem_t* Y) {          // [ROWS, HEAD_DIM]
  NormParams p = given;
  p.cos = cos, p.sin = sin, p.weight = weight, p.token_factor = factor;
  const Preparation how(p, 1, ROW0, ROW0);
  constexpr int AT_ONCE = NUM_THREADS / PAIR_LANES;
  for (int done = 0; done < ROWS; done += AT_ONCE) {
    const int own = done + thread_id() / PAIR_LANES, row = min(own, ROWS - 1);
    PreparedRow x;
    x.load(X + row * HEAD_DIM);
    x.prepare(how, row);
    if (own == row) x.store(Y + row * HEAD_DIM);
  }
}

extern "C" __global__ void neighbours(const float* x,  // [32, 2]
                                      float* sums,     // [32]
                                      float* factor) {  // [1]
  float own[2] = {x[2 * lane_id()], x[2 * lane_id() + 1]};
  sums[lane_id()] = shfl_sum_of_neighbours<8>(sum_of_neighbours(own));
  if (lane_id() == 0) *factor = norm_factor(3.0f, 0.25f);
}
