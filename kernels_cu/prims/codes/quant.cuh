// quant.cuh -- INT8 quantisation of one value, and the parameters of quantize*.cu.
// Every operation is one IEEE rounding, named, so that none is contracted and all equal NumPy's:
// cupyattn/quant/quantizers.py does the same, bit for bit.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/params.cuh"
#include "prims/io/prepare.cuh"

constexpr float INT8_MAX = 127.0f;                  // largest code; -128 needs zero points
constexpr float QK_MAX = (1 << (QK_BITS - 1)) - 1;  // the same of Q and K
constexpr float HALF_CODES = 127.5f;                // half of the steps from code -128 to code 127
constexpr float SCALE_MIN = 0x1p-126f;              // smallest normal float: its inverse is finite
constexpr uint32_t INFINITY_BITS = 0x7f800000u;     // a magnitude from here on is infinite or NaN

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct QuantizeParams : PrepareParams<PREPARED> {
  const void* X;              // [batch, heads, length, HEAD_DIM], the operand
  int8_t* codes;              // [batch, heads, length, HEAD_DIM], contiguous; of V as below
  float* scale;               // [batch, heads, groups]
  const float* static_scale;  // [batch, heads, groups], of which scale is a copy; null: dynamic
  uint32_t* absmax;           // [batch, heads, groups, SIDES], zero at first; null: not by atomics
  float* partial_sum;         // [batch, heads, splits, HEAD_DIM]; not read unless there is a mean
  uint32_t* extrema;          // [batch, heads, splits, 2, HEAD_DIM], ordered_bits; Step::EXTREMA
  float* mean;                // [batch, heads, HEAD_DIM], subtracted from X; null: nothing is
  Strides X_stride;
  int64_t scale_stride_batch;  // of scale, static_scale and absmax; 0 shares one scale
  int64_t scale_stride_head;
  int32_t* summed_slices;  // [batch, heads], zero at first: how many slices of a head are summed,
                           // with the extrema of the last; null: not in this launch
  uint64_t* head_sum;      // [batch, heads, HEAD_DIM], zero at first: published sums of all slices;
                           // null: not in this launch
  int32_t blocks;        // thread blocks of the launch that make codes of this operand, or do what
                         // a launch does; SUMS_FIRST: of a round
  int32_t first_blocks;  // SUMS_FIRST: thread blocks of a round that sum its slices
  int32_t heads;
  int32_t length;
  int32_t splits;             // slices of the rows that are summed side by side
  int32_t split_rows;         // rows of a slice
  const int32_t* cu_seqlens;  // [batch + 1], not read unless VARLEN; length is then the longest.
                              // PADDED: [batch], lengths; null: all have the longest
  int32_t total;              // PACKED: rows of all sequences
  int32_t padded;             // V: codes are [batch, heads, HEAD_DIM, padded], contiguous; PACKED:
                              // [heads, HEAD_DIM, padded], sequences as prims/params.cuh says
  int32_t* zero;              // ZERO_POINTS: as scale
  int32_t* code_sum;  // ZERO_POINTS, not of V: [batch, heads, length], sums of a row's codes
  int64_t sum_stride_batch;
  int64_t sum_stride_head;
  const int32_t* places;  // GATHERED: [batch, heads, length], which rows of X these are; null: all
  int32_t summed;         // rows that partial_sum adds up; 0: the rows of their mean
};

// Any vector that all rows of a head share may be subtracted. If there are many rows, the mean uses
// a quarter of them, 32 of every 128.
constexpr int MANY_ROWS = 1024, MEAN_ROWS = 32, MEAN_PERIOD = 128;
__device__ __forceinline__ bool is_of_mean(int row, int length) {
  return length < MANY_ROWS || row % MEAN_PERIOD < MEAN_ROWS;
}
__device__ __forceinline__ int rows_of_mean(int length) {
  if (length < MANY_ROWS) return length;
  return length / MEAN_PERIOD * MEAN_ROWS + min(length % MEAN_PERIOD, MEAN_ROWS);
}
// Row i of these rows.
__device__ __forceinline__ int row_of_mean(int i, int length) {
  return length < MANY_ROWS ? i : i / MEAN_ROWS * MEAN_PERIOD + i % MEAN_ROWS;
}

