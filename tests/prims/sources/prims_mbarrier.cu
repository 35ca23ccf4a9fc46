// prims_mbarrier -- one warp hands rows to another through a ring of two stages, so that every
// barrier goes through several phases. Each side dawdles in turn: who does not wait reads what is
// not there yet, or overwrites what is still to be read.
#include "prims/instructions/mbarrier.cuh"
#include "prims/instructions/warp.cuh"

constexpr int STAGES = 2, STEPS = 9, ROW_BYTES = WARP_SIZE * sizeof(int);

// Delivers bytes that a phase waits for, as the copy engine does.
__device__ void complete_tx(Mbarrier& barrier, int bytes) {
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

extern "C" __global__ void ring(const int* x,  // [STEPS, 32]
                                int* y) {      // [STEPS, 32], lanes reversed
  __shared__ int row[STAGES][WARP_SIZE];
  __shared__ Mbarrier full[STAGES], empty[STAGES];
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(full[s], 1);           // one lane speaks for the warp that writes
      mbarrier_init(empty[s], WARP_SIZE);  // every lane that reads speaks for itself
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised before anyone waits or arrives

  for (int step = 0; step < STEPS; ++step) {
    const int stage = step % STAGES, parity = step / STAGES % 2;
    if (warp_id() == 0) {
      mbarrier_wait_parity(empty[stage], parity ^ 1);  // this row is no longer read
      if (lane_id() == 0) mbarrier_arrive_expect_tx(full[stage], ROW_BYTES);
      if (step % 3 == 0) __nanosleep(20000);  // all have arrived, no byte has
      row[stage][lane_id()] = x[step * WARP_SIZE + lane_id()];
      __syncwarp();  // every lane has written
      if (lane_id() == 0) {
        __threadfence_block();  // whoever sees the bytes counted sees the row
        complete_tx(full[stage], ROW_BYTES - 4);
        complete_tx(full[stage], 4);
      }
    } else {
      mbarrier_wait_parity(full[stage], parity);  // the row is there
      if (step % 3 == 1) __nanosleep(200000);  // long enough to be overtaken
      y[step * WARP_SIZE + lane_id()] = row[stage][WARP_SIZE - 1 - lane_id()];
      mbarrier_arrive(empty[stage]);
    }
  }
}
