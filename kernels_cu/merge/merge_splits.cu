// merge_splits -- merges partial results over disjoint keys (forms/split/attn_fa_tc.cu).
//
// A part has its own maximum M, sum l and output O; times 2^(M - the largest M) they may be added.
// Enough warps share a query row that each has few parts, and a block takes as many rows as its
// warps allow. So many parts are read at once, and rows with few parts need no block each. Warps
// share the parts, lanes the columns, and all sums have one order, so that the result is the same
// on every run.
#include "prims/config.cuh"
#include "prims/io/finite.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/instructions/warp.cuh"

constexpr int LANE_COLS = ceil_div(HEAD_DIM, WARP_SIZE);  // columns of O per lane
constexpr int SM_BLOCKS = HEAD_DIM <= 128 ? 3 : 2;        // side by side: registers for so many

struct SharedStorage {
  float O[NUM_WARPS][HEAD_DIM];
  float l[NUM_WARPS];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

extern "C" __global__ __launch_bounds__(NUM_THREADS, SM_BLOCKS) void merge_splits(
    const __grid_constant__ AttnParams p, const __grid_constant__ SplitParams split) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int row_warps = split.row_warps;
  const int64_t all_rows = int64_t(p.batch) * p.heads * p.len_q;
  const int64_t own_row = int64_t(blockIdx.x) * (NUM_WARPS / row_warps) + warp_id() / row_warps;
  const int64_t row = min(own_row, all_rows - 1);  // past the end: the last again, not stored

  RowState state;
  float m = NEG_INF;
  for (int s = lane_id(); s < split.parts; s += WARP_SIZE)
    m = fmaxf(m, split.M[s * all_rows + row]);
  state.M = shfl_max<WARP_SIZE>(m);
  const float M = state.M_finite();

  float l = 0.0f, O_acc[LANE_COLS] = {};  // columns lane_id() + 32 c
#pragma unroll 4
  for (int s = warp_id() % row_warps; s < split.parts; s += row_warps) {
    const int64_t at = s * all_rows + row;
    const float weight = ex2_approx_ftz(split.M[at] - M);  // R4
    l = fmaf(weight, split.l[at], l);                      // R6
#pragma unroll
    for (int c = 0; c < LANE_COLS; ++c) {
      const int d = min(lane_id() + c * WARP_SIZE, HEAD_DIM - 1);
      O_acc[c] = fmaf(weight, split.O[at * HEAD_DIM + d], O_acc[c]);  // R6
    }
  }
#pragma unroll
  for (int c = 0; c < LANE_COLS; ++c)
    if (lane_id() + c * WARP_SIZE < HEAD_DIM)
      smem.O[warp_id()][lane_id() + c * WARP_SIZE] = O_acc[c];
  if (lane_id() == 0) smem.l[warp_id()] = l;
  __syncthreads();  // the sums of all warps are visible
  if (own_row >= all_rows) return;

  const int first = warp_id() / row_warps * row_warps;                   // warp of this row
  for (int w = first; w < first + row_warps; ++w) state.l += smem.l[w];  // R6
  const float inverse_l = state.inverse_l();
  elem_t* O = static_cast<elem_t*>(p.O) + output_row(p, row);  // [HEAD_DIM]
  const int thread = thread_id() - first * WARP_SIZE;          // of this row's
  for (int d = thread; d < HEAD_DIM; d += row_warps * WARP_SIZE) {
    float o = 0.0f;
    for (int w = first; w < first + row_warps; ++w) o += smem.O[w][d];  // R6
    O[d] = from_sum<elem_t>(o * inverse_l);                             // R7
  }
  if constexpr (LSE)
    if (thread == 0) p.lse[row] = state.lse();
}
