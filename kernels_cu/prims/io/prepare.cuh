// prepare.cuh -- preparation of rows of Q and K before they are quantised, in float32. QK_NORM
// divides by their root mean square and applies weights. NORM_BY_TOKEN: that of all heads of a
// token, which token_factors.cu computes before. NORM_BY_PART: two parts of the rows, such as text
// and image, have weights of their own. ROPE then rotates them by their positions.
// QK_ROTATE multiplies them by an orthogonal matrix, which spreads a channel of large numbers.
// Every operation is a named intrinsic with one IEEE rounding. So none is contracted, and all equal
// NumPy's: cupyattn/problem/row_preparation.py does the same, bit for bit.
#pragma once

#include "prims/config.cuh"
#include "prims/io/rope.cuh"
#include "prims/instructions/warp.cuh"

constexpr bool PREPARED = ROPE || QK_NORM || QK_ROTATE;
static_assert(
    !QK_ROTATE || HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256,
    "QK_ROTATE takes HEAD_DIM 64, 128 or 256");
constexpr float NOT_A_NUMBER = __builtin_bit_cast(float, 0x7fc00000u);

// Part of the parameters of a kernel; empty if nothing is prepared.
template <bool>
struct PrepareParams {};
template <>
struct PrepareParams<true> {
  const float* cos;  // [positions, ROPE_TABLE]; not read unless ROPE
  const float* sin;
  const float* weight;        // [heads or parts, HEAD_DIM]; not read unless QK_NORM
  const float* token_factor;  // [batch, tokens]; not read unless NORM_BY_TOKEN
  int64_t weight_step;        // between heads, or 0; NORM_BY_PART: rows of the first part
  float eps;                  // added to the mean square
  int32_t position;           // of row 0
};

// token_factors.cu takes it.
struct TokenFactorParams {
  const void* X;  // [batch, heads, length, HEAD_DIM], the operand
  float* factor;  // [batch, length]
  Strides X_stride;
  int32_t heads;
  int32_t length;
  float eps;  // added to the mean square
};

// normalise.cu takes it; cupyattn/plans/structs.py packs it from one table of (name, type).
struct NormParams : PrepareParams<true> {
  const void* X;  // [batch, heads, length, HEAD_DIM], the operand
  void* Y;        // [batch, heads, length, HEAD_DIM], contiguous: X, every row prepared
  Strides X_stride;
  int32_t heads;
  int32_t length;
  const int32_t* cu_seqlens;  // [batch + 1], not read unless VARLEN; length is then the longest
  int32_t total;              // VARLEN: rows of all sequences
};

// backward_normalise.cu takes it, whose Y receives dX.
struct NormGradientParams : NormParams {
  const void* dY;     // [batch, heads, length, HEAD_DIM], contiguous: of the prepared rows
  float* partial_dW;  // [batch, heads, chunks of BLOCK_Q rows, HEAD_DIM]
};

// Neighbours added, then neighbours of the sums, and so on: the order is that of a whole row, at
// any width of access. N is a power of two.
template <int N>
__device__ __forceinline__ float sum_of_neighbours(float (&x)[N]) {
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2)
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = __fadd_rn(x[2 * i], x[2 * i + 1]);
  return x[0];
}

// The same over aligned groups of LANES lanes (a power of two); every lane gets the sum.
template <int LANES>
__device__ __forceinline__ float shfl_sum_of_neighbours(float x) {
#pragma unroll
  for (int offset = 1; offset < LANES; offset *= 2)
    x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, offset));
  return x;
}

// R0: the factor that normalises a row, from the mean of its squares. A mean that overflows, or
// that holds a NaN or an infinity, gives NaN: never finite garbage.
__device__ __forceinline__ float norm_factor(float mean_square, float eps) {
  const float mean = __fadd_rn(mean_square, eps);
  return mean_square < -NEG_INF ? __frcp_rn(__fsqrt_rn(mean)) : NOT_A_NUMBER;
}

// R0: a sum over HEAD_DIM numbers to their mean. By a power of two, product and quotient are equal.
__device__ __forceinline__ float of_head_dim(float sum) {
  if constexpr ((HEAD_DIM & (HEAD_DIM - 1)) == 0) return __fmul_rn(sum, 1.0f / HEAD_DIM);
  return __fdiv_rn(sum, float(HEAD_DIM));
}

// Lanes that share a row, each of which takes accesses to either member of its pairs.
constexpr int PAIR_LANES = power_of_two_from(ROPE_ACCESSES < WARP_SIZE ? ROPE_ACCESSES : WARP_SIZE);
constexpr int LANE_PAIRS = ceil_div(ANGLES == 0 ? 1 : ROPE_ACCESSES, PAIR_LANES);

