// quantize_groups -- as quantize.cu, for groups of rows that span blocks, and for scales given.
//
// Entries      group_absmax   the maxima of groups that span blocks
//              encode_int8    codes from those maxima, or from scales that were given
// Differs from quantize.cu: the rows are read twice, once by each kernel, and blocks meet in global
//              memory.
// Rounding     as quantize.cu
// Mirror       cupyattn.quant.quantizers.quantize_symmetric and, for zero points,
//              quantize_affine, to the bit
// Bound        cupyattn.bounds.quantisation: half a scale, or what a given scale clips
#include "prims/quantize_rows.cuh"

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void group_absmax(
    const __grid_constant__ QuantizeParams p) {
  __shared__ uint32_t absmax[SIDES];  // of this block
  const Place at(p, ceil_div(p.length, BLOCK_ROWS), BLOCK_ROWS);
  if (VARLEN && at.rows <= 0) return;
  if (thread_id() < SIDES) absmax[thread_id()] = 0;

  Rows rows;
  rows.load(p, at);
  __syncthreads();  // the zero is there before a warp adds its maximum
  rows.use_from_here();
  Reach reach = {};
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
    if (row_of(pass) < at.rows) reach.admit(rows.reach(pass));
  reach = shfl_max<WARP_SIZE>(reach);
  if (lane_id() == 0)
#pragma unroll
    for (int i = 0; i < SIDES; ++i) atomicMax(&absmax[i], reach.bits[i]);
  __syncthreads();  // every warp has added its maximum before the block passes it on
  if (thread_id() < SIDES)
    atomicMax(&p.absmax[at.first_scale(p) * SIDES + thread_id()], absmax[thread_id()]);
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void encode_int8(
    const __grid_constant__ QuantizeParams p) {
  __shared__ Coding coding[GROUPS];  // [GROUPS]
  const Place at(p, ceil_div(p.length, BLOCK_ROWS), BLOCK_ROWS);
  if (VARLEN && at.rows <= 0) return;
#pragma unroll 1
  for (int g = thread_id(); g < GROUPS && g * GROUP < at.rows; g += NUM_THREADS) {
    const int64_t index = at.first_scale(p) + g;
    float scale;
    if (p.absmax != nullptr) {
      scale = coding[g].make(&p.absmax[index * SIDES]);
    } else {
      const Scale given = scale_of_static(p.static_scale[index]);
      scale = given.scale, coding[g].inverse = given.inverse;
    }
    // NOTE: several blocks may share the scale. From a maximum all of them write the same number;
    // a usable given scale is in place already, and only NaN is ever written over it.
    if (p.absmax != nullptr || coding[g].inverse == 0.0f) st_relaxed_gpu(&p.scale[index], scale);
    if constexpr (ZERO_POINTS) st_relaxed_gpu(&p.zero[index], coding[g].zero);
  }

  Rows rows;
  rows.load(p, at);
  __syncthreads();  // the inverses are there before a row is coded with them
  rows.use_from_here();
  int8_t* codes = at.codes(p);  // [rows, HEAD_DIM]
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = row_of(pass);
    int sum = 0;
    if (row < at.rows) {
      if (!rows.reach(pass).is_finite())
        st_relaxed_gpu(&p.scale[at.first_scale(p) + row / GROUP], NOT_A_NUMBER);
      const Coding own = coding[row / GROUP];
      sum = rows.store(
          codes + row * HEAD_DIM, pass, [&](float x) { return own.saturated(x); });  // R1
    }
    store_code_sum(at.code_sum(p), row, at.rows, sum);
  }
}
