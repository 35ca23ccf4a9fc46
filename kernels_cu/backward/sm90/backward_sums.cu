// backward_sums -- Hopper form: last pass of the gradients, rows of dQ from sums in memory.
//
// Idea         The pass behind sm90/backward_keys.cu. The sums in memory lie in the order of its
//              accumulators. A warpgroup reads 64 rows and 64 columns in this order, and stores
//              them as rows.
// Differs from the portable form: there sums have the layout of dQ.
// Kept simple  A pass over memory, one warpgroup for 64 columns.
// Rounding     R12 times scale, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/io/gradient_sm90.cuh"
#include "prims/instructions/warp.cuh"

static_assert(BLOCK_Q == 64, "BLOCK_Q must be 64, the rows of a tile of sums");
static_assert(
    NUM_WARPS == 4 * QUERY_SUMS_BOXES, "NUM_WARPS must be 4 for every 64 columns of HEAD_DIM");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_sums(
    const __grid_constant__ AttnParams call, const __grid_constant__ BackwardParams grad) {
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = blockIdx.x % q_blocks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const int box = warp_id() / 4, row = q0 + warp_id() % 4 * 16 + lane_id() / 4;
  elem_t* dQ = static_cast<elem_t*>(grad.dQ)  // [len_q, HEAD_DIM]
               + batch * grad.dQ_stride.batch + head * grad.dQ_stride.head +
               Sequences<VARLEN>(call, batch).first_row() * grad.dQ_stride.len;
  float sums[QUERY_SUMS] = {};  // [8][4]
  gather_query_sums(sums, query_sums(call, grad, batch, head, q0, box));
  store_gradient(dQ, grad.dQ_stride.len, row, p.len_q, box * 64, sums, p.scale);  // R12
}