// Addresses of weights and tables for the rows of one (batch, head).
struct Preparation {
  const float* cos;     // [rows, ROPE_TABLE], from the first row of this block on
  const float* sin;     // [rows, ROPE_TABLE]
  const float* weight;  // [HEAD_DIM]; NORM_BY_PART: [2, HEAD_DIM]
  const float* factor;  // [rows], NORM_BY_TOKEN
  float eps;
  int split;  // NORM_BY_PART: first row of the second part, from the first row of this block on
  // `token0`: number of the first row among all tokens of the operand.
  __device__ __forceinline__
  Preparation(const PrepareParams<true>& p, int64_t head, int row0, int64_t token0)
      : cos(p.cos + int64_t(p.position + row0) * ROPE_TABLE),
        sin(p.sin + int64_t(p.position + row0) * ROPE_TABLE),
        weight(p.weight + (NORM_BY_PART ? 0 : head * p.weight_step)),
        factor(p.token_factor + token0),
        eps(p.eps),
        split(NORM_BY_PART ? int(p.weight_step) - row0 : 0) {}
  __device__ __forceinline__ Preparation of_row(int row) const {  // with the weights of its part
    Preparation own = *this;
    if constexpr (NORM_BY_PART) own.weight += (row >= split) * HEAD_DIM;
    return own;
  }
};

// A lane's part of a row. Lanes past the last pair have zeros.
struct PreparedRow {
  RopePairs<float> of[LANE_PAIRS];

  static __device__ __forceinline__ int pair0(int i) {
    return int(i * PAIR_LANES + threadIdx.x % PAIR_LANES) * ROPE_PAIRS;
  }
  // Column of an access. Accesses to first and to second members alternate. HEAD_DIM: there is
  // none.
  static __device__ __forceinline__ int column(int access) {
    const int first = pair0(access / 2);
    return first < ANGLES ? RopePairs<float>::column(access % 2, first) : HEAD_DIM;
  }
  __device__ __forceinline__ float& element(int access, int j) {
    return of[access / 2].x[access % 2].v[j];
  }
  __device__ __forceinline__ float element(int access, int j) const {
    return of[access / 2].x[access % 2].v[j];
  }

  template <typename T>
  __device__ __forceinline__ void load(const T* row) {
#pragma unroll
    for (int i = 0; i < LANE_PAIRS; ++i) {
      RopePairs<T> pairs = {};
      if (pair0(i) < ANGLES) pairs.load(row, pair0(i));
#pragma unroll
      for (int a = 0; a < 2; ++a)
#pragma unroll
        for (int j = 0; j < ROPE_PAIRS; ++j) of[i].x[a].v[j] = to_float(pairs.x[a].v[j]);
    }
  }

  template <typename T>
  __device__ __forceinline__ void store(T* row) const {
#pragma unroll
    for (int access = 0; access < 2 * LANE_PAIRS; ++access) {
      if (column(access) == HEAD_DIM) continue;
      Vec<T, ROPE_PAIRS> rounded;
#pragma unroll
      for (int j = 0; j < ROPE_PAIRS; ++j) rounded.v[j] = from_float<T>(element(access, j));  // R0
      st_global(row + column(access), rounded);
    }
  }

  // All lanes of the row take part.
  __device__ __forceinline__ void prepare(const Preparation& how, int row) {
    if constexpr (QK_NORM)
      normalise(
          how.of_row(row), NORM_BY_TOKEN ? how.factor[row] : norm_factor(mean_square(), how.eps));
    follow_norm(how, row);
  }
  __device__ __forceinline__ void follow_norm(const Preparation& how, int row) {
    turn(how, row);
    if constexpr (QK_ROTATE) rotate();
  }

  // R0: multiplies the row by the matrix of cupyattn/quant/rotation.py. Columns whose number has
  // an odd count of digits 3 in base 4 change their signs. Then butterflies combine columns whose
  // numbers differ in one bit, from the lowest on. All lanes of the row take part.
  // NOTE: the sign of a digit is applied in the butterflies of its lower bit, since the butterflies
  // before combine columns that share it.
  __device__ __forceinline__ void rotate() {
    constexpr float UNIT = HEAD_DIM == 64    ? 0.125f
                           : HEAD_DIM == 128 ? 0.08838834764831844055f
                                             : 0.0625f;  // 1 / sqrt(HEAD_DIM)
#pragma unroll
    for (int bit = 1; bit < HEAD_DIM; bit *= 2)
#pragma unroll
      for (int access = 0; access < 2 * LANE_PAIRS; ++access)
#pragma unroll
        for (int j = 0; j < ROPE_PAIRS; ++j) combine(bit, access, j);
#pragma unroll
    for (int access = 0; access < 2 * LANE_PAIRS; ++access)
#pragma unroll
      for (int j = 0; j < ROPE_PAIRS; ++j) element(access, j) = __fmul_rn(element(access, j), UNIT);
  }

