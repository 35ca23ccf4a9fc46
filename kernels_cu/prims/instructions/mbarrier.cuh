// mbarrier.cuh -- barriers in shared memory that count arrivals and bytes (sm_90).
//
// A barrier runs through phases, numbered by a parity that flips each time it completes. Each stage
// of a ring has two barriers. `full` completes when the copy engine has delivered its bytes,
// `empty` when every consumer warp has arrived.
#pragma once

#include "prims/instructions/mma.cuh"

struct alignas(8) Mbarrier {
  uint64_t state;
};

__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes the barriers visible to the copy engine, before its first use of them.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
// Arrives, and adds bytes that must be delivered before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}
// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait_parity(Mbarrier& barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra retry;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// A place in a ring of stages, and the parity of the phase that belongs to it.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
