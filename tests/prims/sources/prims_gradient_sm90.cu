// prims_gradient_sm90 -- products of tiles, sums of dQ in memory, and rows of a gradient.
#include "prims/io/gradient_sm90.cuh"
#include "prims/io/swizzle.cuh"
#include "prims/instructions/tma.cuh"

constexpr int M = 128;  // rows of A, 64 to a warpgroup
constexpr int N = 64;   // of B and C

struct SharedStorage {
  alignas(1024) elem_t A[BOXES][M * BOX_COLS];
  alignas(1024) elem_t B[BOXES][N * BOX_COLS];
  alignas(1024) elem_t C[ceil_div(COLS, BOX_COLS)][N * BOX_COLS];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base

// Copies X [ROWS, HEAD_DIM], row by row, into its boxes, zeros behind it.
template <int ROWS, int COUNT>
__device__ void place(elem_t (&boxes)[COUNT][ROWS * BOX_COLS], const elem_t* X) {
  for (int i = threadIdx.x; i < COUNT * ROWS * BOX_COLS; i += blockDim.x) {
    const int box = i / (ROWS * BOX_COLS), row = i / BOX_COLS % ROWS, col = i % BOX_COLS;
    const int from = box * BOX_COLS + col;  // column of X
    swizzled<8>(boxes[box], row, col / 8)[col % 8] =
        from < HEAD_DIM ? X[row * HEAD_DIM + from] : from_float<elem_t>(0.0f);
  }
}

// D = half (A B^T) C, as dQ comes from scores, stored as a gradient is. Rows from 100 on are none.
extern "C" __global__ __launch_bounds__(256, 1) void products(
    const elem_t* A,  // [M, HEAD_DIM]
    const elem_t* B,  // [N, HEAD_DIM]
    const elem_t* C,  // [N, HEAD_DIM]
    elem_t* D) {      // [M, HEAD_DIM]
  extern __shared__ unsigned char shared_bytes[];
  auto& smem =
      *reinterpret_cast<SharedStorage*>(shared_bytes + (-shared_address(shared_bytes) & 1023));
  place<M>(smem.A, A);
  place<N>(smem.B, B);
  place<N>(smem.C, C);
  fence_proxy_async();
  __syncthreads();  // the operands are complete
  const int row0 = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0) * 64;
  float S_acc[N / 2], D_acc[COLS / 2] = {};
  uint32_t S_frag[N / 16][4];
  start_rows<M, N>(
      S_acc, Descriptor64(descriptor_k_major(&smem.A[0][row0 * BOX_COLS])),
      Descriptor64(descriptor_k_major(smem.B[0])));
  wgmma_wait_group<0>();
  wgmma_use(S_acc);
#pragma unroll
  for (int i = 0; i < N / 4; ++i)
    S_frag[i / 4][i % 4] = pack_rn<elem_t>(S_acc[2 * i], S_acc[2 * i + 1]);
  start_columns(D_acc, S_frag, Descriptor64(descriptor_n_major(smem.C[0], N * BOX_BYTES)));
  wgmma_wait_group<0>();
  wgmma_use(D_acc);
  const int row = row0 + warp_id() % 4 * 16 + lane_id() / 4;
  store_gradient(D, HEAD_DIM, row, 100, 0, D_acc, 0.5f);
}

// Both boxes of the 64 rows from 64 on of head 1, by a warpgroup each: written, added once more, and
// added to what is there already.
extern "C" __global__ __launch_bounds__(256, 1) void sums(
    const __grid_constant__ AttnParams call, const __grid_constant__ BackwardParams given,
    const float* acc,  // [2, QUERY_SUMS, 128]
    float* memory,     // [heads, rows, BOXES * 64]
    float* loaded) {   // [2, QUERY_SUMS, 128]
  BackwardParams grad = given;
  grad.dQ_sum = memory;
  const int box = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
  float own[QUERY_SUMS];
#pragma unroll
  for (int i = 0; i < QUERY_SUMS; ++i) own[i] = acc[(box * QUERY_SUMS + i) * WARPGROUP + thread];
  float* tile = query_sums(call, grad, 0, 1, 64, box);
  store_query_sums(tile, own);
  add_query_sums(tile, own);
  __syncthreads();  // all sums have been added to
  gather_query_sums(own, tile);
#pragma unroll
  for (int i = 0; i < QUERY_SUMS; ++i)
    loaded[(box * QUERY_SUMS + i) * WARPGROUP + thread] = own[i];
}
