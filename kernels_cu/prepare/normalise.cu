// normalise -- the rows of Q or K, each divided by its root mean square, weighted, and optionally
// rotated by its position. All kernels but quantize*.cu need this pass.
//
// Idea         A pass over memory: lanes that share a row add up its squares, so it is read once
//              and stored once.
// Kept simple  The operand plays Q's part in config.cuh: BLOCK_Q rows to a block.
// Rounding     R0 sum of squares, root, inverse, two products; two products and their sum or
//              difference; then the operand's type
// Mirror       cupyattn.problem.row_preparation.Preparation.stored, to the bit
// Bound        cupyattn.bounds.preparation
#include "prims/config.cuh"
#include "prims/io/prepare.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

static_assert(QK_NORM && HEAD_DIM % 2 == 0, "normalise takes rows of pairs: HEAD_DIM must be even");

constexpr int ROWS_PER_PASS = NUM_THREADS / PAIR_LANES;

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void normalise(
    const __grid_constant__ NormParams p) {
  const BlockRows block(p);
  const elem_t* X = block.in_operand(p.X);                     // [rows, HEAD_DIM]
  elem_t* Y = block.in_contiguous(static_cast<elem_t*>(p.Y));  // [rows, HEAD_DIM]
  const Preparation how(p, block.head, block.row0, block.token0());
  // The lanes of a warp continue together: past the last row they repeat it.
  for (int done = 0; done < block.rows; done += ROWS_PER_PASS) {
    const int own = done + thread_id() / PAIR_LANES, row = min(own, block.rows - 1);
    PreparedRow x;
    x.load(X + row * p.X_stride.len);
    x.prepare(how, row);
    if (own == row) x.store(Y + row * HEAD_DIM);
  }
}
