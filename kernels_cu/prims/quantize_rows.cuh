// quantize_rows.cuh -- the rows of an operand that a block quantises: where they lie, how its lanes
// share them, and what they hold of them. BLOCK_Q rows, GROUP_Q of them to a scale.
// NOTE: the 1 of its kernels' launch bounds asks for nothing, but without it ptxas aims at 64
// registers and spills the last two.
#pragma once

#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/quant.cuh"
#include "prims/varlen.cuh"
#include "prims/warp.cuh"

constexpr int BLOCK_ROWS = BLOCK_Q;
constexpr int GROUP = GROUP_Q;
constexpr int GROUPS = BLOCK_ROWS > GROUP ? BLOCK_ROWS / GROUP : 1;  // scales that a block needs

constexpr int ACCESSES = HEAD_DIM / VEC;                                               // per row
constexpr int LANES = power_of_two_from(ACCESSES < WARP_SIZE ? ACCESSES : WARP_SIZE);  // per row
constexpr int LANE_ACCESSES = ceil_div(ACCESSES, LANES);  // per lane and row
constexpr int ROWS_PER_PASS = NUM_THREADS / LANES;
constexpr int PASSES = ceil_div(BLOCK_ROWS, ROWS_PER_PASS);
constexpr int ROWS_IN_FLIGHT = ceil_div(8, LANE_ACCESSES);  // that a sum waits for at once

static_assert(GROUP >= 1, "quantize needs GROUP_Q, the rows per scale");
static_assert(
    BLOCK_ROWS % GROUP == 0 || GROUP % BLOCK_ROWS == 0,
    "BLOCK_Q must hold whole groups of GROUP_Q rows, or divide a group");

// Where this block works: rows row0, row0 + 1, ... of one (batch, head).
struct Place {
  int64_t batch, head, batch_head;
  int row0;   // first row
  int rows;   // rows of this block that exist; VARLEN: none where not positive
  int first;  // VARLEN: first row of the sequence in the packed array
  __device__ __forceinline__ Place(const QuantizeParams& p, uint32_t chunks, int chunk_rows) {
    const uint32_t index = blockIdx.x / chunks, heads = p.heads;
    batch_head = index, batch = index / heads, head = index % heads;
    row0 = blockIdx.x % chunks * chunk_rows;
    int length = p.length;
    first = 0;
    if constexpr (VARLEN) {
      const Sequence sequence(p.cu_seqlens, batch, p.length);
      first = sequence.first, length = sequence.length;
    }
    rows = min(chunk_rows, length - row0);
  }
  __device__ __forceinline__ const elem_t* X(const QuantizeParams& p) const {  // [rows, HEAD_DIM]
    return static_cast<const elem_t*>(p.X) + batch * p.X_stride.batch + head * p.X_stride.head +
           (VARLEN ? first + row0 : row0) * p.X_stride.len;
  }
  __device__ __forceinline__ int8_t* codes(const QuantizeParams& p) const {  // [rows, HEAD_DIM]
    if constexpr (VARLEN) return p.codes + (head * p.total + first + row0) * HEAD_DIM;
    return p.codes + (batch_head * p.length + row0) * HEAD_DIM;
  }
  __device__ __forceinline__ int8_t* value_codes(const QuantizeParams& p) const {
    const int64_t first_code = ::first_scale<VALUES_PAD>(p.cu_seqlens, batch) * VALUES_PAD;
    return p.codes + (VARLEN ? head : batch_head) * HEAD_DIM * p.padded +  // [HEAD_DIM, padded]
           first_code + row0;
  }
  __device__ __forceinline__ int64_t first_scale(const QuantizeParams& p) const {  // of this block
    return batch * p.scale_stride_batch + head * p.scale_stride_head +
           ::first_scale<GROUP>(p.cu_seqlens, batch) + row0 / GROUP;
  }
  __device__ __forceinline__ int32_t* code_sum(const QuantizeParams& p) const {  // [rows]
    return p.code_sum + batch * p.sum_stride_batch + head * p.sum_stride_head +
           ::first_scale<1>(p.cu_seqlens, batch) + row0;
  }
};

__device__ __forceinline__ int lane_in_row() { return threadIdx.x % LANES; }
__device__ __forceinline__ int row_in_pass() { return threadIdx.x / LANES; }
__device__ __forceinline__ int row_of(int pass) { return pass * ROWS_PER_PASS + row_in_pass(); }
__device__ __forceinline__ int col_of(int access) { return (access * LANES + lane_in_row()) * VEC; }

// The mean of one lane's channels.
struct Mean {
  float of[LANE_ACCESSES][VEC];  // 0 without smoothing

  __device__ __forceinline__ void load(const QuantizeParams& p, const Place& at) {
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        of[a][j] = p.mean != nullptr && col_of(a) < HEAD_DIM
                       ? p.mean[at.batch_head * HEAD_DIM + col_of(a) + j]
                       : 0.0f;
  }
};

// What one lane holds of the block's rows and of the mean.
struct Rows {
  Words<elem_t, VEC> x[PASSES][LANE_ACCESSES];
  Mean mean;

  __device__ __forceinline__ void load(const QuantizeParams& p, const Place& at) {
    const elem_t* X = at.X(p);                        // [rows, HEAD_DIM]
    X += row_in_pass() * p.X_stride.len + col_of(0);  // this lane's first access
    const int64_t pass_stride = ROWS_PER_PASS * p.X_stride.len;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass, X += pass_stride)
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) {
        x[pass][a] = {};
        if (row_of(pass) < at.rows && col_of(a) < HEAD_DIM)
          x[pass][a] = *reinterpret_cast<const Words<elem_t, VEC>*>(X + a * LANES * VEC);
      }
    mean.load(p, at);
  }

  __device__ __forceinline__ float value(int pass, int a, int j) const {
    return __fsub_rn(x[pass][a].element(j), mean.of[a][j]);  // R0
  }

  __device__ __forceinline__ void use_from_here() {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) x[pass][a].use_from_here();
  }

  // How far this lane's part of a row that exists reaches.
  __device__ __forceinline__ Reach reach(int pass) const {
    Reach found = {};
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
      if (col_of(a) < HEAD_DIM)
#pragma unroll
        for (int j = 0; j < VEC; ++j) found.admit(value(pass, a, j));
    return found;
  }

  // Stores the codes of this lane's part of a row; returns their sum.
  template <typename Code>
  __device__ __forceinline__ int store(int8_t* codes, int pass, Code code) const {
    int sum = 0;
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      int c[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) c[j] = code(value(pass, a, j));
      if (col_of(a) >= HEAD_DIM) continue;
      store_s8(codes + col_of(a), c);
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum += c[j];
    }
    return sum;
  }
};

// Stores the sum of a row's codes, of which every lane of the row gives its part.
__device__ __forceinline__ void store_code_sum(int32_t* code_sum, int row, int rows, int part) {
  if constexpr (ZERO_POINTS) {
    const int sum = shfl_sum<LANES>(part);
    if (lane_in_row() == 0 && row < rows) code_sum[row] = sum;
  }
}
