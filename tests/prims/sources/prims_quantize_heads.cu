// prims_quantize_heads -- 20 rows of two heads, normalised and turned by tables that both share: how
// far their groups reach, and codes in units of an eighth. Some rows of a lane are in shared memory.
#include "prims/codes/quantize_heads.cuh"

extern "C" __global__ void quantize_heads(
    const __grid_constant__ QuantizeParams given,
    const float* cos,         // [positions, ROPE_TABLE]
    const float* sin,         // [positions, ROPE_TABLE]
    const float* weight,      // [HEAD_DIM]
    elem_t* X,                // [2, 20, HEAD_DIM]
    int8_t* codes,            // [2, 20, HEAD_DIM]
    uint32_t* group_reach) {  // [2, 3]
  QuantizeParams p = given;
  p.cos = cos, p.sin = sin, p.weight = weight, p.X = X, p.codes = codes;
  using Heads = HeadRows<CutK>;
  static_assert(Heads::UNITS == 3 && Heads::HELD == 2, "of two rows of a lane each");
  const Place at(p, 0, Heads::ROWS, false, CutK::HEADS);
  __shared__ uint32_t of_groups[CutK::GROUPS];
  __shared__ Coding coding[CutK::GROUPS];
  __shared__ HeadRowsShared<CutK> shared;
  if (thread_id() < CutK::GROUPS) {
    of_groups[thread_id()] = 0;
    coding[thread_id()] = {};
    coding[thread_id()].inverse = 8.0f;
  }
  share_weights(p, p);
  Heads rows(p, at);
  rows.share(shared, p, at);
  __syncthreads();  // weights, means and zeros are there before a row is made
  rows.begin(shared, p, at, of_groups);
  __syncthreads();  // every row has raised its group before the reach leaves
  rows.store(shared, p, at, coding);
  if (thread_id() < CutK::GROUPS) group_reach[thread_id()] = of_groups[thread_id()];
}
