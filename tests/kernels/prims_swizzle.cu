// prims_swizzle -- where each 16-byte chunk lies, for rows of every even number of chunks to 32.
#include "prims/swizzle.cuh"

template <int CHUNKS>
__device__ void rows(int* index) {  // [16, CHUNKS], row by row; returns after it
  for (int chunk = 0; chunk < CHUNKS; ++chunk)
    index[threadIdx.x * CHUNKS + chunk] = swizzle<CHUNKS>(threadIdx.x, chunk);
  if constexpr (CHUNKS < 32) rows<CHUNKS + 2>(index + 16 * CHUNKS);
}

extern "C" __global__ void swizzle(int* index, int* bytes) {  // [16 (2 + 4 + ... + 32)], [2]
  rows<2>(index);
  __shared__ unsigned short tile[64];  // [4, 16], two chunks a row
  if (threadIdx.x == 0) {
    bytes[0] = int((char*)swizzled<2>(tile, 3, 1) - (char*)tile);
    bytes[1] = int((char*)swizzled<2>((unsigned char*)tile, 3, 0) - (char*)tile);
  }
}
