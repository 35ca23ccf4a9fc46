// weight_blocks -- weights to INT8 codes, with a float scale for every block of BLOCK_M x BLOCK_N,
//                  and codes and scales back to weights.
//
// Idea         Memory decides, as in act_quant.cu: a thread block reads its block of the weight
//              once and keeps it in registers, 64 numbers or fewer to a thread, until their largest
//              magnitude is known. All loads of a thread are under way before the first is looked
//              at. The way back shares the same map from threads to numbers.
// Kept simple  One block of the weight to a thread block, whatever its size. What lies past the end
//              of a row or column is a 0 that nobody stores.
// Rounding     R1 scale, inverse, code, and on the way back the product: each operation rounded
//              once (prims/quant.cuh); then the product to elem_t
// Mirror       cupyattn.quant.blocks.quantize_blocks and dequantize_blocks, to the bit; of a weight
//              that is NaN because its scale is, the bits are those of some NaN
// Bound        docs/MATH_REFERENCE.md, Q1: half a scale; Q6: there and back
#include "prims/config.cuh"
#include "prims/quant.cuh"
#include "prims/warp.cuh"

// cupyattn/quant/weights.py packs it from one table of (name, type); a test compares the two.
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

constexpr int ROW_ACCESSES = BLOCK_N / VEC;                              // per row of a block
constexpr int ACCESSES = ceil_div(BLOCK_M * ROW_ACCESSES, NUM_THREADS);  // per thread
static_assert(BLOCK_N % VEC == 0, "VEC must divide BLOCK_N, or an access would meet two scales");
static_assert(ACCESSES * VEC <= 64, "a thread keeps at most 64 numbers: NUM_WARPS must be more");

// The block of the weight that this thread block works on, and what of it a thread has.
struct Block {
  int down, across;  // its place among the blocks
  int thread;
  __device__ __forceinline__ Block(const WeightParams& p, int thread) : thread(thread) {
    const uint32_t per_line = ceil_div(p.columns, BLOCK_N);
    down = blockIdx.x / per_line, across = blockIdx.x % per_line;
  }
  __device__ __forceinline__ float* scale(const WeightParams& p) const {  // [1]
    return p.scales + down * p.scales_stride + across;
  }
  // Of access a the row and the first column in the weight, and whether there is such a place.
  __device__ __forceinline__ int row(int a) const {
    return down * BLOCK_M + (a * NUM_THREADS + thread) / ROW_ACCESSES;
  }
  __device__ __forceinline__ int col(int a) const {
    return across * BLOCK_N + (a * NUM_THREADS + thread) % ROW_ACCESSES * VEC;
  }
  __device__ __forceinline__ bool has(const WeightParams& p, int a) const {
    return row(a) < min(p.rows, (down + 1) * BLOCK_M) && col(a) < p.columns;
  }
};

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void weight_quant(
    const __grid_constant__ WeightParams p) {
  __shared__ uint32_t of_warp[NUM_WARPS];  // bits of largest magnitudes
  const Block block(p, thread_id());
  const elem_t* W = static_cast<const elem_t*>(p.W);  // [rows, columns]
  Words<elem_t, VEC> w[ACCESSES];
#pragma unroll
  for (int a = 0; a < ACCESSES; ++a) {
    w[a] = {};
    if (block.has(p, a))
      w[a] = *reinterpret_cast<const Words<elem_t, VEC>*>(
          W + block.row(a) * p.W_stride + block.col(a));
  }
#pragma unroll
  for (int a = 0; a < ACCESSES; ++a) w[a].use_from_here();

  uint32_t absmax = 0;
#pragma unroll
  for (int a = 0; a < ACCESSES; ++a)
#pragma unroll
    for (int j = 0; j < VEC; ++j) absmax = max(absmax, magnitude_bits(w[a].element(j)));
  absmax = shfl_max<WARP_SIZE>(absmax);
  if (lane_id() == 0) of_warp[warp_id()] = absmax;
  __syncthreads();  // the largest magnitudes of all warps are visible
#pragma unroll
  for (int warp = 0; warp < NUM_WARPS; ++warp) absmax = max(absmax, of_warp[warp]);
  const Scale scale = scale_of_absmax(absmax);  // R1
  if (thread_id() == 0) *block.scale(p) = scale.scale;

  const Block same(p, thread_id_anew());  // or places would take registers all the while
#pragma unroll
  for (int a = 0; a < ACCESSES; ++a) {
    if (!same.has(p, a)) continue;
    int c[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) c[j] = code_s8(w[a].element(j), scale.inverse);  // R1
    store_s8(p.codes + same.row(a) * p.codes_stride + same.col(a), c);
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void weight_dequant(
    const __grid_constant__ WeightParams p) {
  const Block block(p, thread_id());
  Words<int8_t, VEC> codes[ACCESSES];
#pragma unroll
  for (int a = 0; a < ACCESSES; ++a) {
    codes[a] = {};
    if (block.has(p, a))
      codes[a] = *reinterpret_cast<const Words<int8_t, VEC>*>(
          p.codes + block.row(a) * p.codes_stride + block.col(a));
  }
  const float scale = *block.scale(p);
#pragma unroll
  for (int a = 0; a < ACCESSES; ++a) codes[a].use_from_here();

  const Block same(p, thread_id_anew());  // as above
  elem_t* W = static_cast<elem_t*>(p.W);  // [rows, columns]
#pragma unroll
  for (int a = 0; a < ACCESSES; ++a) {
    if (!same.has(p, a)) continue;
    Vec<elem_t, VEC> w;
#pragma unroll
    for (int j = 0; j < VEC; ++j)
      w.v[j] = from_float<elem_t>(__fmul_rn(codes[a].element(j), scale));  // R1
    *reinterpret_cast<Vec<elem_t, VEC>*>(W + same.row(a) * p.W_stride + same.col(a)) = w;
  }
}
