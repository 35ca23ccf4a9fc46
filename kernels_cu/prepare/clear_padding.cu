// clear_padding -- rows of O and lse past the query rows that a padded batch entry has: 0 and -inf.
//
// Idea         A separate launch, so kernels of attention skip tiles of only padding and store only
//              computed rows. It writes the other rows, and reads only the lengths.
// Kept simple  BLOCK_Q rows to a block; a block without padding ends at once.
// Mirror       cupyattn.reference.attention_mirror, whose rows past a length are 0 and -inf
#include "prims/config.cuh"
#include "prims/io/rope.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/params.cuh"

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void clear_padding(
    const __grid_constant__ AttnParams call) {
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = blockIdx.x % q_blocks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  const int first = max(q0, p.len_q), rows = min(q0 + BLOCK_Q, call.len_q) - first;
  if (rows <= 0) return;
  elem_t* O = static_cast<elem_t*>(p.O)  // [rows, HEAD_DIM]
              + batch * p.O_stride.batch + head * p.O_stride.head + first * p.O_stride.len;
  constexpr int ACCESSES = HEAD_DIM / VEC;  // per row
  for (int i = thread_id(); i < rows * ACCESSES; i += NUM_THREADS)
    st_global(O + i / ACCESSES * p.O_stride.len + i % ACCESSES * VEC, Vec<elem_t, VEC>{});
  if constexpr (LSE)
    for (int i = thread_id(); i < rows; i += NUM_THREADS)
      lse_of(p, batch_head, head)[first + i] = NEG_INF;
}
