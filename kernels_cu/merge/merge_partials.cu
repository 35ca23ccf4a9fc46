// merge_partials -- merges partial results (O and lse of each row) over disjoint keys, with the
// results merged so far. The keys are on different ranks.
//
// Idea         Times e^(lse - the lse of both) they may be added. O so far is float32 in memory,
//              except that the first part is stored as received. With the last part the result is
//              written in its type, so no separate conversion is needed.
// Kept simple  The partial result plays Q's part in config.cuh: BLOCK_Q rows to a block. One thread
//              finds the weights of a row, all threads share the columns, AT_ONCE accesses of each
//              under way. The old and the new O may be one array: a thread reads before it writes.
// Rounding     R13 the weights, their sum, two products and a sum for each element, lse, the result
// Mirror       cupyattn.distributed.merging.merge_mirror
// Bound        cupyattn.distributed.bounds.merged
#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/params.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct MergeParams {
  const void* before_O;   // [batch, heads, length, HEAD_DIM] of before_t, so far
  void* O;                // [batch, heads, length, HEAD_DIM] of after_t, with what comes in
  float* lse;             // [batch, heads, length], so far, and with what comes in
  const void* part_O;     // [batch, heads, length, HEAD_DIM], what comes in
  const float* part_lse;  // [batch, heads, length]
  Strides before_O_stride;
  Strides O_stride;
  Strides part_O_stride;
  int64_t lse_stride[2];       // of batch and heads; rows are contiguous
  int64_t part_lse_stride[2];  // likewise
  int32_t heads;
  int32_t length;
};

constexpr int ACCESSES = HEAD_DIM / VEC;  // per row
constexpr int AT_ONCE = 4;                // accesses of a thread under way

// VEC elements of a row, in accesses of at most 16 bytes.
template <typename T>
struct Access {
  static constexpr int PART = VEC * sizeof(T) <= 16 ? VEC : 16 / sizeof(T);
  Vec<T, PART> parts[VEC / PART];
  __device__ __forceinline__ T& element(int j) { return parts[j / PART].v[j % PART]; }
  __device__ __forceinline__ void load(const T* row) {
#pragma unroll
    for (int i = 0; i < VEC / PART; ++i)
      parts[i] = *reinterpret_cast<const Vec<T, PART>*>(row + i * PART);
  }
  __device__ __forceinline__ void store(T* row) const {
#pragma unroll
    for (int i = 0; i < VEC / PART; ++i)
      *reinterpret_cast<Vec<T, PART>*>(row + i * PART) = parts[i];
  }
};

struct SharedStorage {
  float weights[BLOCK_Q][2];  // of what was and of what comes
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

extern "C" __global__ __launch_bounds__(NUM_THREADS, 4) void merge_partials(
    const __grid_constant__ MergeParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int chunks = ceil_div(p.length, BLOCK_Q);
  const int row0 = blockIdx.x % chunks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / chunks;
  const int64_t batch = batch_head / p.heads, head = batch_head % p.heads;
  const int rows = min(BLOCK_Q, p.length - row0);
  float* lse = p.lse + batch * p.lse_stride[0] + head * p.lse_stride[1] + row0;  // [rows]
  const float* part_lse =                                                        // [rows]
      p.part_lse + batch * p.part_lse_stride[0] + head * p.part_lse_stride[1] + row0;
  for (int row = thread_id(); row < rows; row += NUM_THREADS) {
    const float before = lse[row], incoming = part_lse[row];
    const float largest = fmaxf(before, incoming);
    const float top = largest == NEG_INF ? 0.0f : largest;      // -inf - (-inf) would be NaN
    const float w0 = ex2_approx_ftz((before - top) * LOG2E);    // R13
    const float w1 = ex2_approx_ftz((incoming - top) * LOG2E);  // R13
    const float sum = w0 + w1;                                  // R13
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    smem.weights[row][0] = w0 * inverse;  // R13
    smem.weights[row][1] = w1 * inverse;
    lse[row] = fmaf(log2f(sum), LN2, top);  // R13; of no keys -inf
  }
  __syncthreads();  // the weights of all rows are visible

  const before_t* before_O = static_cast<const before_t*>(p.before_O) +  // [rows, HEAD_DIM]
                             batch * p.before_O_stride.batch + head * p.before_O_stride.head +
                             row0 * p.before_O_stride.len;
  after_t* O = static_cast<after_t*>(p.O) +  // [rows, HEAD_DIM]
               batch * p.O_stride.batch + head * p.O_stride.head + row0 * p.O_stride.len;
  const elem_t* part_O = static_cast<const elem_t*>(p.part_O) +  // [rows, HEAD_DIM]
                         batch * p.part_O_stride.batch + head * p.part_O_stride.head +
                         row0 * p.part_O_stride.len;
  const int accesses = rows * ACCESSES;
  for (int first = thread_id(); first < accesses; first += AT_ONCE * NUM_THREADS) {
    Access<before_t> before[AT_ONCE] = {};
    Access<elem_t> incoming[AT_ONCE] = {};
#pragma unroll
    for (int a = 0; a < AT_ONCE; ++a) {
      const int i = first + a * NUM_THREADS;
      const int row = i / ACCESSES, col = i % ACCESSES * VEC;
      if (i < accesses) before[a].load(before_O + row * p.before_O_stride.len + col);
      if (i < accesses) incoming[a].load(part_O + row * p.part_O_stride.len + col);
    }
#pragma unroll
    for (int a = 0; a < AT_ONCE; ++a) {
      const int i = first + a * NUM_THREADS;
      const int row = i / ACCESSES, col = i % ACCESSES * VEC;
      if (i >= accesses) continue;
      const float w0 = smem.weights[row][0], w1 = smem.weights[row][1];
      Access<after_t> merged;
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        const float was = w0 * to_float(before[a].element(c));
        merged.element(c) =
            from_float<after_t>(fmaf(w1, to_float(incoming[a].element(c)), was));  // R13
      }
      merged.store(O + row * p.O_stride.len + col);
    }
  }
}