  // The butterfly of a number with the number whose column differs in one bit. Of two numbers of
  // this lane, the first one has the turn.
  __device__ __forceinline__ void combine(int bit, int access, int j) {
    constexpr int OTHER_MEMBER = ROPE_INTERLEAVED ? ROPE_PAIRS : ANGLES;  // in the column's number
    const int of_pair = ROPE_INTERLEAVED && bit > ROPE_PAIRS ? bit / 2 : bit;
    const int lanes = of_pair / ROPE_PAIRS;                                 // between both
    const bool minus = bit & 0x55555555 && (column(access) + j) & 2 * bit;  // of the second number
    float& x = element(access, j);
    if (bit != OTHER_MEMBER && bit >= ROPE_PAIRS && lanes < PAIR_LANES) {
      const bool second = threadIdx.x & lanes;
      if (minus && second) x = -x;
      const float other = __shfl_xor_sync(FULL_WARP, x, lanes);
      x = __fadd_rn(other, second ? -x : x);
      return;
    }
    const int other_j = bit < ROPE_PAIRS ? j ^ bit : j;
    const int other_access = bit == OTHER_MEMBER ? access ^ 1
                             : bit >= ROPE_PAIRS ? access ^ 2 * (lanes / PAIR_LANES)
                                                 : access;
    if (other_access < access || other_j < j) return;
    const float y = minus ? -element(other_access, other_j) : element(other_access, other_j);
    element(other_access, other_j) = __fsub_rn(x, y);
    x = __fadd_rn(x, y);
  }

  // Turns it by the angles of its position, unless !ROPE.
  __device__ __forceinline__ void turn(const Preparation& how, int row) {
    if constexpr (ROPE)
#pragma unroll
      for (int i = 0; i < LANE_PAIRS; ++i)
        if (pair0(i) < ANGLES)
          of[i].turn(
              how.cos + int64_t(row) * ROPE_TABLE + of[i].table_column(pair0(i)),
              how.sin + int64_t(row) * ROPE_TABLE + of[i].table_column(pair0(i)));
  }

  // The sum over the row of what term(i, j) returns for pair j of access i, of its two members
  // together. All lanes of the row take part, and get it.
  template <typename Term>
  static __device__ __forceinline__ float sum(Term term) {
    constexpr int NUMBERS = power_of_two_from(LANE_PAIRS);
    float sums[NUMBERS] = {};
#pragma unroll
    for (int i = 0; i < LANE_PAIRS; ++i) {
      float terms[ROPE_PAIRS];
#pragma unroll
      for (int j = 0; j < ROPE_PAIRS; ++j) terms[j] = term(i, j);
      sums[i] = shfl_sum_of_neighbours<PAIR_LANES>(sum_of_neighbours(terms));
    }
    return sum_of_neighbours(sums);
  }
  template <typename Term>
  static __device__ __forceinline__ float mean(Term term) {
    return of_head_dim(sum(term));
  }
  __device__ __forceinline__ float square(int i, int j) {
    const float a = of[i].first(j), b = of[i].second(j);
    // NOTE: squares of float16 are exact in float32, so an FMA rounds once, as the addition does.
    if constexpr (ELEM_IS_HALF) return __fmaf_rn(a, a, __fmul_rn(b, b));
    return __fadd_rn(__fmul_rn(a, a), __fmul_rn(b, b));
  }
  __device__ __forceinline__ float square_sum() {
    return sum([&](int i, int j) { return square(i, j); });
  }
  __device__ __forceinline__ float mean_square() { return of_head_dim(square_sum()); }

  __device__ __forceinline__ void normalise(const Preparation& how, float factor) {
    constexpr int WIDTH = ROPE_PAIRS < 4 ? ROPE_PAIRS : 4;  // floats per access
#pragma unroll
    for (int access = 0; access < 2 * LANE_PAIRS; ++access)
      if (column(access) < HEAD_DIM)
#pragma unroll
        for (int j0 = 0; j0 < ROPE_PAIRS; j0 += WIDTH) {
          const auto weight =
              *reinterpret_cast<const Vec<float, WIDTH>*>(how.weight + column(access) + j0);
          weigh(access, j0, factor, weight);
        }
  }
  // R0: multiplies numbers of an access from j0 on by the factor of their row and by weights.
  template <int WIDTH>
  __device__ __forceinline__ void weigh(
      int access, int j0, float factor, const Vec<float, WIDTH>& weight) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      float& x = element(access, j0 + j);
      x = __fmul_rn(__fmul_rn(x, factor), weight.v[j]);
    }
  }
};
