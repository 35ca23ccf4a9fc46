// token_factors -- 1 / RMS of all heads of each token of Q or K, for models that normalise before
//                  they split heads.
//
// Idea         A pass over memory that stores four bytes a token. normalise.cu and quantize*.cu
//              multiply rows by them as they read them again. The lanes of a token keep a sum for
//              each pair of columns from head to head, and add them up at the end.
// Kept simple  The operand plays Q's part in config.cuh: BLOCK_Q tokens to a block. Every row of
//              an entry has a factor, whatever the length of the entry.
// Rounding     R0 squares, sums over heads, sum of pairs, mean, root, inverse
// Mirror       cupyattn.problem.row_preparation.Preparation.norm_factor, to the bit
// Bound        cupyattn.bounds.prepared
#include "prims/config.cuh"
#include "prims/io/prepare.cuh"
#include "prims/instructions/warp.cuh"

static_assert(
    NORM_BY_TOKEN && !ROPE && HEAD_DIM % 2 == 0,
    "token_factors takes rows of pairs: HEAD_DIM must be even");

constexpr int TOKENS_PER_PASS = NUM_THREADS / PAIR_LANES;

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void token_factors(
    const __grid_constant__ TokenFactorParams p) {
  const int chunks = ceil_div(p.length, BLOCK_Q), token0 = blockIdx.x % chunks * BLOCK_Q;
  const int64_t batch = blockIdx.x / chunks;
  const int tokens = min(BLOCK_Q, p.length - token0);
  const elem_t* X =  // [heads, tokens, HEAD_DIM]
      static_cast<const elem_t*>(p.X) + batch * p.X_stride.batch + token0 * p.X_stride.len;
  // The lanes of a warp continue together: past the last token they repeat it.
  for (int done = 0; done < tokens; done += TOKENS_PER_PASS) {
    const int own = done + thread_id() / PAIR_LANES, token = min(own, tokens - 1);
    float sums[LANE_PAIRS][ROPE_PAIRS] = {};
#pragma unroll 4
    for (int head = 0; head < p.heads; ++head) {
      PreparedRow x;
      x.load(X + head * p.X_stride.head + token * p.X_stride.len);
#pragma unroll
      for (int i = 0; i < LANE_PAIRS; ++i)
#pragma unroll
        for (int j = 0; j < ROPE_PAIRS; ++j) sums[i][j] = __fadd_rn(sums[i][j], x.square(i, j));
    }
    const float sum = PreparedRow::sum([&](int i, int j) { return sums[i][j]; });
    if (own == token && threadIdx.x % PAIR_LANES == 0)
      p.factor[batch * p.length + token0 + token] =
          norm_factor(__fdiv_rn(sum, float(p.heads * HEAD_DIM)), p.eps);
  }
}
