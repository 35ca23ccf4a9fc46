// rope.cuh -- rotary position embedding: pairs of columns of a row of Q or K, rotated by the angles
// of the row's position. Every operation is a named intrinsic with one IEEE rounding. So none is
// contracted, and all equal NumPy's: cupyattn/problem/row_preparation.py does the same, bit for
// bit.
#pragma once

#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/io/tile_io.cuh"

// rope.cu takes it; cupyattn/plans/structs.py packs it from one table of (name, type).
struct RopeParams {
  const void* X;     // [batch, heads, length, HEAD_DIM], the operand
  void* Y;           // [batch, heads, length, HEAD_DIM], contiguous: X, every row turned
  const float* cos;  // [positions, ROPE_TABLE]
  const float* sin;  // [positions, ROPE_TABLE]
  Strides X_stride;
  int32_t heads;
  int32_t length;
  int32_t position;           // of row 0
  const int32_t* cu_seqlens;  // [batch + 1], not read unless VARLEN; length is then the longest
  int32_t total;              // VARLEN: rows of all sequences
};

constexpr int ANGLES = HEAD_DIM / 2;  // of one position, a pair of columns each
constexpr int ROPE_TABLE = ROPE_BY_COLUMN ? HEAD_DIM : ANGLES;  // numbers of a position in a table
// Pairs that a thread takes at a time, as two accesses of so many elements.
constexpr int ROPE_PAIRS = greatest_common_divisor(VEC, ANGLES);
constexpr int ROPE_ACCESSES = ANGLES / ROPE_PAIRS;  // per row

template <int N, bool BY_COLUMN = ROPE_BY_COLUMN>
struct RopeNumbers;

// N pairs of a row, in the order of their columns.
template <typename T, int N = ROPE_PAIRS>
struct RopePairs {
  Vec<T, N> x[2];

  // Column of each of the two accesses for pairs pair0, pair0 + 1, ...
  static __device__ __forceinline__ int column(int access, int pair0) {
    if constexpr (ROPE_INTERLEAVED) return 2 * pair0 + access * N;
    return pair0 + access * ANGLES;
  }

  __device__ __forceinline__ void load(const T* row, int pair0) {
#pragma unroll
    for (int a = 0; a < 2; ++a) x[a] = *reinterpret_cast<const Vec<T, N>*>(row + column(a, pair0));
  }

  __device__ __forceinline__ T& first(int pair) {
    if constexpr (ROPE_INTERLEAVED) return x[2 * pair / N].v[2 * pair % N];
    return x[0].v[pair];
  }
  __device__ __forceinline__ T& second(int pair) {
    if constexpr (ROPE_INTERLEAVED) return x[(2 * pair + 1) / N].v[(2 * pair + 1) % N];
    return x[1].v[pair];
  }
  __device__ __forceinline__ const T& first(int pair) const {
    return const_cast<RopePairs*>(this)->first(pair);
  }
  __device__ __forceinline__ const T& second(int pair) const {
    return const_cast<RopePairs*>(this)->second(pair);
  }

  // Where a row of a table has the first number of pair pair0.
  static __device__ __forceinline__ int table_column(int pair0) {
    return ROPE_BY_COLUMN ? column(0, pair0) : pair0;
  }

  // Rotates the pairs by their angles, whose cosines and sines begin at cos[0] and sin[0].
  __device__ __forceinline__ void turn(const float* cos, const float* sin) {
    constexpr int WIDTH = N < 4 ? N : 4;  // floats per access
#pragma unroll
    for (int i = 0; i < N; i += WIDTH) {
      const RopeNumbers<WIDTH> c(cos, i), s(sin, i);
      turn<WIDTH>(i, c, s);
    }
  }
  // Rotates PAIRS pairs from pair0 on, whose cosines and sines these are.
  template <int PAIRS, typename Numbers>
  __device__ __forceinline__ void turn(int pair0, const Numbers& c, const Numbers& s) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      T &a = first(pair0 + j), &b = second(pair0 + j);
      const float x = to_float(a), y = to_float(b);
      a = from_float<T>(__fsub_rn(__fmul_rn(x, c.first(j)), __fmul_rn(y, s.first(j))));    // R0
      b = from_float<T>(__fadd_rn(__fmul_rn(y, c.second(j)), __fmul_rn(x, s.second(j))));  // R0
    }
  }
};

// Numbers of a table for N pairs of a row: one for both columns of a pair, or one for each column.
template <int N>
struct RopeNumbers<N, false> {
  Vec<float, N> x;
  __device__ __forceinline__ RopeNumbers(const float* row, int pair0)
      : x(*reinterpret_cast<const Vec<float, N>*>(row + pair0)) {}
  __device__ __forceinline__ float first(int pair) const { return x.v[pair]; }
  __device__ __forceinline__ float second(int pair) const { return x.v[pair]; }
};
template <int N>
struct RopeNumbers<N, true> : RopePairs<float, N> {
  RopeNumbers() = default;
  __device__ __forceinline__ RopeNumbers(const float* row, int pair0) { this->load(row, pair0); }
};

// rows [ROWS, HEAD_DIM] of Q or K -> shared [ROWS, LD] float, rotated if ROPE; the first row has
// the position `position`. Rows from rows_valid on become zero.
template <int ROWS, int LD, typename T>
__device__ __forceinline__ void load_placed_f32(
    float* shared, const T* global, int64_t stride, int rows_valid, const AttnParams& p,
    int position, int thread) {
  if constexpr (!ROPE) {
    load_tile_f32<ROWS, HEAD_DIM, LD, VEC>(shared, global, stride, rows_valid, thread);
  } else {
    for (int i = thread; i < ROWS * ROPE_ACCESSES; i += NUM_THREADS) {
      const int row = i / ROPE_ACCESSES, pair0 = i % ROPE_ACCESSES * ROPE_PAIRS;
      RopePairs<T> pairs = {};
      if (row < rows_valid) {
        const int64_t angle = int64_t(position + row) * ROPE_TABLE + pairs.table_column(pair0);
        pairs.load(global + row * stride, pair0);
        pairs.turn(p.rope_cos + angle, p.rope_sin + angle);
      }
#pragma unroll
      for (int a = 0; a < 2; ++a)
#pragma unroll
        for (int j = 0; j < ROPE_PAIRS; ++j)
          shared[row * LD + pairs.column(a, pair0) + j] = to_float(pairs.x[a].v[j]);
    }
  }
}

// ---- one access to global memory ---------------------------------------------------------------

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t bits_of(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

// Stores N elements, to a target that is aligned to all of them.
// NOTE: behind an address of several 64-bit terms the compiler stores the elements one by one.
template <typename T, int N>
__device__ __forceinline__ void st_global(T* target, const Vec<T, N>& x) {
  if constexpr (sizeof(x) < 4) {
    target[0] = x.v[0];
  } else {
    constexpr int PER_WORD = 4 / sizeof(T), WORDS = N / PER_WORD;
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "st_global stores 2, 4, 8 or 16 bytes");
    uint32_t w[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      w[i] = bits_of(x.v[PER_WORD * i]);
      if constexpr (PER_WORD == 2) w[i] |= bits_of(x.v[2 * i + 1]) << 16;
    }
    if constexpr (WORDS == 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(w[0]), "r"(w[1]),
                   "r"(w[2]), "r"(w[3])
                   : "memory");
    else if constexpr (WORDS == 2)
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(target), "r"(w[0]), "r"(w[1])
                   : "memory");
    else
      asm volatile("st.global.b32 [%0], %1;" ::"l"(target), "r"(w[0]) : "memory");
  }
}
