// backward_sums -- last pass of the gradients if blocks of keys added up dQ in memory: converts it.
//
// Idea         dQ in float32 times the softmax scale, rounded once.
// Kept simple  A pass over memory, two columns to a thread.
// Rounding     R12 times scale, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/score/gradient.cuh"
#include "prims/instructions/warp.cuh"

constexpr int PAIRS = ceil_div(HEAD_DIM, 2);  // of the columns of a row

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_sums(
    const __grid_constant__ AttnParams call, const __grid_constant__ BackwardParams grad) {
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = blockIdx.x % q_blocks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  const int64_t first = Sequences<VARLEN>(call, batch).first_row() + q0;
  const int64_t entry = VARLEN ? head * call.total_q : batch_head * call.len_q;
  const float* sum = grad.dQ_sum + (entry + first) * HEAD_DIM;  // [rows, HEAD_DIM], contiguous
  elem_t* dQ = static_cast<elem_t*>(grad.dQ)                    // [rows, HEAD_DIM]
               + batch * grad.dQ_stride.batch + head * grad.dQ_stride.head +
               first * grad.dQ_stride.len;
  const int rows = min(BLOCK_Q, p.len_q - q0);  // VARLEN: none where not positive
  for (int i = thread_id(); i < rows * PAIRS; i += NUM_THREADS) {
    const int row = i / PAIRS, col = i % PAIRS * 2;
    const float* x = sum + row * HEAD_DIM + col;  // [2], or [1] at the end of an odd row
    const float y = col + 1 < HEAD_DIM ? x[1] : 0.0f;
    store_pair(dQ + row * grad.dQ_stride.len, col, x[0] * p.scale, y * p.scale);  // R12
  }
}
