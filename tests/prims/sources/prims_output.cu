// prims_output -- the first ROWS of 16 rows of O from a warp's fragment, in each of the ways.
#include "prims/io/output.cuh"

constexpr int O_COLS = round_up(HEAD_DIM, 32), COUNT = O_COLS / 2, ROWS = 13;

__device__ __forceinline__ void load_fragment(float (&O)[COUNT], const float* x) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) O[i] = x[lane_id() * COUNT + i];
}
__device__ __forceinline__ void round_fragment(uint32_t (&O_frag)[O_COLS / 8][2], const float* x) {
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    const float* pair = x + lane_id() * COUNT + 2 * i;  // [2]
    O_frag[i / 2][i % 2] = pack_rn<elem16_t>(pair[0], pair[1]);
  }
}

// Twice: the second has to wait for the first.
extern "C" __global__ void copy_engine(
    const __grid_constant__ TensorMap to_map,
    const float* x) {  // [32, COUNT]
  __shared__ alignas(1024) elem_t O_rows[OWN_BOXES];
  float O[COUNT];
  for (int time = 0; time < 2; ++time) {
    load_fragment(O, x);
    if (time == 0)
      for (float& one : O) one = -one;
    store_output<true>(nullptr, 0, ROWS, O, O_rows, to_map, 0, time, 0);
  }
  if (lane_id() == 0) cp_async_bulk_wait_group_read();
}

extern "C" __global__ void own_warp(
    elem_t* to,        // [16, HEAD_DIM]
    const float* x) {  // [32, COUNT]
  __shared__ alignas(1024) elem_t O_rows[OWN_BOXES];
  OutputFragment<O_COLS> O_frag;
  round_fragment(O_frag, x);
  stage_output<OWN_BOX>(O_rows, O_frag);
  store_rows<OWN_BOX>(to, HEAD_DIM, O_rows, ROWS);
}

extern "C" __global__ void registers(
    elem_t* to,        // [16, HEAD_DIM]
    const float* x) {  // [32, COUNT]
  OutputFragment<O_COLS> O_frag;
  round_fragment(O_frag, x);
  store_fragment(to, HEAD_DIM, ROWS, O_frag);
}
