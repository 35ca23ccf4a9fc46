// tensor_core_sums -- one instruction of a tensor core, on sums that are given element by element.
// A block takes a case: D = c + sum of a[k] b[k], in row 0 and column 0 of the product. All other
// operands of the instruction are 0. Operands are the bits of their type, 32 bytes of each.
#include "prims/instructions/mma.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"
#include "prims/instructions/wgmma_8bit.cuh"

constexpr int WORDS = 8;  // of 32 bits: the depth of an instruction

// The fragments of A and B whose other rows and columns are 0.
struct Fragments {
  uint32_t a[4], b0, b1;
  __device__ __forceinline__ Fragments(const uint32_t* A, const uint32_t* B) {
    const int t = lane_id() % 4;
    const bool first = lane_id() < 4 && warp_id() == 0;
    a[0] = first ? A[t] : 0, a[2] = first ? A[4 + t] : 0;
    a[1] = a[3] = 0;
    b0 = first ? B[t] : 0, b1 = first ? B[4 + t] : 0;
  }
};

template <typename MMA>
__device__ __forceinline__ void by_warp(
    const uint32_t* A, const uint32_t* B, const float* C, float* D, MMA mma) {
  const Fragments own(A + blockIdx.x * WORDS, B + blockIdx.x * WORDS);
  float c[4] = {lane_id() == 0 ? C[blockIdx.x] : 0.0f, 0.0f, 0.0f, 0.0f};
  mma(c, own);
  if (lane_id() == 0) D[blockIdx.x] = c[0];
}

extern "C" __global__ void mma_f16(const uint32_t* A,  // [cases, WORDS]
                                   const uint32_t* B,  // [cases, WORDS]
                                   const float* C,     // [cases]
                                   float* D) {         // [cases]
  by_warp(A, B, C, D, [](float (&c)[4], const Fragments& f) {
    mma_m16n8k16<__half>(c, f.a, f.b0, f.b1);
  });
}
extern "C" __global__ void mma_bf16(
    const uint32_t* A, const uint32_t* B, const float* C, float* D) {
  by_warp(A, B, C, D, [](float (&c)[4], const Fragments& f) {
    mma_m16n8k16<__nv_bfloat16>(c, f.a, f.b0, f.b1);
  });
}
extern "C" __global__ void mma_e4m3(
    const uint32_t* A, const uint32_t* B, const float* C, float* D) {
  by_warp(A, B, C, D, [](float (&c)[4], const Fragments& f) {
    mma_m16n8k32_e4m3(c, f.a, f.b0, f.b1);
  });
}

// The same by a warpgroup, B in shared memory: row 0 of its tile, which no swizzle moves.
template <typename MMA>
__device__ __forceinline__ void by_warpgroup(
    const uint32_t* A, const uint32_t* B, const float* C, float* D, MMA mma) {
  __shared__ alignas(1024) uint32_t A_tile[64 * 32], B_tile[64 * 32];  // [64, 128 bytes]
  for (int i = threadIdx.x; i < 64 * 32; i += blockDim.x) {
    A_tile[i] = i < WORDS ? A[blockIdx.x * WORDS + i] : 0;
    B_tile[i] = i < WORDS ? B[blockIdx.x * WORDS + i] : 0;
  }
  fence_proxy_async();
  __syncthreads();  // both tiles are complete
  const Fragments own(A + blockIdx.x * WORDS, B + blockIdx.x * WORDS);
  float c[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) c[i] = i == 0 && threadIdx.x == 0 ? C[blockIdx.x] : 0.0f;
  wgmma_use(c);
  wgmma_fence();
  mma(c, own, descriptor_k_major(A_tile), descriptor_k_major(B_tile));
  wgmma_commit_group();
  wgmma_wait_group<0>();
  wgmma_use(c);
  if (threadIdx.x == 0) D[blockIdx.x] = c[0];
}

#if __CUDA_ARCH_FEAT_SM90_ALL
extern "C" __global__ __launch_bounds__(128) void wgmma_f16(
    const uint32_t* A, const uint32_t* B, const float* C, float* D) {
  by_warpgroup(A, B, C, D, [](float (&c)[32], const Fragments&, Descriptor a, Descriptor b) {
    Wgmma<__half, 64>::ss(c, a, b, true);
  });
}
extern "C" __global__ __launch_bounds__(128) void wgmma_bf16(
    const uint32_t* A, const uint32_t* B, const float* C, float* D) {
  by_warpgroup(A, B, C, D, [](float (&c)[32], const Fragments&, Descriptor a, Descriptor b) {
    Wgmma<__nv_bfloat16, 64>::ss(c, a, b, true);
  });
}
extern "C" __global__ __launch_bounds__(128) void wgmma_e4m3(
    const uint32_t* A, const uint32_t* B, const float* C, float* D) {
  by_warpgroup(A, B, C, D, [](float (&c)[32], const Fragments& f, Descriptor, Descriptor b) {
    WgmmaE4m3<64>::rs(c, f.a, b, true);
  });
}
#endif
