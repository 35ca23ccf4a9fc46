// griddepcontrol.cuh -- launches that overlap: a kernel may begin while the one before it ends, if
// its launch says so (Launch.awaits in cupyattn/plans/records.py). From sm_90 on; before, and in a
// launch that does not overlap, both do nothing.
#pragma once

#include "prims/base.cuh"

// The next launch may begin once every block has called this or ended. Its blocks take the SMs that
// these leave.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the previous launch has ended and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
