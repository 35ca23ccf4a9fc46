// rope -- the rows of Q or K, each rotated by the angles of its position, for kernels that cannot
// do it. These are fa_tc, whose tiles are copied to shared memory unchanged, and
// attn_fa_int8_fused.cu.
//
// Idea         A pass over memory: read once, turned in registers, stored once. A thread takes as
//              many pairs as the widest access brings of first elements.
// Kept simple  The operand plays Q's part in config.cuh: BLOCK_Q rows to a block. The float32 rungs
//              do the same as they load (rope.cuh) and need no pass.
// Rounding     R0 two products and their sum or difference, then the operand's type
// Mirror       cupyattn.problem.row_preparation, to the bit    Bound  cupyattn.bounds.rotation
#include "prims/config.cuh"
#include "prims/io/rope.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

static_assert(ROPE && HEAD_DIM % 2 == 0, "rope turns pairs of columns: HEAD_DIM must be even");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void rope(
    const __grid_constant__ RopeParams p) {
  const BlockRows block(p);
  const elem_t* X = block.in_operand(p.X);                     // [rows, HEAD_DIM]
  elem_t* Y = block.in_contiguous(static_cast<elem_t*>(p.Y));  // [rows, HEAD_DIM]
  for (int i = thread_id(); i < block.rows * ROPE_ACCESSES; i += NUM_THREADS) {
    const int row = i / ROPE_ACCESSES, pair0 = i % ROPE_ACCESSES * ROPE_PAIRS;
    RopePairs<elem_t> pairs;
    const int64_t angle =
        int64_t(p.position + block.row0 + row) * ROPE_TABLE + pairs.table_column(pair0);
    pairs.load(X + row * p.X_stride.len, pair0);
    pairs.turn(p.cos + angle, p.sin + angle);
#pragma unroll
    for (int a = 0; a < 2; ++a) st_global(Y + row * HEAD_DIM + pairs.column(a, pair0), pairs.x[a]);
  }
}