// Stores a number. Threads of several blocks may store the same number, which is no race.
__device__ __forceinline__ void st_relaxed_gpu(float* target, float x) {
  asm volatile("st.relaxed.gpu.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
}
__device__ __forceinline__ void st_relaxed_gpu(int32_t* target, int32_t x) {
  asm volatile("st.relaxed.gpu.s32 [%0], %1;" ::"l"(target), "r"(x) : "memory");
}

// ---- in -----------------------------------------------------------------------------------------

// An unsigned integer of 1, 2 or 4 bytes.
template <int BYTES>
struct WordOf {
  using type = uint32_t;
};
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <int BYTES>
using Word = typename WordOf<BYTES>::type;

// Element j of a word.
template <typename T>
__device__ __forceinline__ float word_element(uint32_t word, int j);
template <>
__device__ __forceinline__ float word_element<float>(uint32_t word, int) {
  return __uint_as_float(word);
}
template <>
__device__ __forceinline__ float word_element<__half>(uint32_t word, int j) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16 * j)));
}
template <>  // bfloat16 is the upper half of a float
__device__ __forceinline__ float word_element<__nv_bfloat16>(uint32_t word, int j) {
  return __uint_as_float(j == 0 ? word << 16 : word & 0xffff0000u);
}
template <>
__device__ __forceinline__ float word_element<int8_t>(uint32_t word, int j) {
  return static_cast<int8_t>(word >> 8 * j);
}

// N values of T as one access.
// NOTE: kept in words, because the compiler spreads an array of 16-bit numbers over twice the
// registers and then loads it piece by piece.
template <typename T, int N>
struct alignas(sizeof(T) * N) Words {
  static constexpr int PER_WORD = N * sizeof(T) < 4 ? 1 : 4 / sizeof(T);
  Word<PER_WORD * sizeof(T)> words[N / PER_WORD];
  __device__ __forceinline__ float element(int j) const {
    return word_element<T>(words[j / PER_WORD], j % PER_WORD);
  }
  // A barrier for the compiler. Before this point it computes nothing from the words, because it
  // would wait for one load before it issues the next. It also keeps no such result in registers
  // for later.
  __device__ __forceinline__ void use_from_here() {
    if constexpr (sizeof(words[0]) == 4)
      for (auto& word : words) asm volatile("" : "+r"(word));
  }
};

// ---- scale and code -----------------------------------------------------------------------------

// |x| as an integer. Floats without sign compare as their bits do. Infinity lies above every finite
// number, and NaN above infinity. So a maximum of bits keeps NaN, which fmaxf would drop.
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

// Maxima over aligned groups of LANES lanes of N numbers each, N a power of two. A lane gets N /
// LANES of them, at least one, in place of its first numbers. Returns the index of the first
// maximum.
// NOTE: a recursion, because the compiler does not unroll a loop whose two counts halve.
template <int LANES, int LEFT, int N>
__device__ __forceinline__ int scatter_max_of(uint32_t (&x)[N]) {
  if constexpr (LANES == 1) {
    return 0;
  } else {
    constexpr int OFFSET = LANES / 2, KEPT = LEFT / 2;
    const bool upper = threadIdx.x & OFFSET;
    if constexpr (KEPT == 0) x[0] = max(x[0], __shfl_xor_sync(FULL_WARP, x[0], OFFSET));
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {  // the numbers of this lane, and of the other lane
      const uint32_t own = upper ? x[i + KEPT] : x[i], other = upper ? x[i] : x[i + KEPT];
      x[i] = max(own, __shfl_xor_sync(FULL_WARP, other, OFFSET));
    }
    return (upper ? KEPT : 0) + scatter_max_of<OFFSET, KEPT>(x);
  }
}
template <int LANES, int N>
__device__ __forceinline__ int scatter_max(uint32_t (&x)[N]) {
  return scatter_max_of<LANES, N>(x);
}

