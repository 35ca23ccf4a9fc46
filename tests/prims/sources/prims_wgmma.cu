// prims_wgmma -- products of one and two warpgroups. Operands are placed by hand, in boxes of 64
// columns swizzled over 128 bytes, as the copy engine would (prims_tma.cu); N is BLOCK_KV, the
// depth of `ss` is HEAD_DIM. What lies in the boxes beside the operands is NaN.
#include "prims/io/swizzle.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"

constexpr int M = 128, N = BLOCK_KV, K = HEAD_DIM;   // ss: A [M, K], B [N, K]
constexpr int KEYS = 48;                             // rs: A [64, KEYS], B [KEYS, N]
constexpr int COLS = 64;                             // of a box: 128 bytes
constexpr int K_BOXES = ceil_div(K, COLS), N_BOXES = ceil_div(N, COLS);

struct SharedStorage {
  alignas(1024) elem_t A[K_BOXES][M * COLS];
  alignas(1024) elem_t B[K_BOXES][N * COLS];
  alignas(1024) elem_t V[N_BOXES][KEYS * COLS];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base

__device__ SharedStorage& shared_storage() {
  extern __shared__ unsigned char shared_bytes[];
  return *reinterpret_cast<SharedStorage*>(
      (reinterpret_cast<uint64_t>(shared_bytes) + 1023) & ~uint64_t(1023));
}

// Copies X [ROWS, width], row by row, into its boxes.
template <int ROWS, int BOXES>
__device__ void place(elem_t (&boxes)[BOXES][ROWS * COLS], const elem_t* X, int width) {
  for (int i = threadIdx.x; i < BOXES * ROWS * COLS; i += blockDim.x) {
    const int box = i / (ROWS * COLS), row = i / COLS % ROWS, col = i % COLS;
    const int from = box * COLS + col;  // column of X
    swizzled<8>(boxes[box], row, col / 8)[col % 8] =
        from < width ? X[row * width + from] : from_float<elem_t>(__int_as_float(0x7fffffff));
  }
}

// Stores the accumulators of a warpgroup to C [64, N].
__device__ void store(float* C, const float (&c)[N / 2]) {
  const int row = warp_id() % 4 * 16 + lane_id() / 4, col = lane_id() % 4 * 2;
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    C[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + col + i % 2] = c[i];
}

// Both operands, [M, K] and [N, K], to shared memory. Returns the first row of this warpgroup.
__device__ __forceinline__ int place_both(SharedStorage& smem, const elem_t* A, const elem_t* B) {
  place<M>(smem.A, A, K);
  place<N>(smem.B, B, K);
  fence_proxy_async();
  __syncthreads();  // both operands are complete
  return __shfl_sync(FULL_WARP, threadIdx.x / 128, 0) * 64;
}

// Both operands in shared memory, for two warpgroups: D = A B^T, and then 1 + A B^T.
extern "C" __global__ __launch_bounds__(256, 1) void ss(const elem_t* A,  // [M, K]
                                                       const elem_t* B,  // [N, K]
                                                       float* D,         // [M, N]
                                                       float* sum) {     // [M, N]
  SharedStorage& smem = shared_storage();
  const int row0 = place_both(smem, A, B);
  const Descriptor A_rows = descriptor_k_major(&smem.A[0][row0 * COLS]);
  const Descriptor B_rows = descriptor_k_major(smem.B[0]);
#pragma unroll 1
  for (int kept = 0; kept < 2; ++kept) {  // whether what the accumulators held counts
    float c[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = 1.0f;
    wgmma_use(c);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K / 16; ++k)
      Wgmma<elem_t, N>::ss(
          c, A_rows + (k / 4 * M * 128 + k % 4 * 32), B_rows + (k / 4 * N * 128 + k % 4 * 32),
          kept || k > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_use(c);
    store((kept ? sum : D) + row0 * N, c);
  }
}

// A in registers, B in shared memory with its rows along N: D = 1 + A B.
extern "C" __global__ __launch_bounds__(128, 1) void rs(const elem_t* A,  // [64, KEYS]
                                                       const elem_t* B,  // [KEYS, N]
                                                       float* D) {       // [64, N]
  SharedStorage& smem = shared_storage();
  place<KEYS>(smem.V, B, N);
  fence_proxy_async();
  __syncthreads();  // B is complete
  const int row = warp_id() * 16 + lane_id() / 4, col = lane_id() % 4 * 2;
  uint32_t a[KEYS / 16][4];
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i)
    a[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(
        A + (row + i % 2 * 8) * KEYS + i / 2 * 8 + col);
  float c[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) c[i] = 1.0f;
  const Descriptor B_rows = descriptor_n_major(smem.V[0], KEYS * 128);
  wgmma_use(c);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) Wgmma<elem_t, N>::rs(c, a[k], B_rows + k * 16 * 128);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  wgmma_use(c);
  store(D, c);
}

// A and B in shared memory by descriptors of 64 bits: D = 1 - A B^T.
extern "C" __global__ __launch_bounds__(256, 1) void ss_minus(const elem_t* A,  // [M, K]
                                                             const elem_t* B,  // [N, K]
                                                             float* D) {       // [M, N]
  SharedStorage& smem = shared_storage();
  const int row0 = place_both(smem, A, B);
  const Descriptor64 A_rows = descriptor_k_major(smem.A[0]);
  const Descriptor64 B_rows = in_this_step(descriptor_k_major(smem.B[0]));
  float c[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) c[i] = 1.0f;
  wgmma_use(c);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < K / 16; ++k)
    Wgmma<elem_t, N>::ss_minus(
        c, A_rows.stage(row0, 128) + (k / 4 * M * 128 + k % 4 * 32),
        B_rows + (k / 4 * N * 128 + k % 4 * 32));
  wgmma_commit_group();
  wgmma_wait_group<0>();
  wgmma_use(c);
  store(D + row0 * N, c);
}

