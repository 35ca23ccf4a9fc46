// prims_mma_tiles -- a tile in units of mma.
#include "prims/instructions/mma_tiles.cuh"

extern "C" __global__ void mma_tiles(int* constants) {  // [7]
  const int values[] = {HEAD_DIM_PAD, MMA_ROWS,    MMA_KEYS, MMA_COLS,
                        CODES_PAD,    CODE_CHUNKS, CODE_VEC};
  if (threadIdx.x < 7) constants[threadIdx.x] = values[threadIdx.x];
}
