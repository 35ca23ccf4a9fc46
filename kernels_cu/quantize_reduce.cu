// quantize_reduce -- what the codes of Q, K and V depend on beyond the rows of a block: means,
//                    extrema of whole heads, maxima of groups that span blocks.
//
// Idea         One launch for all operands, and one read of each: blocks add up slices of K and of
//              V side by side. What slices came to is added up by every block of quantize.cu that
//              needs it: a few numbers of a cache, and no block waits for the last of a head.
// Steps        SUMS      slices of the rows, each summed by a block, for the mean
//              EXTREMA   the same, with the least and the largest number of every channel, from
//                        which follows how far a whole head reaches from its mean
//              REACH     the maxima of groups of rows that span blocks, met in global memory
// Kept simple  No float is summed by an atomic: sums have a fixed order. The same input gives the
//              same bits on every run.
// Rounding     R0: sums in float32. Any vector that all rows share may be subtracted, so that the
//              mirror takes this one as it is.
// Mirror       cupyattn.quant.quantizers.channel_mean, but for the order
#include "prims/quantize_rows.cuh"

constexpr int ROWS_IN_FLIGHT = ceil_div(8, LANE_ACCESSES);  // that a sum waits for at once

// Rows that meet in shared memory: those of a pass, or one for each warp where a pass has twice as
// many, because lanes that prepare them have twice the columns.
constexpr int FOLDED_ROWS = PREPARED ? NUM_WARPS : ROWS_PER_PASS;
__device__ __forceinline__ int folded_row() { return PREPARED ? warp_id() : row_in_pass(); }
__device__ __forceinline__ int folded_col(int access) {
  return PREPARED && lane_id() >= LANES ? HEAD_DIM : col_of(access);
}

// Folds the rows of a warp: its first LANES lanes get what all have of their columns.
template <typename T, typename Combine>
__device__ __forceinline__ void fold_warp(T (&of_lane)[LANE_ACCESSES][VEC], Combine combine) {
#pragma unroll
  for (int offset = LANES; offset < WARP_SIZE; offset *= 2)
#pragma unroll
    for (auto& access : of_lane)
#pragma unroll
      for (T& x : access) x = combine(x, __shfl_xor_sync(FULL_WARP, x, offset));
}

// Folds what the lanes have of each column, in rising order of their rows: result(column, all). The
// whole block takes part; `space` holds numbers of 4 bytes.
template <typename T, typename Combine, typename Result>
__device__ __forceinline__ void fold_columns(
    uint32_t* space, T (&of_lane)[LANE_ACCESSES][VEC], Combine combine, Result result) {
  auto all = reinterpret_cast<T(*)[HEAD_DIM]>(space);  // [FOLDED_ROWS, HEAD_DIM]
  if constexpr (PREPARED) fold_warp(of_lane, combine);
  __syncthreads();  // nobody folds the numbers before these
#pragma unroll
  for (int a = 0; a < LANE_ACCESSES; ++a)
    if (folded_col(a) < HEAD_DIM)
#pragma unroll
      for (int j = 0; j < VEC; ++j) all[folded_row()][folded_col(a) + j] = of_lane[a][j];
  __syncthreads();  // every lane's numbers are there before they are folded
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS) {
    T folded = all[0][col];
    for (int row = 1; row < FOLDED_ROWS; ++row) folded = combine(folded, all[row][col]);
    result(col, folded);
  }
}