// Both operands in shared memory, the rows of B along N, those of A along k or, ACROSS, along M:
// D = A B, and then 1 + A B.
template <bool ACROSS>
__device__ void ss_with_columns(
    SharedStorage& smem, Descriptor A_rows, int A_step, float* D, float* sum) {
  const Descriptor B_rows = descriptor_n_major(smem.V[0], KEYS * 128);
#pragma unroll 1
  for (int kept = 0; kept < 2; ++kept) {  // whether what the accumulators held counts
    float c[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = 1.0f;
    wgmma_use(c);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
      const Descriptor A = A_rows + k * A_step, B = B_rows + k * 16 * 128;
      if (ACROSS)
        Wgmma<elem_t, N>::ss_across(c, A, B, kept || k > 0);
      else
        Wgmma<elem_t, N>::ss_columns(c, A, B, kept || k > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_use(c);
    store(kept ? sum : D, c);
  }
}

extern "C" __global__ __launch_bounds__(128, 1) void ss_columns(const elem_t* A,  // [64, KEYS]
                                                               const elem_t* B,  // [KEYS, N]
                                                               float* D,         // [64, N]
                                                               float* sum) {     // [64, N]
  SharedStorage& smem = shared_storage();
  elem_t(&A_box)[1][64 * COLS] = *reinterpret_cast<elem_t(*)[1][64 * COLS]>(smem.A[0]);
  place<64>(A_box, A, KEYS);
  place<KEYS>(smem.V, B, N);
  fence_proxy_async();
  __syncthreads();  // both operands are complete
  ss_with_columns<false>(smem, descriptor_k_major(A_box[0]), 32, D, sum);
}

extern "C" __global__ __launch_bounds__(128, 1) void ss_across(const elem_t* A,  // [KEYS, 64]
                                                              const elem_t* B,  // [KEYS, N]
                                                              float* D,         // [64, N]
                                                              float* sum) {     // [64, N]
  SharedStorage& smem = shared_storage();
  elem_t(&A_box)[1][KEYS * COLS] = *reinterpret_cast<elem_t(*)[1][KEYS * COLS]>(smem.A[0]);
  place<KEYS>(A_box, A, 64);
  place<KEYS>(smem.V, B, N);
  fence_proxy_async();
  __syncthreads();  // both operands are complete
  ss_with_columns<true>(smem, descriptor_n_major(A_box[0], 128), 16 * 128, D, sum);
}

// One warpgroup gives registers away, two hold more than all three could: each thread reverses a
// column of HELD numbers, every one of which is read before the first is written.
constexpr int HELD = 200;

extern "C" __global__ __launch_bounds__(384, 1) void registers(const float* x,  // [HELD, 256]
                                                              float* y) {      // [HELD, 256]
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    return;
  }
  setmaxnreg_inc<240>();
  x += threadIdx.x - 128, y += threadIdx.x - 128;
  float held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = x[i * 256];
#pragma unroll
  for (int i = 0; i < HELD; ++i) y[i * 256] = held[HELD - 1 - i];
}

// One warp: what ldmatrix_x4 gives, back to rows.
extern "C" __global__ void stmatrix(const uint32_t* fragment,  // [4, 32]
                                    uint16_t* tile) {          // [16, 16]
  __shared__ alignas(16) uint16_t shared[256];
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) r[i] = fragment[i * WARP_SIZE + lane_id()];
  stmatrix_x4(shared_address(shared + lane_id() % 16 * 16 + lane_id() / 16 * 8), r);
  __syncthreads();  // the tile is complete
  for (int i = lane_id(); i < 256; i += WARP_SIZE) tile[i] = shared[i];
}
