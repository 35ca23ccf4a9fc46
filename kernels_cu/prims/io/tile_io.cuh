// tile_io.cuh -- tiles of rows between global memory, shared memory and registers.
// Rows past the end of an operand and columns past HEAD_DIM become zero. Nothing outside the arrays
// is read, and a zero key or value adds nothing.
#pragma once

#include "prims/config.cuh"
#include "prims/io/finite.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/io/swizzle.cuh"
#include "prims/instructions/warp.cuh"

// ---- cp.async: global to shared, in the background -----------------------------------------

// Copies BYTES (4, 8 or 16); with valid == false writes zeros and reads nothing.
template <int BYTES>
__device__ __forceinline__ void cp_async(uint32_t shared, const void* global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const int source_bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16)  // past L1: each byte is used once per block
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(source_bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
                 "n"(BYTES), "r"(source_bytes)
                 : "memory");
}
template <int BYTES>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid) {
  cp_async<BYTES>(shared_address(shared), global, valid);
}
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most PENDING of this thread's groups are still under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- whole tiles ---------------------------------------------------------------------------

// thread_id() for loads in a loop. If sequences have separate lengths, it is read again, because no
// registers are left for values that depend on it.
__device__ __forceinline__ int loading_thread() { return VARLEN ? thread_id_anew() : thread_id(); }

// rows [ROWS, COLS] of T -> shared [ROWS, LD] float; rows from rows_valid on become zero.
template <int ROWS, int COLS, int LD, int WIDTH, typename T>
__device__ __forceinline__ void load_tile_f32(
    float* shared, const T* global, int64_t stride, int rows_valid, int thread) {
  constexpr int VECS = COLS / WIDTH;  // accesses per row
  for (int i = thread; i < ROWS * VECS; i += NUM_THREADS) {
    const int row = i / VECS, col = i % VECS * WIDTH;
    Vec<T, WIDTH> x = {};
    if (row < rows_valid) x = *reinterpret_cast<const Vec<T, WIDTH>*>(global + row * stride + col);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) shared[row * LD + col + j] = to_float(x.v[j]);
  }
}

// rows [ROWS, COLS] of T -> swizzled shared [ROWS, COLS_PAD] of T, in the background if the access
// is wide enough for cp.async. Rows from rows_valid on and columns from COLS on become zero.
// THREADS threads share it. A thread keeps its columns and goes down the rows in equal passes, so
// each address takes one addition.
template <int ROWS, int COLS, int COLS_PAD, int WIDTH, int THREADS = NUM_THREADS, typename T>
__device__ __forceinline__ void load_tile_async(
    T* shared, const T* global, int64_t stride, int rows_valid, int thread) {
  constexpr int CHUNK = 16 / sizeof(T);   // elements per 16-byte chunk
  constexpr int VECS = COLS_PAD / WIDTH;  // accesses per row
  constexpr int BYTES = WIDTH * sizeof(T);
  constexpr int ROW_THREADS = greatest_common_divisor(VECS, THREADS);  // side by side on a row
  constexpr int PASS_ROWS = THREADS / ROW_THREADS;
  constexpr int PASSES = ceil_div(ROWS, PASS_ROWS);
  const int row0 = thread / ROW_THREADS;
  const T* source_row = global + row0 * stride;
#pragma unroll(BYTES == 16 ? PASSES : 1)
  for (int pass = 0; pass < PASSES; ++pass, source_row += PASS_ROWS * stride) {
    const int row = row0 + pass * PASS_ROWS;
    if (ROWS % PASS_ROWS != 0 && row >= ROWS) break;
#pragma unroll(BYTES == 16 ? VECS / ROW_THREADS : 1)
    for (int i = 0; i < VECS; i += ROW_THREADS) {
      const int col = (i + thread % ROW_THREADS) * WIDTH;
      const bool valid = row < rows_valid && (COLS == COLS_PAD || col < COLS);
      T* target = swizzled<COLS_PAD / CHUNK>(  // which repeats every 8 rows
          shared + pass * PASS_ROWS / 8 * 8 * COLS_PAD, row0 + pass * PASS_ROWS % 8, col / CHUNK);
      if constexpr (BYTES >= 4) {
        cp_async<BYTES>(target + col % CHUNK, source_row + col, valid);
      } else {  // too narrow for cp.async: an ordinary copy, ordered by the barrier that follows
        Vec<T, WIDTH> x = {};
        if (valid) x = *reinterpret_cast<const Vec<T, WIDTH>*>(source_row + col);
        *reinterpret_cast<Vec<T, WIDTH>*>(target + col % CHUNK) = x;
      }
    }
  }
}

