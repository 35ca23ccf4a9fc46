// channel_mean -- the mean of K or V over its rows, which smoothing subtracts, in two kernels.
//
// Entries      channel_sum    slices of the rows side by side, each summed by a block
//              channel_mean   the sums of a head's slices, divided
// Kept simple  No float is summed by an atomic: sums have a fixed order. The same input gives the
//              same bits on every run.
// Rounding     R0: sums in float32. Any vector that all rows share may be subtracted, so that the
//              mirror takes this one as it is.
// Mirror       cupyattn.quant.quantizers.channel_mean, but for the order
#include "prims/quantize_rows.cuh"

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void channel_sum(
    const __grid_constant__ QuantizeParams p) {
  __shared__ float sums[ROWS_PER_PASS][HEAD_DIM];  // [ROWS_PER_PASS, HEAD_DIM]
  const Place at(p, p.splits, p.split_rows);
  const elem_t* X = at.X(p);           // [rows, HEAD_DIM]
  float sum[LANE_ACCESSES][VEC] = {};  // of this lane's channels, over its rows in rising order
#pragma unroll ROWS_IN_FLIGHT
  for (int row = row_in_pass(); row < at.rows; row += ROWS_PER_PASS)
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
      if (col_of(a) < HEAD_DIM) {
        const auto x =
            *reinterpret_cast<const Words<elem_t, VEC>*>(X + row * p.X_stride.len + col_of(a));
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[a][j] += x.element(j);
      }
#pragma unroll
  for (int a = 0; a < LANE_ACCESSES; ++a)
    if (col_of(a) < HEAD_DIM)
#pragma unroll
      for (int j = 0; j < VEC; ++j) sums[row_in_pass()][col_of(a) + j] = sum[a][j];
  __syncthreads();  // every lane's sums are there before they are added up
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS) {
    float total = 0.0f;
    for (int row = 0; row < ROWS_PER_PASS; ++row) total += sums[row][col];
    p.partial_sum[int64_t(blockIdx.x) * HEAD_DIM + col] = total;
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void channel_mean(
    const __grid_constant__ QuantizeParams p) {
  const int64_t batch_head = blockIdx.x;
  int length = p.length;
  if constexpr (VARLEN)
    length = max(1, Sequence(p.cu_seqlens, batch_head / p.heads, p.length).length);
  const float* partial_sum =
      p.partial_sum + batch_head * p.splits * HEAD_DIM;  // [splits, HEAD_DIM]
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS) {
    float total = 0.0f;
#pragma unroll 8
    for (int split = 0; split < p.splits; ++split) total += partial_sum[split * HEAD_DIM + col];
    // NOTE: any vector that all keys share may be subtracted. Where the sum is not finite it is 0,
    // so that one NaN does not reach every key of the head.
    const bool finite = magnitude_bits(total) < INFINITY_BITS;
    p.mean[batch_head * HEAD_DIM + col] = finite ? total / length : 0.0f;
  }
}
