// gradient_sm90.cuh -- tiles of the Hopper kernels of the backward pass. Rows of operands are in
// boxes of 64 columns, swizzled over 128 bytes, and a warpgroup holds 64 rows of a result.
#pragma once

#include "prims/score/gradient.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"

constexpr int WARPGROUP = 128;  // threads
constexpr int BOX_COLS = 64;    // columns per box: 128 bytes, one swizzle
constexpr int BOX_BYTES = 128;  // per row of a box
// Past 128 columns there are 256: two warpgroups share them.
constexpr int BOXES = HEAD_DIM <= 128 ? ceil_div(HEAD_DIM, BOX_COLS) : 4;  // per row of an operand
constexpr int COLS = HEAD_DIM <= 64    ? 64
                     : HEAD_DIM <= 128 ? round_up(HEAD_DIM, 32)
                                       : 256;  // of a gradient, as computed

// ---- masks ------------------------------------------------------------------------------------

// The bits of a step of a mask, from memory to where Q of the step is coming.
template <typename Smem, typename Params>
__device__ __forceinline__ void copy_bits(
    Smem& smem, const Params& grad, int stage, Mbarrier& full, int64_t batch, int64_t head, int kv0,
    int q0) {
  if constexpr (MASK) {
    constexpr int BYTES = sizeof(smem.bits[0]), WORDS = BYTES / sizeof(uint32_t);
    const int64_t tile = batch * grad.mask_batch + head * grad.mask_head + kv0 / BLOCK_KV;
    const int64_t step = tile * grad.row_tiles + q0 / BLOCK_Q;
    cp_async_bulk(smem.bits[stage], grad.mask_bits + step * WORDS, BYTES, full);
  }
}

// ---- products ---------------------------------------------------------------------------------

// A product of 64 rows of a tile A [A_ROWS, HEAD_DIM] and N of B [B_ROWS, HEAD_DIM], in the
// background. It is multiply(A_rows, B_rows, k) for 16 columns at a time.
template <int A_ROWS, int B_ROWS, int ACCUMULATORS, typename Rows, typename Multiply>
__device__ __forceinline__ void start_row_products(
    float (&D_acc)[ACCUMULATORS], Rows A_rows, Rows B_rows, const Multiply& multiply) {
  wgmma_use(D_acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < ceil_div(HEAD_DIM, 16); ++k) {  // 32 bytes of a row, then the next box
    const int box = k / 4, byte = k % 4 * 32;
    multiply(
        A_rows + (box * A_ROWS * BOX_BYTES + byte), B_rows + (box * B_ROWS * BOX_BYTES + byte), k);
  }
  wgmma_commit_group();
}
// D [64, N] = A B^T.
template <int A_ROWS, int B_ROWS, int N = B_ROWS, typename Rows>
__device__ __forceinline__ void start_rows(float (&D_acc)[N / 2], Rows A_rows, Rows B_rows) {
  start_row_products<A_ROWS, B_ROWS>(D_acc, A_rows, B_rows, [&](Rows A, Rows B, int k) {
    Wgmma<elem_t, N>::ss(D_acc, A, B, k > 0);
  });
}
// D [64, N] -= A B^T.
template <int A_ROWS, int B_ROWS, int N = B_ROWS, typename Rows>
__device__ __forceinline__ void start_rows_minus(float (&D_acc)[N / 2], Rows A_rows, Rows B_rows) {
  start_row_products<A_ROWS, B_ROWS>(
      D_acc, A_rows, B_rows, [&](Rows A, Rows B, int) { Wgmma<elem_t, N>::ss_minus(D_acc, A, B); });
}

// D [64, COLS] += A B of A [64, 16 K_STEPS] in registers and rows B [16 K_STEPS, COLS], in the
// background.
template <int K_STEPS, typename Rows>
__device__ __forceinline__ void start_columns(
    float (&D_acc)[COLS / 2], uint32_t (&A_frag)[K_STEPS][4], Rows B_columns) {
  wgmma_use(D_acc);
  wgmma_use(A_frag);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k)
    Wgmma<elem_t, COLS>::rs(D_acc, A_frag[k], B_columns + k * 16 * BOX_BYTES);
  wgmma_commit_group();
}

// ---- weights ----------------------------------------------------------------------------------

