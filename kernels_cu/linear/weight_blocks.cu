// weight_blocks -- weights to INT8 codes, with a float scale for every block of BLOCK_M x BLOCK_N,
//                  and codes and scales back to weights.
//
// Idea         Memory decides, as in act_quant.cu. A thread block reads its block of the weight
//              once. It keeps it in registers, at most 64 numbers per thread, until the largest
//              magnitude is known. All loads of a thread are in flight before it reads the first.
//              The way back shares the same map from threads to numbers. A thread keeps to one
//              column, so its addresses take a few additions. Accesses spread over the block took
//              17 instead of 14 instructions per number of bfloat16, and up to 255 registers (SASS
//              of sm_90).
// Kept simple  One block of the weight to a thread block, whatever its size. Elements past the end
// of a row or column are 0 and are not stored.
// Rounding     R1 scale, inverse, code, and on the way back the product: each operation rounded
//              once (quant.cuh); then the product to elem_t
// Mirror       cupyattn.reference.weights.quantize_blocks and dequantize_blocks, to the bit; of a
//              weight that is NaN because its scale is, the bits are those of some NaN
// Bound        docs/MATH_REFERENCE.md [L14]: half a scale; [L20]: there and back
#include "prims/config.cuh"
#include "prims/codes/quant.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct WeightParams {
  void* W;        // [rows, columns] of elem_t: weight_quant reads it, weight_dequant writes it
  int8_t* codes;  // [rows, columns]: the other way round
  float* scales;  // [ceil(rows / BLOCK_M), ceil(columns / BLOCK_N)]: as codes
  int64_t W_stride;
  int64_t codes_stride;
  int64_t scales_stride;
  int32_t rows;
  int32_t columns;
};

constexpr int ROW_ACCESSES = BLOCK_N / VEC;            // per row of a block
constexpr int PASS_ROWS = NUM_THREADS / ROW_ACCESSES;  // rows that all threads take at a time
static_assert(PASS_ROWS >= 1, "every access to a row of a block takes a thread of its own");
constexpr int PASSES = ceil_div(BLOCK_M, PASS_ROWS);  // accesses of a thread, down a column
static_assert(BLOCK_N % VEC == 0, "VEC must divide BLOCK_N, or an access would meet two scales");
static_assert(PASSES * VEC <= 64, "a thread keeps at most 64 numbers: NUM_WARPS must be more");

// This thread's part of the block of the weight: an access in every PASS_ROWS-th row.
struct Share {
  int down, across;  // place of the block among the others
  int row, col;      // of the first access, in the weight
  int rows;          // from there to the end of the block, or of the weight; 0: nothing is here
  __device__ __forceinline__ explicit Share(const WeightParams& p) {
    const uint32_t per_line = ceil_div(p.columns, BLOCK_N), thread = thread_id();
    down = blockIdx.x / per_line, across = blockIdx.x % per_line;
    const int own_row = thread / ROW_ACCESSES;
    row = down * BLOCK_M + own_row;
    col = across * BLOCK_N + thread % ROW_ACCESSES * VEC;
    rows = own_row < PASS_ROWS && col < p.columns ? min(BLOCK_M - own_row, p.rows - row) : 0;
  }
  __device__ __forceinline__ float* scale(const WeightParams& p) const {  // [1]
    return p.scales + down * p.scales_stride + across;
  }
  __device__ __forceinline__ bool has(int pass) const { return pass * PASS_ROWS < rows; }
  __device__ __forceinline__ int64_t offset(int pass, int64_t stride) const {
    return (row + pass * PASS_ROWS) * stride + col;
  }
};

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void weight_quant(
    const __grid_constant__ WeightParams p) {
  __shared__ uint32_t of_warp[NUM_WARPS];  // bits of largest magnitudes
  const Share share(p);
  const elem_t* W = static_cast<const elem_t*>(p.W);  // [rows, columns]
  Words<elem_t, VEC> w[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    w[pass] = {};
    if (share.has(pass))
      w[pass] = *reinterpret_cast<const Words<elem_t, VEC>*>(W + share.offset(pass, p.W_stride));
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) w[pass].use_from_here();

  uint32_t absmax = 0;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
    for (int j = 0; j < VEC; ++j) absmax = max(absmax, magnitude_bits(w[pass].element(j)));
  absmax = shfl_max<WARP_SIZE>(absmax);
  if (lane_id() == 0) of_warp[warp_id()] = absmax;
  __syncthreads();  // the largest magnitudes of all warps are visible
#pragma unroll
  for (int warp = 0; warp < NUM_WARPS; ++warp) absmax = max(absmax, of_warp[warp]);
  const Scale scale = scale_of_absmax(absmax);  // R1
  if (thread_id() == 0) *share.scale(p) = scale.scale;

#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    int c[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) c[j] = code_s8(w[pass].element(j), scale.inverse);  // R1
    if (share.has(pass)) store_s8(p.codes + share.offset(pass, p.codes_stride), c);
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void weight_dequant(
    const __grid_constant__ WeightParams p) {
  const Share share(p);
  Words<int8_t, VEC> codes[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    codes[pass] = {};
    if (share.has(pass))
      codes[pass] = *reinterpret_cast<const Words<int8_t, VEC>*>(
          p.codes + share.offset(pass, p.codes_stride));
  }
  const float scale = *share.scale(p);
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) codes[pass].use_from_here();

  elem_t* W = static_cast<elem_t*>(p.W);  // [rows, columns]
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    Vec<elem_t, VEC> w;
#pragma unroll
    for (int j = 0; j < VEC; ++j)
      w.v[j] = from_float<elem_t>(__fmul_rn(codes[pass].element(j), scale));  // R1
    if (share.has(pass))
      *reinterpret_cast<Vec<elem_t, VEC>*>(W + share.offset(pass, p.W_stride)) = w;
  }
}
