// quantize -- Q or K in 16 or 32 bits to INT8 codes with one float scale per GROUP rows; V with one
//             for each channel of GROUP rows. ZERO_POINTS: a zero point goes with every scale.
//
// Idea         Memory decides: every byte is read once, stays in registers between the search for
//              the largest magnitude and the coding, and leaves as a half or a quarter of itself.
//              A block takes BLOCK_Q rows: LANES neighbouring lanes share a row, a warp takes a few
//              rows at a time, and rows meet their group in shared memory, at any granularity.
//              Groups too large for a block (a head, a tensor) are read twice.
// Entries      quantize_int8  whole groups in a block: maximum, scale, codes
//              group_absmax   the maxima of groups that span blocks
//              encode_int8    codes from those maxima, or from scales that were given
//              channel_sum, channel_mean  the mean of the keys, which smoothing subtracts
//              channel_absmax, encode_values  V: the maxima of its channels; its codes, transposed
// Kept simple  The operand plays Q's part in config.cuh: BLOCK_Q rows, GROUP_Q to a scale.
//              One indexing for every granularity: the scale of a row is scale[row / GROUP].
//              No float is summed by an atomic: sums have a fixed order, and the maximum of bits
//              needs none. The same input gives the same bits on every run.
// Rounding     R0 x - mean; R1 scale, inverse, code: each operation rounded once (prims/quant.cuh)
// Mirror       cupyattn.quant.quantizers.quantize_symmetric, quantize_values and, for zero points,
//              quantize_affine, quantize_values_affine, to the bit
// Bound        cupyattn.bounds.quantisation: half a scale
// Tried, lost  Holding the rows as arrays of 16-bit numbers: one register each, and the compiler
//              then waits for the first loads before it issues the last (seen in the machine code).
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

// NOTE: the 1 of the launch bounds asks for nothing, but without it ptxas aims at 64 registers and
// spills the last two.

// ---- a block's rows -----------------------------------------------------------------------------

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

// ---- codes --------------------------------------------------------------------------------------

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

// ---- the mean of the keys -----------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void channel_sum(
    const __grid_constant__ QuantizeParams p) {
  __shared__ float sums[ROWS_PER_PASS][HEAD_DIM];  // [ROWS_PER_PASS, HEAD_DIM]
  const Place at(p, p.splits, p.split_rows);
  const elem_t* X = at.X(p);           // [rows, HEAD_DIM]
  float sum[LANE_ACCESSES][VEC] = {};  // of this lane's channels, over its rows in rising order
#pragma unroll ROWS_IN_FLIGHT
  for (int row = row_in_pass(); row < at.rows; row += ROWS_PER_PASS)
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
      if (col_of(a) < HEAD_DIM) {
        const auto x =
            *reinterpret_cast<const Words<elem_t, VEC>*>(X + row * p.X_stride.len + col_of(a));
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[a][j] += x.element(j);
      }
#pragma unroll
  for (int a = 0; a < LANE_ACCESSES; ++a)
    if (col_of(a) < HEAD_DIM)
#pragma unroll
      for (int j = 0; j < VEC; ++j) sums[row_in_pass()][col_of(a) + j] = sum[a][j];
  __syncthreads();  // every lane's sums are there before they are added up
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS) {
    float total = 0.0f;
    for (int row = 0; row < ROWS_PER_PASS; ++row) total += sums[row][col];
    p.partial_sum[int64_t(blockIdx.x) * HEAD_DIM + col] = total;
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void channel_mean(
    const __grid_constant__ QuantizeParams p) {
  const int64_t batch_head = blockIdx.x;
  int length = p.length;
  if constexpr (VARLEN)
    length = max(1, Sequence(p.cu_seqlens, batch_head / p.heads, p.length).length);
  const float* partial_sum =
      p.partial_sum + batch_head * p.splits * HEAD_DIM;  // [splits, HEAD_DIM]
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS) {
    float total = 0.0f;
#pragma unroll 8
    for (int split = 0; split < p.splits; ++split) total += partial_sum[split * HEAD_DIM + col];
    // NOTE: any vector that all keys share may be subtracted. Where the sum is not finite it is 0,
    // so that one NaN does not reach every key of the head.
    const bool finite = magnitude_bits(total) < INFINITY_BITS;
    p.mean[batch_head * HEAD_DIM + col] = finite ? total / length : 0.0f;
  }
}

// ---- V ------------------------------------------------------------------------------------------

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
