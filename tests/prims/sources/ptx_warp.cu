// ptx_warp -- exchanges, votes and reductions of the lanes of a warp; atomic operations; barriers of
// some warps.
#include "prims/base.cuh"

constexpr int COUNT = 64;

#define SHUFFLE(KIND, OFFSET, LIMITS)                                            \
  do {                                                                           \
    uint32_t r, valid;                                                           \
    asm volatile(                                                                \
        "{.reg .pred p; shfl.sync." KIND ".b32 %0|p, %2, %3, %4, 0xffffffff;"    \
        " selp.u32 %1, 1, 0, p;}"                                                \
        : "=r"(r), "=r"(valid)                                                   \
        : "r"(a), "r"(OFFSET), "r"(LIMITS));                                     \
    y[row++ * COUNT + i] = r;                                                    \
    y[row++ * COUNT + i] = valid;                                                \
  } while (0)

// Segments of 32, 16 and 8 lanes; offsets that leave them.
extern "C" __global__ void shuffles(
    const uint32_t* x,  // [2, COUNT]: values, sources of idx
    uint32_t* y) {      // [24, COUNT]
  const int i = threadIdx.x;
  const uint32_t a = x[i], from = x[COUNT + i];
  int row = 0;
#pragma unroll
  for (int width = 32; width >= 8; width /= 2) {
    const int segment = (32 - width) << 8;
    SHUFFLE("up", 3, segment);
    SHUFFLE("down", 5, segment | 31);
    SHUFFLE("bfly", width / 2, segment | 31);
    SHUFFLE("idx", from, segment | 31);
  }
}

#define ROW(VALUE) y[row++ * COUNT + i] = VALUE

extern "C" __global__ void votes(
    const uint32_t* x,  // [COUNT]
    uint32_t* y) {      // [16, COUNT]
  const int i = threadIdx.x;
  const uint32_t a = x[i];
  int row = 0;
  ROW(__ballot_sync(FULL_WARP, a & 1));
  ROW(__any_sync(FULL_WARP, a > 90) != 0);
  ROW(__all_sync(FULL_WARP, a > 3) != 0);
  ROW(__match_any_sync(FULL_WARP, a & 7));
  int same;
  ROW(__match_all_sync(FULL_WARP, i / 32 == 0 ? 5u : a, &same));
  ROW(same != 0);
  ROW(__reduce_add_sync(FULL_WARP, a));
  ROW(__reduce_min_sync(FULL_WARP, a));
  ROW(__reduce_max_sync(FULL_WARP, static_cast<int>(a) - 50));
  ROW(__reduce_and_sync(FULL_WARP, a | 0x100));
  ROW(__reduce_or_sync(FULL_WARP, a));
  ROW(__reduce_xor_sync(FULL_WARP, a));
  // Half of the lanes, then those with the same value, each set on its own.
  const uint32_t half = i % 32 < 16 ? 0xffffu : 0xffff0000u;
  ROW(__reduce_add_sync(half, a));
  ROW(__shfl_xor_sync(half, a, 8));
  const uint32_t alike = __match_any_sync(FULL_WARP, a & 3);
  ROW(__reduce_add_sync(alike, a));
  ROW(i % 2 ? __ballot_sync(0xaaaaaaaau, a > 50) : 0);
}

// Every kind of atomic operation on one word each, in shared and in global memory; the tickets that
// the lanes drew; and 64 bits.
extern "C" __global__ void atomics(
    const uint32_t* x,        // [COUNT]
    uint32_t* y,              // [12], changed in place
    uint32_t* shared_y,       // [12]
    uint32_t* ticket,         // [COUNT], 7 wherever a number was drawn
    uint32_t* counter,        // [1]
    unsigned long long* sum,  // [1]
    float* total) {           // [1]
  __shared__ uint32_t s[12];
  const int i = threadIdx.x;
  const uint32_t a = x[i];
  if (i < 12) s[i] = y[i];
  __syncthreads();  // the words are there
#pragma unroll
  for (int space = 0; space < 2; ++space) {
    uint32_t* word = space ? s : y;
    atomicAdd(&word[0], a);
    atomicSub(&word[1], a);
    atomicMin(&word[2], a);
    atomicMax(&word[3], a);
    atomicMin(reinterpret_cast<int*>(&word[4]), static_cast<int>(a) - 50);
    atomicMax(reinterpret_cast<int*>(&word[5]), static_cast<int>(a) - 50);
    atomicAnd(&word[6], a | 0xff0);
    atomicOr(&word[7], a);
    atomicXor(&word[8], a);
    atomicInc(&word[9], 10);
    atomicDec(&word[10], 10);
    atomicCAS(&word[11], 7, 9);
  }
  ticket[atomicAdd(counter, 1)] = 7;
  atomicAdd(sum, static_cast<unsigned long long>(a) << 30);
  atomicAdd(total, static_cast<float>(a));  // whole numbers: the order does not show
  __syncthreads();                          // all of them are done
  if (i < 12) shared_y[i] = s[i];
}

// Two warps write a ring of two tiles, two others read it: named barriers say when a tile is full
// and when it is empty. Who need not wait only arrives.
extern "C" __global__ void ring(
    const uint32_t* x,  // [5, COUNT]
    uint32_t* y) {      // [5, COUNT], each tile reversed
  __shared__ uint32_t tile[2][COUNT];
  const int i = threadIdx.x % COUNT;
  if (threadIdx.x < COUNT) {
    for (int step = 0; step < 5; ++step) {
      const int stage = step % 2;
      if (step >= 2) asm volatile("bar.sync %0, 128;" ::"r"(3 + stage) : "memory");
      tile[stage][i] = x[step * COUNT + i];
      asm volatile("bar.arrive %0, 128;" ::"r"(1 + stage) : "memory");
    }
  } else {
    for (int step = 0; step < 5; ++step) {
      const int stage = step % 2;
      asm volatile("bar.sync %0, 128;" ::"r"(1 + stage) : "memory");
      y[step * COUNT + i] = tile[stage][COUNT - 1 - i];
      if (step < 3) asm volatile("bar.arrive %0, 128;" ::"r"(3 + stage) : "memory");
    }
  }
}
