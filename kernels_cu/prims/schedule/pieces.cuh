// pieces.cuh -- work of the blocks of a persistent kernel if all tiles have one size. Blocks take
// whole tiles in waves, then equally many steps over keys of the last, incomplete wave. So the
// tiles of the last wave are cut into pieces. A block takes at most the end of one tile and the
// beginning of the next. Every piece stores its partial result, and merge_pieces.cu merges them.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/params.cuh"

constexpr int NO_TILE = 0x7fffffff;

// A tile, or a piece of one: the steps [first, first + steps) over its keys, and the place of a
// piece's partial result. Slots are counted along the steps of all cut tiles: one more for every
// block and for every tile.
struct Piece {
  int tile;  // NO_TILE: there is no more
  int first, steps;
  int slot;  // -1: a whole tile

  // The piece with this index, one of block + i * blocks, counted like whole tiles.
  __device__ __forceinline__ Piece(const PieceParams& pieces, int index, int block, int blocks)
      : tile(index), first(0), steps(pieces.steps), slot(-1) {
    if (index < pieces.whole) return;
    const int number = (index - pieces.whole) / blocks;  // of this block's pieces
    const int begin = block * pieces.share;
    const int end = min(begin + pieces.share, pieces.cut * pieces.steps);
    const int border = (begin / pieces.steps + 1) * pieces.steps;  // where its tile ends
    const int from = number == 0 ? begin : border, to = number == 0 ? min(border, end) : end;
    tile = NO_TILE;
    if (number > 1 || from >= to) return;
    const int cut_tile = from / pieces.steps;
    tile = pieces.whole + cut_tile, first = from - cut_tile * pieces.steps, steps = to - from;
    slot = block + cut_tile;
  }
};

// Result of a row of a piece, beside O.
struct PieceRow {
  float M, l;    // as RowState has them
  float l_of_O;  // the l that O is divided by
};

// Stores row + 8 h of a piece, one of a lane's two rows: the undivided O, in fragments of wgmma
// with COLS columns.
template <int COLS, int COUNT>
__device__ __forceinline__ void store_piece_row(
    const PieceParams& pieces, int slot, int row, int h, const float (&O)[COUNT],
    const PieceRow& came_to) {
  const int t = lane_id() % 4;
  const int64_t place = int64_t(slot) * BLOCK_Q + row + h * 8;
  float* O_piece = pieces.O + place * HEAD_DIM;  // [HEAD_DIM]
#pragma unroll
  for (int n = 0; n < COLS / 8; ++n)
    store_pair(O_piece, n * 8 + t * 2, O[4 * n + 2 * h], O[4 * n + 2 * h + 1]);
  if (t == 0) reinterpret_cast<PieceRow*>(pieces.rows)[place] = came_to;
}