struct Scale {
  float scale, inverse;
};

// absmax / 127 and 127 / absmax. A group of zeros has scale 1, and a scale below SCALE_MIN is
// raised to it. If the group contains a NaN or an infinity, the scale is NaN with inverse 0, hence
// codes 0. `largest` is the code of absmax.
__device__ __forceinline__ Scale scale_of_absmax(uint32_t bits, float largest = INT8_MAX) {
  if (bits >= INFINITY_BITS) return {NOT_A_NUMBER, 0.0f};
  const float raised = fmaxf(__uint_as_float(bits), largest * SCALE_MIN);
  return {bits == 0 ? 1.0f : __fdiv_rn(raised, largest), __fdiv_rn(largest, raised)};
}

// A given scale, or NaN unless it is finite and at least SCALE_MIN.
__device__ __forceinline__ Scale scale_of_static(float scale) {
  const bool usable = scale >= SCALE_MIN && magnitude_bits(scale) < INFINITY_BITS;
  return {usable ? scale : NOT_A_NUMBER, usable ? __fdiv_rn(1.0f, scale) : 0.0f};
}

// R1: the code of x, ties to even. |x| <= absmax makes it 127 at most; a NaN converts to 0.
__device__ __forceinline__ int code_s8(float x, float inverse) {
  return __float2int_rn(__fmul_rn(x, inverse));
}

// The same in e4m3, as its bits; a NaN gives 0.
__device__ __forceinline__ int code_e4m3(float x, float inverse) {
  const float scaled = __fmul_rn(x, inverse);
  return scaled == scaled ? int(pack_e4m3(scaled, 0.0f)) : 0;
}

// The same for a scale that does not come from the data: past the largest code it saturates.
__device__ __forceinline__ int code_s8_saturated(float x, float inverse) {
  return min(max(code_s8(x, inverse), -int(QK_MAX)), int(QK_MAX));
}

// ---- a group of rows ----------------------------------------------------------------------------

constexpr int SIDES = ZERO_POINTS ? 2 : 1;

// How far numbers reach from 0, as bits of magnitudes: to either side, or with zero points above 0
// and below 0.
template <bool ZEROS>
struct ReachWith {
  static constexpr int SIDES = ZEROS ? 2 : 1;
  uint32_t bits[SIDES];

  __device__ __forceinline__ void admit(float x) {
    if constexpr (ZEROS) {  // as a signed integer a number of the other side is below 0
      bits[0] = max(int32_t(bits[0]), __float_as_int(x));
      bits[1] = max(int32_t(bits[1]), int32_t(__float_as_uint(x) ^ 0x80000000u));
    } else {
      bits[0] = max(bits[0], magnitude_bits(x));
    }
  }
  __device__ __forceinline__ void admit(const ReachWith& other) {
#pragma unroll
    for (int i = 0; i < SIDES; ++i) bits[i] = max(bits[i], other.bits[i]);
  }
  __device__ __forceinline__ bool is_finite() const {
    return max(bits[0], bits[SIDES - 1]) < INFINITY_BITS;
  }
  // Extends a range in shared memory by this range.
  __device__ __forceinline__ void raise(uint32_t* shared, int stride = 1) const {
#pragma unroll
    for (int i = 0; i < SIDES; ++i) atomicMax(&shared[i * stride], bits[i]);
  }
};
using Reach = ReachWith<ZERO_POINTS>;

// The range of aligned groups of LANES lanes; every lane gets it.
template <int LANES, bool ZEROS>
__device__ __forceinline__ ReachWith<ZEROS> shfl_max(ReachWith<ZEROS> reach) {
#pragma unroll
  for (uint32_t& bits : reach.bits) bits = shfl_max<LANES>(bits);
  return reach;
}

