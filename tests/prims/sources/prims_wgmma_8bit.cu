// prims_wgmma_8bit -- products of a warpgroup over e4m3, of every shape. B is placed by hand, in a
// box swizzled over 128 bytes; what lies beside it is NaN.
#include "prims/io/swizzle.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma_8bit.cuh"

// A in registers, B in shared memory with its rows along k: D = A B^T, and then 1 + A B^T.
constexpr int CODES = 96, BOX_BYTES = 128;

template <int COLUMNS>
__device__ void rs_e4m3_of(
    uint8_t (&box)[128 * BOX_BYTES], const uint8_t* A, const uint8_t* B, float* D, float* sum) {
  __syncthreads();  // the box is no longer read
  for (int i = threadIdx.x; i < COLUMNS * BOX_BYTES; i += blockDim.x) {
    const int row = i / BOX_BYTES, col = i % BOX_BYTES;
    swizzled<8>(box, row, col / 16)[col % 16] = col < CODES ? B[row * CODES + col] : 0x7f;  // NaN
  }
  fence_proxy_async();
  __syncthreads();  // B is complete
  const int row = warp_id() * 16 + lane_id() / 4, col = lane_id() % 4 * 4;
  uint32_t a[CODES / 32][4];
#pragma unroll
  for (int i = 0; i < CODES / 8; ++i)
    a[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(
        A + (row + i % 2 * 8) * CODES + i / 2 * 16 + col);
  const Descriptor B_rows = descriptor_k_major(box);
#pragma unroll 1
  for (int kept = 0; kept < 2; ++kept) {  // whether what the accumulators held counts
    float c[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) c[i] = 1.0f;
    wgmma_use(c);
    wgmma_use(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < CODES / 32; ++k)
      WgmmaE4m3<COLUMNS>::rs(c, a[k], B_rows + k * 32, kept || k > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_use(c);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i)
      (kept ? sum : D)[(row + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + col / 2 + i % 2] = c[i];
  }
}

extern "C" __global__ __launch_bounds__(128, 1) void rs_e4m3(const uint8_t* A,  // [64, CODES]
                                                            const uint8_t* B,  // [128, CODES]
                                                            float* D64,        // [64, 64]
                                                            float* sum64,      // likewise
                                                            float* D96,        // [64, 96]
                                                            float* sum96,
                                                            float* D128,  // [64, 128]
                                                            float* sum128) {
  __shared__ alignas(1024) uint8_t box[128 * BOX_BYTES];
  rs_e4m3_of<64>(box, A, B, D64, sum64);
  rs_e4m3_of<96>(box, A, B, D96, sum96);
  rs_e4m3_of<128>(box, A, B, D128, sum128);
}
