// prims_quantize_q -- the rows of a warpgroup as codes where wgmma reads them, two to a scale.
#include "prims/codes/quantize_q.cuh"

extern "C" __global__ void quantize_q_64(
    const elem_t* Q,  // [64, HEAD_DIM]
    int8_t* codes,    // [64, HEAD_DIM]
    float* scale,     // [64]
    int* arrived) {   // [1]
  __shared__ alignas(1024) int8_t numbers[Q_NUMBER_BOXES][64 * 128];
  __shared__ alignas(1024) int8_t made[CODE_BOXES][64 * 128];
  __shared__ Mbarrier empty;
  auto place = [](int row, int byte) {
    return row * 128 + ((byte / 16 ^ row % 8) * 16 + byte % 16);
  };
  if (thread_id() == 0) mbarrier_init(empty, NUM_WARPS);
  for (int i = thread_id(); i < 64 * Q_NUMBER_BOXES * 64; i += NUM_THREADS) {
    const int row = i / (Q_NUMBER_BOXES * 64), col = i % (Q_NUMBER_BOXES * 64);
    elem_t* to = reinterpret_cast<elem_t*>(&numbers[col / 64][place(row, col % 64 * 2)]);
    *to = col < HEAD_DIM ? Q[row * HEAD_DIM + col] : elem_t(0.0f);
  }
  __syncthreads();
  float of_rows[2];
  const int warp_row = warp_id() * 16;
  quantize_q(of_rows, made, numbers, empty, warp_row, 64, 1);
  mbarrier_wait_parity(empty, 0);  // every warp has said that it has read
  if (thread_id() == 0) *arrived = 1;
  for (int h = 0; h < 2; ++h)
    if (lane_id() % 4 == 0) scale[warp_row + lane_id() / 4 + 8 * h] = of_rows[h];
  for (int i = thread_id(); i < 64 * HEAD_DIM; i += NUM_THREADS) {
    const int row = i / HEAD_DIM, col = i % HEAD_DIM;
    codes[i] = made[col / 128][place(row, col % 128)];
  }
}