// The larger and the smaller numbers of two words, element by element; a NaN stays.
template <typename T>
__device__ __forceinline__ uint32_t max_words(uint32_t a, uint32_t b);
template <typename T>
__device__ __forceinline__ uint32_t min_words(uint32_t a, uint32_t b);
#define WORDS_INSTRUCTION(T, name, instruction)                         \
  template <>                                                           \
  __device__ __forceinline__ uint32_t name<T>(uint32_t a, uint32_t b) { \
    uint32_t d;                                                         \
    asm(instruction " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));         \
    return d;                                                           \
  }
WORDS_INSTRUCTION(float, max_words, "max.NaN.f32")
WORDS_INSTRUCTION(float, min_words, "min.NaN.f32")
WORDS_INSTRUCTION(__half, max_words, "max.NaN.f16x2")
WORDS_INSTRUCTION(__half, min_words, "min.NaN.f16x2")
WORDS_INSTRUCTION(__nv_bfloat16, max_words, "max.NaN.bf16x2")
WORDS_INSTRUCTION(__nv_bfloat16, min_words, "min.NaN.bf16x2")
#undef WORDS_INSTRUCTION

// A word of positive infinities, and its signs.
template <typename T>
constexpr uint32_t INFINITIES = 0x7f800000u;
template <>
constexpr uint32_t INFINITIES<__half> = 0x7c007c00u;
template <>
constexpr uint32_t INFINITIES<__nv_bfloat16> = 0x7f807f80u;
template <typename T>
constexpr uint32_t SIGNS = sizeof(T) == 2 ? 0x80008000u : 0x80000000u;

// Minimum and maximum of numbers that are loaded as Words, at each place, over all admitted words.
// Any function that rises with x has its extrema at the same numbers.
template <typename T, int N>
struct Ends {
  static constexpr int WORDS = sizeof(Words<T, N>::words) / sizeof(Words<T, N>::words[0]);
  Words<T, N> least, most;
  __device__ __forceinline__ explicit Ends(const Words<T, N>& first) : least(first), most(first) {}
  // For no numbers: the infinities, with minimum and maximum exchanged.
  __device__ __forceinline__ Ends() {
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
      least.words[i] = INFINITIES<T>, most.words[i] = INFINITIES<T> | SIGNS<T>;
  }
  __device__ __forceinline__ void admit(int i, uint32_t low, uint32_t high) {
    least.words[i] = min_words<T>(least.words[i], low);
    most.words[i] = max_words<T>(most.words[i], high);
  }
  __device__ __forceinline__ void admit(const Words<T, N>& x) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) admit(i, x.words[i], x.words[i]);
  }
  // The first word gets the ends of all words.
  __device__ __forceinline__ void fold() {
#pragma unroll
    for (int i = 1; i < WORDS; ++i) admit(0, least.words[i], most.words[i]);
  }
  // Two lanes at this distance get the ends of both.
  __device__ __forceinline__ void admit_lane(int offset) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
      admit(
          i, __shfl_xor_sync(FULL_WARP, least.words[i], offset),
          __shfl_xor_sync(FULL_WARP, most.words[i], offset));
  }
};

// Reach of numbers that are loaded as Words; zeros have none.
template <typename T, int N, int ACCESSES>
__device__ __forceinline__ Reach reach_of(const Words<T, N> (&x)[ACCESSES]) {
  Ends<T, N> ends(x[0]);
#pragma unroll
  for (int a = 1; a < ACCESSES; ++a) ends.admit(x[a]);
  ends.fold();
  Reach found = {};
#pragma unroll
  for (int j = 0; j < Words<T, N>::PER_WORD; ++j) {
    found.admit(ends.least.element(j));
    found.admit(ends.most.element(j));
  }
  return found;
}