// The same for numbers that may have 32 bits. These are rounded to elem16_t immediately.
template <int ROWS, int COLS, int COLS_PAD, int WIDTH, typename T>
__device__ __forceinline__ void load_tile_16(
    elem16_t* shared, const T* global, int64_t stride, int rows_valid, int thread) {
  if constexpr (sizeof(T) == sizeof(elem16_t)) {
    load_tile_async<ROWS, COLS, COLS_PAD, WIDTH>(shared, global, stride, rows_valid, thread);
  } else {
    for (int i = thread; i < ROWS * COLS_PAD / WIDTH; i += NUM_THREADS) {
      const int row = i / (COLS_PAD / WIDTH), col = i % (COLS_PAD / WIDTH) * WIDTH;
      Vec<T, WIDTH> x = {};
      if (row < rows_valid && col < COLS)
        x = *reinterpret_cast<const Vec<T, WIDTH>*>(global + row * stride + col);
      elem16_t* target = swizzled<COLS_PAD / 8>(shared, row, col / 8) + col % 8;
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) target[j] = from_float<elem16_t>(x.v[j]);
    }
  }
}

// shared[i] = *source(i) for COUNT numbers of 32 bits, in the background. NOTE: passes count from
// 0, not from the thread. The compiler does not know how many passes a thread has, and kept
// addresses for four.
template <int COUNT, typename T, typename Source>
__device__ __forceinline__ void gather_async(T* shared, Source source) {
#pragma unroll
  for (int pass = 0; pass < COUNT; pass += NUM_THREADS)
    if (const int i = pass + thread_id(); i < COUNT) cp_async<4>(shared + i, source(i), true);
}

// Two neighbouring columns of an operand's row in one register, zero past HEAD_DIM.
template <typename T>
__device__ __forceinline__ uint32_t load_pair(const T* row, int col) {
  Vec<T, 2> x = {};
  if constexpr (VEC >= 2) {
    if (col < HEAD_DIM) x = *reinterpret_cast<const Vec<T, 2>*>(row + col);
  } else {
    if (col < HEAD_DIM) x.v[0] = row[col];
    if (col + 1 < HEAD_DIM) x.v[1] = row[col + 1];
  }
  return *reinterpret_cast<const uint32_t*>(&x);
}

// Two neighbouring columns of an output row, as one store if VEC allows it.
template <typename T>
__device__ __forceinline__ void store_pair(T* row, int col, const Vec<T, 2>& x) {
  if constexpr (VEC >= 2) {
    if (col < HEAD_DIM) *reinterpret_cast<Vec<T, 2>*>(row + col) = x;
  } else {
    if (col < HEAD_DIM) row[col] = x.v[0];
    if (col + 1 < HEAD_DIM) row[col + 1] = x.v[1];
  }
}
template <typename T>
__device__ __forceinline__ void store_pair(T* row, int col, float x, float y) {
  store_pair(row, col, Vec<T, 2>{{from_float<T>(x), from_float<T>(y)}});
}

// R7: the same for two sums. A finite sum stays finite.
template <typename T>
__device__ __forceinline__ void store_sums(T* row, int col, float x, float y) {
  store_pair(row, col, Vec<T, 2>{{from_sum<T>(x), from_sum<T>(y)}});
}

// Eight columns of 16 bits of an output row at a multiple of 16 bytes, up to the end of the row.
template <typename T>
__device__ __forceinline__ void store_columns(T* row, int col, const Vec<uint32_t, 4>& x) {
  if (col + 8 <= HEAD_DIM) {
    *reinterpret_cast<Vec<uint32_t, 4>*>(row + col) = x;
  } else if constexpr (HEAD_DIM % 8 != 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (col + i < HEAD_DIM) row[col + i] = reinterpret_cast<const T*>(&x)[i];
  }
}
