// quantize -- Q or K in 16 or 32 bits to INT8 codes, with one float scale per GROUP rows; a zero
//             point goes with every scale where there are ZERO_POINTS.
//
// Idea         Memory decides: every byte is read once, stays in registers between the search for
//              the largest magnitude and the coding, and leaves as a half or a quarter of itself.
//              A block takes BLOCK_Q rows: LANES neighbouring lanes share a row, a warp takes a few
//              rows at a time, and rows meet their group in shared memory, at any granularity.
// Its kin      quantize_groups.cu   groups too large for a block (a head, a tensor); given scales
//              quantize_values.cu   V, a scale for each channel
//              channel_mean.cu      the mean, which smoothing subtracts
//              A file each, for a call compiles only those that it runs.
// Kept simple  The operand plays Q's part in config.cuh: BLOCK_Q rows, GROUP_Q to a scale.
//              One indexing for every granularity: the scale of a row is scale[row / GROUP].
//              The maximum of bits needs no order: the same input gives the same bits on every run.
// Rounding     R0 x - mean; R1 scale, inverse, code: each operation rounded once (prims/quant.cuh)
// Mirror       cupyattn.quant.quantizers.quantize_symmetric and, for zero points,
//              quantize_affine, to the bit
// Bound        cupyattn.bounds.quantisation: half a scale
// Tried, lost  Holding the rows as arrays of 16-bit numbers: one register each, and the compiler
//              then waits for the first loads before it issues the last (seen in the machine code).
#include "prims/quantize_rows.cuh"

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void quantize_int8(
    const __grid_constant__ QuantizeParams p) {
  __shared__ uint32_t absmax[GROUPS * SIDES];  // [GROUPS, SIDES] bits of the largest magnitude
  __shared__ Coding coding[GROUPS];            // [GROUPS]
  const Place at(p, ceil_div(p.length, BLOCK_ROWS), BLOCK_ROWS);
  if (VARLEN && at.rows <= 0) return;
  for (int g = thread_id(); g < GROUPS * SIDES; g += NUM_THREADS) absmax[g] = 0;

  Rows rows;
  rows.load(p, at);
  __syncthreads();  // the zeros are there before a row adds its maximum
  rows.use_from_here();
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const Reach reach = shfl_max<LANES>(rows.reach(pass));
    if (lane_in_row() == 0 && row_of(pass) < at.rows)
#pragma unroll
      for (int i = 0; i < SIDES; ++i)
        atomicMax(&absmax[row_of(pass) / GROUP * SIDES + i], reach.bits[i]);
  }
  __syncthreads();  // every row of a group has added its maximum before the scale is made of it
#pragma unroll 1
  for (int g = thread_id(); g < GROUPS; g += NUM_THREADS) {
    const float scale = coding[g].make(&absmax[g * SIDES]);  // R1
    if (g * GROUP >= at.rows) continue;
    p.scale[at.first_scale(p) + g] = scale;
    if constexpr (ZERO_POINTS) p.zero[at.first_scale(p) + g] = coding[g].zero;
  }
  __syncthreads();              // the inverses are there before a row is coded with them
  int8_t* codes = at.codes(p);  // [rows, HEAD_DIM]
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = row_of(pass);
    int sum = 0;
    if (row < at.rows) {
      const Coding own = coding[row / GROUP];
      sum = rows.store(codes + row * HEAD_DIM, pass, [&](float x) { return own.code(x); });  // R1
    }
    store_code_sum(at.code_sum(p), row, at.rows, sum);
  }
}
