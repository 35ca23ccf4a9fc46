// quantize -- Q, K and V in 16 or 32 bits to 8-bit codes. Of Q and K, GROUP rows share a float
//             scale, of V the GROUP rows of a channel; with ZERO_POINTS a zero point goes with
//             every scale.
//
// Idea         Memory decides: every byte is read once, stays in registers between the search for
//              the largest magnitude and the coding, and leaves as a half or a quarter of itself.
//              A block takes some rows of one operand: LANES neighbouring lanes share a row, a warp
//              takes a few rows at a time, and rows meet their group in shared memory, at any
//              granularity. One launch for all operands: the end of one is the beginning of the
//              next, and no block waits.
// Before it    quantize_reduce.cu, where codes depend on rows that a block does not see
// Steps        ROWS      codes of whole groups of rows
//              CODES     codes with scales that are given or were found before
//              VALUES    codes of V, transposed (prims/quantize_values.cuh)
// Kept simple  One indexing for every granularity: the scale of a row is scale[row / GROUP].
//              The maximum of bits needs no order: the same input gives the same bits on every run.
// Rounding     R0 x - mean; R1 scale, inverse, code: each operation rounded once (prims/quant.cuh)
// Mirror       cupyattn.quant.quantizers: quantize_symmetric, for zero points quantize_affine, for
//              V quantize_values and quantize_values_affine, to the bit
// Bound        cupyattn.bounds.quantisation: half a scale, or what a given scale clips; of V half a
//              scale, or a step of e4m3
// Tried, lost  Holding the rows as arrays of 16-bit numbers: one register each, and the compiler
//              then waits for the first loads before it issues the last (seen in the machine code).
#include "prims/quantize_rows.cuh"
#include "prims/quantize_values.cuh"

// Blocks hold whole groups.
template <typename Cut>
__device__ __forceinline__ void quantize_rows(const QuantizeParams& p, uint32_t block) {
  __shared__ uint32_t absmax[Cut::GROUPS * SIDES];  // [GROUPS, SIDES] bits of largest magnitudes
  __shared__ Coding coding[Cut::GROUPS];            // [GROUPS]
  __shared__ float mean[HEAD_DIM];
  const Place at(p, block, Cut::ROWS);
  if (is_empty(p, at)) return;

  Rows<Cut> rows;
  rows.load(p, at);
#pragma unroll 1
  for (int g = thread_id(); g < Cut::GROUPS * SIDES; g += NUM_THREADS) absmax[g] = 0;
  rows.find_mean(mean, p, at);
  __syncthreads();  // the mean and the zeros are there before a row adds its maximum
  rows.begin(mean);
  rows.raise(absmax);
  __syncthreads();  // every row of a group has added its maximum before the scale is made of it
#pragma unroll 1
  for (int g = thread_id(); g < Cut::GROUPS; g += NUM_THREADS) {
    const float scale = coding[g].make(&absmax[g * SIDES]);  // R1
    if (g * Cut::GROUP >= at.rows) continue;
    const int64_t index = at.first_scale<Cut::GROUP>(p) + g;
    p.scale[index] = scale;
    if constexpr (ZERO_POINTS) p.zero[index] = coding[g].zero;
  }
  __syncthreads();  // the inverses are there before a row is coded with them
  rows.store(p, at, [&](int row) {
    return [own = coding[uint32_t(row) / Cut::GROUP]](float x) { return own.code(x); };  // R1
  });
}

// Scales are given, or follow from maxima of groups or from the extrema of whole heads.
template <typename Cut>
__device__ __forceinline__ void encode_rows(const QuantizeParams& p, uint32_t block) {
  __shared__ Coding coding[Cut::GROUPS];  // [GROUPS]
  __shared__ uint32_t of_head[SIDES];
  __shared__ float mean[HEAD_DIM];
  const Place at(p, block, Cut::ROWS);
  if (is_empty(p, at)) return;

  Rows<Cut> rows;
  rows.load(p, at);
  if (thread_id() < SIDES) of_head[thread_id()] = 0;
  rows.find_mean(mean, p, at);
  __syncthreads();  // the mean and the zeros are there
  if (p.extrema != nullptr) {
    for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS)
      channel_reach<ZERO_POINTS>(p, at, col, Cut::MEAN ? mean[col] : 0.0f).raise(of_head);
    __syncthreads();  // every channel has added its maximum
  }
#pragma unroll 1
  for (int g = thread_id(); g < Cut::GROUPS && g * Cut::GROUP < at.rows; g += NUM_THREADS) {
    const int64_t index = at.first_scale<Cut::GROUP>(p) + g;
    float scale;
    if (p.static_scale == nullptr) {
      scale = coding[g].make(p.extrema == nullptr ? &p.absmax[index * SIDES] : of_head);  // R1
    } else {
      const Scale given = scale_of_static(p.static_scale[index]);
      scale = given.scale, coding[g].inverse = given.inverse;
    }
    // NOTE: several blocks may share the scale. From a maximum all of them write the same number;
    // a usable given scale is in place already, and only NaN is ever written over it.
    if (p.static_scale == nullptr || coding[g].inverse == 0.0f)
      st_relaxed_gpu(&p.scale[index], scale);
    if constexpr (ZERO_POINTS) st_relaxed_gpu(&p.zero[index], coding[g].zero);
  }
  __syncthreads();  // the inverses are there before a row is coded with them
  rows.begin(mean);
  if (p.static_scale != nullptr)
#pragma unroll
    for (int pass = 0; pass < Cut::PASSES; ++pass)
      if (row_of(pass) < at.rows && !rows.reach(pass).is_finite())
        st_relaxed_gpu(
            &p.scale[at.first_scale<Cut::GROUP>(p) + row_of(pass) / Cut::GROUP], NOT_A_NUMBER);
  rows.store(p, at, [&](int row) {
    return [own = coding[uint32_t(row) / Cut::GROUP]](float x) { return own.saturated(x); };  // R1
  });
}

template <Step STEP, typename Cut = CutQ>
__device__ __forceinline__ void encode(const QuantizeParams& p, uint32_t block) {
  if constexpr (STEP == Step::ROWS) quantize_rows<Cut>(p, block);
  if constexpr (STEP == Step::CODES) encode_rows<Cut>(p, block);
  if constexpr (STEP == Step::VALUES) quantize_values(p, block);
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 768 / NUM_THREADS) void quantize(
    const __grid_constant__ QuantizeParams q, const __grid_constant__ QuantizeParams k,
    const __grid_constant__ QuantizeParams v) {
  uint32_t block = blockIdx.x;
  if (block < v.blocks) return encode<STEP_V>(v, block);
  block -= v.blocks;
  if (block < k.blocks) return encode<STEP_K, CutK>(k, block);
  encode<STEP_Q, CutQ>(q, block - k.blocks);
}
