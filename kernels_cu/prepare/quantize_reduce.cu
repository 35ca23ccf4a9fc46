// quantize_reduce -- reductions for the codes of Q, K and V over more rows than a block has. They
// are needed if groups span blocks without being a head: one scale for a whole array, or unusual
// tiles.
//
// Idea         One launch for all operands, and one read of each: blocks add up slices side by
//              side, or find maxima. Every block that needs the sum adds up the results of slices.
//              These are a few numbers in a cache, and no block waits for the last slice of a head.
// Steps        SUMS      slices of the rows of the mean, each summed by a block
//              EXTREMA   slices of all rows: the same, with the least and the largest number of
//                        every channel, for the reach of a head from its mean
//              REACH     the maxima of groups of rows that span blocks, combined in global memory
//              VALUE_REACH the same of all of V, after EXTREMA
// Kept simple  No float is summed by an atomic: sums have a fixed order. The same input gives the
//              same bits on every run.
// Rounding     R0: sums in float32. Any vector that all rows share may be subtracted, so the mirror
//              takes this vector unchanged.
// Mirror       cupyattn.quant.quantizers.channel_mean, but for the order
#include "prims/codes/quantize_sums.cuh"

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
  const Reach reach = shfl_max<WARP_SIZE>(rows.reach());
  if (lane_id() == 0) reach.raise(of_block);
  __syncthreads();  // every warp has added its maximum before the block passes it on
  if (thread_id() < SIDES)
    atomicMax(
        &p.absmax[at.first_scale<Cut::GROUP>(p) * SIDES + thread_id()], of_block[thread_id()]);
}

// One block for each head, which merges its extrema.
__device__ __forceinline__ void find_values_reach(const QuantizeParams& p, uint32_t head) {
  __shared__ ValueReach of_head;
  const Place at(p, head, p.length);
  if (is_empty(p, at)) return;
  if (thread_id() == 0) of_head = {};
  __syncthreads();  // the zeros are there before a channel adds its maximum
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS)
    channel_reach<VALUE_ZEROS>(p, at, col, channel_mean(p, at, col)).raise(of_head.bits);
  __syncthreads();  // every channel has added its maximum before the block passes them on
  if (thread_id() == 0) of_head.raise(values_reach(p, at)->bits);
}

struct Reduce {
  template <typename Own>
  __device__ __forceinline__ void operator()(Own, const QuantizeParams& p, uint32_t block) const {
    if constexpr (Own::STEP == Step::SUMS) sum_slice<false, Own::PREPARED>(p, block);
    if constexpr (Own::STEP == Step::EXTREMA) sum_slice<true, Own::PREPARED>(p, block);
    if constexpr (Own::STEP == Step::REACH) find_reach<typename Own::Cut>(p, block);
    if constexpr (Own::STEP == Step::VALUE_REACH) find_values_reach(p, block);
  }
};

// With prepared rows a multiprocessor needs two blocks, or loads wait for arithmetic. Loading all
// tables at once would take the registers of one block. Extrema leave no room for it.
constexpr bool FINDS_EXTREMA = STEP_Q == Step::EXTREMA || STEP_K == Step::EXTREMA;
constexpr int BLOCKS_AT_ONCE = PREPARED && !FINDS_EXTREMA ? ceil_div(512, NUM_THREADS) : 1;

extern "C" __global__ __launch_bounds__(NUM_THREADS, BLOCKS_AT_ONCE) void quantize_reduce(
    const __grid_constant__ QuantizeParams q, const __grid_constant__ QuantizeParams k,
    const __grid_constant__ QuantizeParams v) {
  on_its_operand(q, k, v, Reduce());
}