// Floats as integers in their order. A NaN lies beyond infinity, on the side of its sign. So the
// extrema of numbers with a NaN include a NaN.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_ordered_bits(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// Converts a number of a group to its code. make() initialises it from the Reach of the group and
// returns the scale. `largest` is the code of the largest magnitude.
template <bool>
struct CodingWith {  // without zero points
  static constexpr int zero = 0;
  float inverse;
  __device__ __forceinline__ float make(const uint32_t* reach, float largest = QK_MAX) {
    const Scale scale = scale_of_absmax(reach[0], largest);
    inverse = scale.inverse;
    return scale.scale;
  }
  __device__ __forceinline__ float scaled(float x) const { return __fmul_rn(x, inverse); }
  __device__ __forceinline__ int code(float x) const { return code_s8(x, inverse); }
  __device__ __forceinline__ int saturated(float x) const { return code_s8_saturated(x, inverse); }
};
// The smaller of 0 and the least number gets code -128, the larger of 0 and the largest code 127.
// Number 0 gets code `zero`, which is 0 in a group that is not finite. A code saturates only if
// both ends lie halfway between two codes.
template <>
struct CodingWith<true> {
  float inverse;
  int zero;
  __device__ __forceinline__ float make(const uint32_t* reach, float = INT8_MAX) {
    const float above = __uint_as_float(reach[0]), below = __uint_as_float(reach[1]);
    const float half = __fadd_rn(__fmul_rn(0.5f, above), __fmul_rn(0.5f, below));
    const Scale scale = scale_of_absmax(magnitude_bits(half), HALF_CODES);
    const float zero_code = __fadd_rn(__fmul_rn(below, scale.inverse), -128.0f);
    inverse = scale.inverse;
    zero = inverse == 0.0f ? 0 : __float2int_rn(zero_code);
    return scale.scale;
  }
  __device__ __forceinline__ float scaled(float x) const { return __fmul_rn(x, inverse); }
  __device__ __forceinline__ int code(float x) const {
    return min(max(code_s8(x, inverse) + zero, -128), 127);
  }
  __device__ __forceinline__ int saturated(float x) const { return code(x); }
};
using Coding = CodingWith<ZERO_POINTS>;

// ---- out ----------------------------------------------------------------------------------------

// The low bytes of four integers, the first lowest.
__device__ __forceinline__ uint32_t pack_s8x4(int a, int b, int c, int d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Stores N numbers in units of their scale, rounded, NaN as 0; codes is aligned to N bytes.
template <int N>
__device__ __forceinline__ void store_rounded_s8(int8_t* codes, const float (&x)[N]) {
  if constexpr (N % 4 == 0) {
    Vec<uint32_t, N / 4> words;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      words.v[i] = pack_s8(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    *reinterpret_cast<Vec<uint32_t, N / 4>*>(codes) = words;
  } else {
    Vec<int8_t, N> bytes;
#pragma unroll
    for (int i = 0; i < N; ++i) bytes.v[i] = static_cast<int8_t>(__float2int_rn(x[i]));
    *reinterpret_cast<Vec<int8_t, N>*>(codes) = bytes;
  }
}

// Stores N codes as one access; codes is aligned to N bytes.
template <int N>
__device__ __forceinline__ void store_s8(int8_t* codes, const int (&c)[N]) {
  if constexpr (N % 4 == 0) {
    Vec<uint32_t, N / 4> words;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      words.v[i] = pack_s8x4(c[4 * i], c[4 * i + 1], c[4 * i + 2], c[4 * i + 3]);
    *reinterpret_cast<Vec<uint32_t, N / 4>*>(codes) = words;
  } else {
    Vec<int8_t, N> bytes;
#pragma unroll
    for (int i = 0; i < N; ++i) bytes.v[i] = static_cast<int8_t>(c[i]);
    *reinterpret_cast<Vec<int8_t, N>*>(codes) = bytes;
  }
}