// P of the rows from `factors` on, some of them coarse, from their exponentials.
__device__ __forceinline__ void normalise(float (&S_acc)[BLOCK_Q / 2], const float* factors) {
  using Pair = Vec<float, 2>;
#pragma unroll
  for (int n = 0; n < BLOCK_Q / 8; ++n) {
    const Pair factor = *reinterpret_cast<const Pair*>(&factors[n * 8 + lane_id() % 4 * 2]);
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; ++i) S_acc[i] = normalised(S_acc[i], factor.v[i % 2]);  // R9
  }
}

// ---- gradients --------------------------------------------------------------------------------

// Stores 16 bytes at once. The compiler had split every other ordinary store of them into four.
__device__ __forceinline__ void st_global_v4(void* global, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// Columns from `col` on of the rows `row` and row + 8, times `scale`, 16 bytes at a time.
template <int COUNT, typename T>
__device__ __forceinline__ void store_gradient(
    T* rows, int64_t stride, int row, int rows_valid, int col, const float (&acc)[COUNT],
    float scale) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < COUNT / 4; n += 4) {
      uint32_t x[4];  // two neighbouring columns each
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = acc + 4 * (n + j) + 2 * h;        // [2]
        x[j] = pack_rn<T>(pair[0] * scale, pair[1] * scale);  // R12
      }
      shfl_transpose(x);
      if (row + h * 8 >= rows_valid) continue;
      T* columns = rows + (row + h * 8) * stride;
      if constexpr (HEAD_DIM % 8 == 0) {
        if (col + (n + t) * 8 + 8 <= HEAD_DIM) st_global_v4(columns + col + (n + t) * 8, x);
      } else {
        store_columns(columns, col + (n + t) * 8, {{x[0], x[1], x[2], x[3]}});
      }
    }
}

// ---- dQ: sums of blocks of keys in memory -----------------------------------------------------

// Sums of 64 padded rows and 64 columns are contiguous, in the order of a warpgroup's accumulators:
// [8][128 threads][4]. So a warp adds 512 bytes at a time.
constexpr int QUERY_SUMS = 32;  // of a thread
constexpr int QUERY_SUMS_BOXES = ceil_div(HEAD_DIM, 64);
constexpr int QUERY_SUMS_TILE = 64 * 64;

// Sums of the rows from q0 on, box `box` of their columns, followed by the next 64 rows.
__device__ __forceinline__ float* query_sums(
    const AttnParams& call, const BackwardParams& grad, int64_t batch, int64_t head, int q0,
    int box) {
  const int64_t rows = padded_row(call, grad, batch, head) + q0;
  return grad.dQ_sum + (rows / 64 * QUERY_SUMS_BOXES + box) * QUERY_SUMS_TILE;
}

// Adds 16 bytes of floats to memory, BYTES further on. Each float is a separate addition, in any
// order with other threads.
template <int BYTES>
__device__ __forceinline__ void red_add_v4(float* global, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0 + %5], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b),
               "f"(c), "f"(d), "n"(BYTES)
               : "memory");
}

// Adds a warpgroup's accumulators to sums of 64 rows and 64 columns, from 16 bytes number N of a
// thread on. One address serves all.
template <int N>
__device__ __forceinline__ void add_from(float* own, const float (&acc)[QUERY_SUMS]) {
  if constexpr (N < QUERY_SUMS / 4) {
    constexpr int BYTES = N * WARPGROUP * 4 * sizeof(float);
    red_add_v4<BYTES>(own, acc[4 * N], acc[4 * N + 1], acc[4 * N + 2], acc[4 * N + 3]);
    add_from<N + 1>(own, acc);
  }
}
__device__ __forceinline__ void add_query_sums(float* sums, const float (&acc)[QUERY_SUMS]) {
  add_from<0>(sums + threadIdx.x % WARPGROUP * 4, acc);
}

// Stores the sums, if no block has added to them yet.
__device__ __forceinline__ void store_query_sums(float* sums, const float (&acc)[QUERY_SUMS]) {
  using Access = Vec<float, 4>;
#pragma unroll
  for (int n = 0; n < QUERY_SUMS / 4; ++n)
    reinterpret_cast<Access*>(sums)[n * 128 + threadIdx.x % 128] = {
        {acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]}};
}

// Adds the sums in memory to a warpgroup's accumulators.
template <int COUNT>
__device__ __forceinline__ void gather_query_sums(float (&acc)[COUNT], const float* sums) {
  using Access = Vec<float, 4>;
#pragma unroll
  for (int n = 0; n < COUNT / 4; ++n) {
    const Access x = reinterpret_cast<const Access*>(sums)[n * 128 + threadIdx.x % 128];
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * n + i] += x.v[i];
  }
}
