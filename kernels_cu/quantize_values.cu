// quantize_values -- V in 16 or 32 bits to 8-bit codes, one scale for each channel of GROUP rows.
//
// Idea         Attention reads the codes of V by channel: they are transposed here, where a byte is
//              moved anyway, and lie in the order in which lanes read them.
// Entries      channel_absmax   the maxima of the channels
//              encode_values    their codes, transposed
// Differs from quantize.cu: a scale belongs to a column, and every value is read twice.
// Rounding     R0 x - mean; R1 scale, inverse, code: each operation rounded once (prims/quant.cuh)
// Mirror       cupyattn.quant.quantizers.quantize_values and, for zero points,
//              quantize_values_affine, to the bit
// Bound        cupyattn.bounds.quantisation: half a scale, or a step of e4m3
#include "prims/quantize_rows.cuh"

// Groups of V are whole tiles of attention, of 32 keys or more.
constexpr int VALUE_GROUPS = ceil_div(VALUES_PAD, GROUP < 32 ? 32 : GROUP);  // in VALUES_PAD keys

// Codes of V are INT8, or e4m3 where those of P are.
constexpr float VALUE_MAX = P_TYPE == PType::E4M3 ? E4M3_MAX : INT8_MAX;
__device__ __forceinline__ int value_code(float x, const Coding& coding) {
  if constexpr (P_TYPE == PType::E4M3) return code_e4m3(x, coding.inverse);
  return coding.code(x);
}

// Where the code of a key lies in its channel: key 8 n + 2 t + j of 16 at 4 t + 2 n + j, so that
// four neighbours are the keys whose scores one lane has of two key tiles (prims/mma.cuh).
__device__ __forceinline__ int place_of_key(int key) {
  return key / 16 * 16 + key / 2 % 4 * 4 + key / 8 % 2 * 2 + key % 2;
}

// A slice of rows lies within one group.
extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void channel_absmax(
    const __grid_constant__ QuantizeParams p) {
  __shared__ uint32_t absmax[HEAD_DIM * SIDES];  // [HEAD_DIM, SIDES] bits, of the slice
  const Place at(p, p.splits, p.split_rows);
  if (VARLEN && at.rows <= 0) return;
  for (int i = thread_id(); i < HEAD_DIM * SIDES; i += NUM_THREADS) absmax[i] = 0;
  __syncthreads();  // the zeros are there before a lane adds its maxima

  const elem_t* X = at.X(p);             // [rows, HEAD_DIM]
  Reach reach[LANE_ACCESSES][VEC] = {};  // of this lane's channels
  Mean mean;
  mean.load(p, at);
#pragma unroll ROWS_IN_FLIGHT
  for (int row = row_in_pass(); row < at.rows; row += ROWS_PER_PASS)
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
      if (col_of(a) < HEAD_DIM) {
        const auto x =
            *reinterpret_cast<const Words<elem_t, VEC>*>(X + row * p.X_stride.len + col_of(a));
#pragma unroll
        for (int j = 0; j < VEC; ++j) reach[a][j].admit(__fsub_rn(x.element(j), mean.of[a][j]));
      }
#pragma unroll
  for (int a = 0; a < LANE_ACCESSES; ++a)
    if (col_of(a) < HEAD_DIM)
#pragma unroll
      for (int j = 0; j < VEC; ++j)
#pragma unroll
        for (int i = 0; i < SIDES; ++i)
          atomicMax(&absmax[(col_of(a) + j) * SIDES + i], reach[a][j].bits[i]);
  __syncthreads();  // every lane has added its maxima before the block passes them on
  for (int i = thread_id(); i < HEAD_DIM * SIDES; i += NUM_THREADS)
    atomicMax(&p.absmax[at.first_scale(p) * HEAD_DIM * SIDES + i], absmax[i]);
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void encode_values(
    const __grid_constant__ QuantizeParams p) {
  constexpr int LD = VALUES_PAD + 4;  // the codes of the next channel begin a bank further on
  __shared__ alignas(4) int8_t tile[HEAD_DIM * LD];   // [HEAD_DIM, VALUES_PAD] codes
  __shared__ Coding coding[VALUE_GROUPS * HEAD_DIM];  // [VALUE_GROUPS, HEAD_DIM]
  const Place at(p, ceil_div(p.length, VALUES_PAD), VALUES_PAD);
  if (VARLEN && at.rows <= 0) return;
  for (int i = thread_id(); i < VALUE_GROUPS * HEAD_DIM; i += NUM_THREADS) {
    const int row = i / HEAD_DIM * GROUP;
    if (row >= at.rows) continue;
    const int64_t index = at.first_scale(p) * HEAD_DIM + i;
    const float scale = coding[i].make(&p.absmax[index * SIDES], VALUE_MAX);  // R1
    if ((at.row0 + row) % GROUP != 0) continue;
    p.scale[index] = scale;
    if constexpr (ZERO_POINTS) p.zero[index] = coding[i].zero;
  }
  __syncthreads();  // the inverses are there before a value is coded with them

  const elem_t* X = at.X(p);  // [rows, HEAD_DIM]
  Mean mean;
  mean.load(p, at);
  for (int row = row_in_pass(); row < VALUES_PAD; row += ROWS_PER_PASS) {
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      if (col_of(a) >= HEAD_DIM) continue;
      Words<elem_t, VEC> x = {};
      if (row < at.rows)
        x = *reinterpret_cast<const Words<elem_t, VEC>*>(X + row * p.X_stride.len + col_of(a));
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const int col = col_of(a) + j;
        const float value = __fsub_rn(x.element(j), mean.of[a][j]);  // R0
        tile[col * LD + place_of_key(row)] =
            row < at.rows ? value_code(value, coding[row / GROUP * HEAD_DIM + col]) : 0;  // R1
      }
    }
  }
  __syncthreads();                    // the codes are there before they leave channel by channel
  int8_t* codes = at.value_codes(p);  // [HEAD_DIM, padded], from row row0
  for (int i = thread_id(); i < HEAD_DIM * VALUES_PAD / 4; i += NUM_THREADS) {
    const int col = i / (VALUES_PAD / 4), row = i % (VALUES_PAD / 4) * 4;
    *reinterpret_cast<uint32_t*>(codes + int64_t(col) * p.padded + row) =
        *reinterpret_cast<const uint32_t*>(tile + col * LD + row);
  }
}
