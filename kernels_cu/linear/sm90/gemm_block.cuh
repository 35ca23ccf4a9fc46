// gemm_block.cuh -- shared by the Hopper forms of the INT8 matrix products. Of a block one
// warpgroup copies slices, by a single thread; each of the others computes 64 rows of the tile.
#pragma once

#include "prims/config.cuh"
#include "prims/codes/gemm.cuh"
#include "prims/instructions/griddepcontrol.cuh"
#include "prims/instructions/tma.cuh"

constexpr int WARPGROUP = 128;                    // threads
constexpr int CONSUMERS = BLOCK_M / 64;           // warpgroups that compute
constexpr int COMPUTING = CONSUMERS * WARPGROUP;  // threads
constexpr int FRAGMENTS = BLOCK_N / 8;            // tiles of 16 x 8 of a warp

static_assert(
    !NEIGHBOURS || (ELEM_IS_16_BIT && VEC == 8), "NEIGHBOURS are stored 16 bytes at a time");

// The fragment of a warpgroup that has a tile of C, of its half of B. The halves follow one
// another, as one copy of the engine brings them.
__device__ constexpr int fragment_of(int tile, int half) { return tile + half * (FRAGMENTS / 2); }

// Copies a slice of the tile's rows of B, from column n0 of C on. With NEIGHBOURS the map has five
// axes, (rows / 32, 4, 4, 2, k). Among 32 rows, row 8 t + 2 f + e becomes row 8 f + 2 t + e. So
// lane t of a quad has eight neighbouring columns of C in fragments f = 0 to 3.
__device__ __forceinline__ void copy_B(
    const GemmParams& p, int8_t* shared, const TensorMap& map, Mbarrier& barrier, int col, int n0) {
  if constexpr (NEIGHBOURS) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      cp_async_bulk_tensor_5d(
          shared + half * TILE_N * SLICE, map, barrier, col, 0, 0, 0, (half * p.n + n0) / 32);
  } else {
    cp_async_bulk_tensor_4d(shared, map, barrier, col, n0, 0, 0);
  }
}

// The shared memory of a block from the next multiple of 1024 bytes on, as wgmma and the copy
// engine require. It fits into smem_bytes.
template <typename Storage>
__device__ __forceinline__ Storage& aligned_storage(unsigned char* shared_bytes) {
  return *reinterpret_cast<Storage*>(
      (reinterpret_cast<uint64_t>(shared_bytes) + 1023) & ~uint64_t(1023));
}

// Initialises the barriers of the ring of slices. All threads come here.
__device__ __forceinline__ void init_ring(
    Mbarrier (&full)[NUM_STAGES], Mbarrier (&empty)[NUM_STAGES]) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(full[s], 1);
      mbarrier_init(empty[s], CONSUMERS * 4);  // a lane of every consumer warp
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised before anyone waits or arrives
}
