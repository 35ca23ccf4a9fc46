// proxy_fence.cuh -- shared memory written by ordinary stores, then touched by another unit. The
// library's kernels need no such fence: there only the copy engine writes what wgmma reads.
#pragma once

// Orders this thread's stores before what the copy engine and wgmma do after the next barrier.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
