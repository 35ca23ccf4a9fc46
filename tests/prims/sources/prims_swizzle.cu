// prims_swizzle -- where each 16-byte chunk lies, for rows of every even number of chunks to 32, and
// the same in steps from the first two chunks of the first 8 rows.
#include "prims/io/swizzle.cuh"

template <int CHUNKS>
__device__ void rows(int* index, int* from) {  // [16, CHUNKS] each, row by row; returns after it
  const int row = threadIdx.x;
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    index[row * CHUNKS + chunk] = swizzle<CHUNKS>(row, chunk);
    const uint32_t first = 128 + 16 * swizzle<CHUNKS>(row % 8, chunk % 2);
    from[row * CHUNKS + chunk] =
        (swizzled_from<CHUNKS>(first, row / 8 * 8, chunk / 2 * 2) - 128) / 16;
  }
  if constexpr (CHUNKS < 32) rows<CHUNKS + 2>(index + 16 * CHUNKS, from + 16 * CHUNKS);
}

// index and from [16 (2 + 4 + ... + 32)], bytes [2]
extern "C" __global__ void swizzle(int* index, int* from, int* bytes) {
  rows<2>(index, from);
  __shared__ unsigned short tile[64];  // [4, 16], two chunks a row
  if (threadIdx.x == 0) {
    bytes[0] = int((char*)swizzled<2>(tile, 3, 1) - (char*)tile);
    bytes[1] = int((char*)swizzled<2>((unsigned char*)tile, 3, 0) - (char*)tile);
  }
}
