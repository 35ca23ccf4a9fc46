// backward_normalise -- gradients of Q or K from the gradients of its normalised rows, and of the
// weights that these were multiplied by.
//
// Idea         Let x^ = x r be a row by its root mean square, and a = w dy. The gradient of x is
//              r (a - x^ mean(a x^)). The gradient of w is the sum of dy x^ over rows. A block sums
//              its rows. backward_weights.cu sums blocks in one order, without atomics.
// Differs from prepare/normalise.cu: a row has a second operand, first turned back by the same
//              angles (ROPE; `sin` is negated). Sums stay in registers from row to row.
// Kept simple  r is computed again from x, so that the forward pass stores nothing.
// Rounding     R14 dy turned back, r, x^, a, their mean, difference, product, store, sums of dy x^
// Mirror       cupyattn.gradients.prepared.back_mirror, rows to the bit
// Bound        cupyattn.gradients.prepared.back_bound
#include "prims/config.cuh"
#include "prims/io/prepare.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

static_assert(
    QK_NORM && !NORM_BY_TOKEN && !NORM_BY_PART && HEAD_DIM % 2 == 0,
    "backward_normalise takes rows of pairs, each with a norm: HEAD_DIM must be even");

constexpr int ROWS_PER_PASS = NUM_THREADS / PAIR_LANES;

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_normalise(
    const __grid_constant__ NormGradientParams p) {
  __shared__ float sums[ROWS_PER_PASS][HEAD_DIM];  // of dW, of the rows of a lane
  const BlockRows block(p);
  const elem_t* X = block.in_operand(p.X);                                   // [rows, HEAD_DIM]
  const elem_t* dY = block.in_contiguous(static_cast<const elem_t*>(p.dY));  // [rows, HEAD_DIM]
  elem_t* dX = block.in_contiguous(static_cast<elem_t*>(p.Y));               // [rows, HEAD_DIM]
  const Preparation how(p, block.head, block.row0, block.token0());
  PreparedRow weight, dW = {};
  weight.load(how.weight);
  const int group = thread_id() / PAIR_LANES;
  // The lanes of a warp go on together: past the last row they have the last one again.
  for (int done = 0; done < block.rows; done += ROWS_PER_PASS) {
    const int row = min(done + group, block.rows - 1);
    const bool own = row == done + group;
    PreparedRow x, dy;
    x.load(X + row * p.X_stride.len);
    dy.load(dY + row * HEAD_DIM);
    dy.turn(how, row);                                           // R14
    const float factor = norm_factor(x.mean_square(), how.eps);  // R14
#pragma unroll
    for (int access = 0; access < 2 * LANE_PAIRS; ++access)
#pragma unroll
      for (int j = 0; j < ROPE_PAIRS; ++j) {
        float &unit = x.element(access, j), &a = dy.element(access, j);
        unit = __fmul_rn(unit, factor);                                         // R14
        if (own) dW.element(access, j) = fmaf(a, unit, dW.element(access, j));  // R14
        a = __fmul_rn(a, weight.element(access, j));                            // R14
      }
    const float mean = PreparedRow::mean([&](int i, int j) {
      return __fadd_rn(
          __fmul_rn(dy.of[i].first(j), x.of[i].first(j)),
          __fmul_rn(dy.of[i].second(j), x.of[i].second(j)));  // R14
    });
#pragma unroll
    for (int access = 0; access < 2 * LANE_PAIRS; ++access)
#pragma unroll
      for (int j = 0; j < ROPE_PAIRS; ++j) {
        const float along = __fmul_rn(x.element(access, j), mean);
        x.element(access, j) = __fmul_rn(factor, __fsub_rn(dy.element(access, j), along));  // R14
      }
    if (own) x.store(dX + row * HEAD_DIM);
  }
  // The sums of the rows of this block. Without rows they are zero.
#pragma unroll
  for (int access = 0; access < 2 * LANE_PAIRS; ++access)
#pragma unroll
    for (int j = 0; j < ROPE_PAIRS; ++j)
      if (PreparedRow::column(access) < HEAD_DIM)
        sums[group][PreparedRow::column(access) + j] = dW.element(access, j);
  __syncthreads();  // sums are visible
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < ROWS_PER_PASS; ++i) sum += sums[i][col];  // R14
    p.partial_dW[blockIdx.x * HEAD_DIM + col] = sum;
  }
}
