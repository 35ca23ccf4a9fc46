// prims_pieces -- what every block takes, one thread in the place of each.
#include "prims/schedule/pieces.cuh"
#include "prims/instructions/warp.cuh"

extern "C" __global__ void pieces(
    const __grid_constant__ PieceParams p,
    int32_t* taken) {  // [blocks, waves + 3, 4]: tile, first, steps, slot
  const int block = threadIdx.x, blocks = blockDim.x, indices = p.whole / blocks + 3;
  for (int i = 0; i < indices; ++i) {
    const Piece piece(p, block + i * blocks, block, blocks);
    int32_t* to = taken + (block * indices + i) * 4;  // [4]
    to[0] = piece.tile, to[1] = piece.first, to[2] = piece.steps, to[3] = piece.slot;
  }
}
