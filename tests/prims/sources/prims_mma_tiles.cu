// prims_mma_tiles -- a tile in units of mma.
#include "prims/instructions/mma_tiles.cuh"

extern "C" __global__ void mma_tiles(int* constants) {  // [4]
  const int values[] = {HEAD_DIM_PAD, MMA_ROWS, MMA_KEYS, MMA_COLS};
  if (threadIdx.x < 4) constants[threadIdx.x] = values[threadIdx.x];
}