template <bool EXTREMA, bool ROWS_PREPARED>
__device__ __forceinline__ void sum_slice(const QuantizeParams& p, uint32_t block) {
  __shared__ uint32_t space[FOLDED_ROWS * HEAD_DIM];  // for one fold after the other
  const Place at(p, block, p.split_rows);
  const elem_t* X = at.X(p);  // [rows, HEAD_DIM]
  // Of this lane's channels, over its rows in rising order.
  float sum[LANE_ACCESSES][VEC] = {};
  uint32_t least[LANE_ACCESSES][VEC], most[LANE_ACCESSES][VEC] = {};
#pragma unroll
  for (int a = 0; a < LANE_ACCESSES; ++a)
#pragma unroll
    for (int j = 0; j < VEC; ++j) least[a][j] = ~0u;
  const Rowwise<ROWS_PREPARED> rowwise(p, at);
  // The lanes of a warp prepare their rows together, up to the last turn of any.
  const int end = ROWS_PREPARED ? round_up(max(0, at.rows), ROWS_PER_PASS) : at.rows;
#pragma unroll 1
  for (int row0 = row_in_pass(); row0 < end; row0 += ROWS_IN_FLIGHT * ROWS_PER_PASS) {
    Words<elem_t, VEC> x[ROWS_IN_FLIGHT][LANE_ACCESSES];
    int place[ROWS_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < ROWS_IN_FLIGHT; ++i)  // past the last row stands the last row again
      place[i] = at.place(p, min(row0 + i * ROWS_PER_PASS, at.rows - 1));
#pragma unroll
    for (int i = 0; i < ROWS_IN_FLIGHT; ++i)
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) {
        if constexpr (ROWS_PREPARED) x[i][a] = {};
        if (col_of(a) < HEAD_DIM)
          x[i][a] = *reinterpret_cast<const Words<elem_t, VEC>*>(
              X + place[i] * p.X_stride.len + col_of(a));
      }
#pragma unroll
    for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
      if constexpr (ROWS_PREPARED)
#pragma unroll
        for (int a = 0; a < LANE_ACCESSES; ++a) x[i][a].use_from_here();
      const auto row = rowwise.row(x[i], min(row0 + i * ROWS_PER_PASS, at.rows - 1));
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) {
        if (col_of(a) >= HEAD_DIM) continue;
        if constexpr (!ROWS_PREPARED) x[i][a].use_from_here();
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          if (row0 + i * ROWS_PER_PASS < at.rows) sum[a][j] += row.element(a, j);
          if constexpr (EXTREMA) {
            least[a][j] = min(least[a][j], ordered_bits(row.element(a, j)));
            most[a][j] = max(most[a][j], ordered_bits(row.element(a, j)));
          }
        }
      }
    }
  }
  float* sums = at.partial_sum(p, at.slice);  // [HEAD_DIM]
  fold_columns(
      space, sum, [](float a, float b) { return a + b; }, [&](int col, float x) { sums[col] = x; });
  if constexpr (EXTREMA) {
    uint32_t* extrema = at.extrema(p, at.slice);  // [2, HEAD_DIM]
    fold_columns(
        space, least, [](uint32_t a, uint32_t b) { return min(a, b); },
        [&](int col, uint32_t x) { extrema[col] = x; });
    fold_columns(
        space, most, [](uint32_t a, uint32_t b) { return max(a, b); },
        [&](int col, uint32_t x) { extrema[HEAD_DIM + col] = x; });
  }
}

// Blocks hold parts of one group.
template <typename Cut>
__device__ __forceinline__ void find_reach(const QuantizeParams& p, uint32_t block) {
  __shared__ uint32_t of_block[SIDES];
  __shared__ float mean[HEAD_DIM];
  const Place at(p, block, Cut::ROWS);
  if (is_empty(p, at)) return;
  if (thread_id() < SIDES) of_block[thread_id()] = 0;

  Rows<Cut> rows;
  rows.load(p, at);
  rows.find_mean(mean, p, at);
  __syncthreads();  // the mean and the zeros are there
  rows.begin(mean, p, at);
  Reach reach = {};
#pragma unroll
  for (int pass = 0; pass < Cut::PASSES; ++pass) reach.admit(rows.reach(pass));
  reach = shfl_max<WARP_SIZE>(reach);
  if (lane_id() == 0) reach.raise(of_block);
  __syncthreads();  // every warp has added its maximum before the block passes it on
  if (thread_id() < SIDES)
    atomicMax(
        &p.absmax[at.first_scale<Cut::GROUP>(p) * SIDES + thread_id()], of_block[thread_id()]);
}

struct Reduce {
  template <typename Own>
  __device__ __forceinline__ void operator()(Own, const QuantizeParams& p, uint32_t block) const {
    if constexpr (Own::STEP == Step::SUMS) sum_slice<false, Own::PREPARED>(p, block);
    if constexpr (Own::STEP == Step::EXTREMA) sum_slice<true, Own::PREPARED>(p, block);
    if constexpr (Own::STEP == Step::REACH) find_reach<typename Own::Cut>(p, block);
  }
};

// Of rows that are prepared a multiprocessor needs two blocks, or loads wait for arithmetic: tables
// that are asked for at once would take the registers of one. Extrema leave no room for it.
constexpr bool FINDS_EXTREMA = STEP_Q == Step::EXTREMA || STEP_K == Step::EXTREMA;
constexpr int BLOCKS_AT_ONCE = PREPARED && !FINDS_EXTREMA ? ceil_div(512, NUM_THREADS) : 1;

extern "C" __global__ __launch_bounds__(NUM_THREADS, BLOCKS_AT_ONCE) void quantize_reduce(
    const __grid_constant__ QuantizeParams q, const __grid_constant__ QuantizeParams k,
    const __grid_constant__ QuantizeParams v) {
  on_its_operand(q, k, v, Reduce());
}
