// work_tile.cuh -- the current tile of a block in a persistent kernel. The copying thread
// determines it and stores it beside Q for the computing warps.
#pragma once

#include "prims/params.cuh"
#include "prims/schedule/tile_order.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

// Query rows of a head, and the number of steps over keys: at least one, even if it finds all keys
// masked. PACKED: `batch` is the sequence; to the copy engine all are one entry.
struct WorkTile : Sequences<VARLEN> {
  int q0;  // -1: there is no more
  int head, batch, steps;
  int first, slot;  // as a Piece has them
  int head_kv;      // last: fa_tc's consumers have no use for it
  int padding;      // it is read 16 bytes at a time
  __device__ __forceinline__ int entry() const { return PACKED ? 0 : batch; }  // of the tensor maps
};

// Tile `index` of a sequence or of all. `bytes` is the size of an element of K and one of V
// together. UNEVEN is as in place_of. The steps are not counted yet.
template <bool UNEVEN, int BYTES>
__device__ __forceinline__ WorkTile
work_tile(const AttnParams& p, const Sequences<VARLEN>& sequences, int sequence, int index) {
  const int batch_heads = VARLEN ? p.heads : p.heads * p.batch;
  const int64_t keys = VARLEN ? max(p.len_kv, 1) : p.len_kv;
  const int64_t head_bytes = keys * HEAD_DIM * BYTES;
  const TilePlace place = place_of<UNEVEN>(index, p.len_q, batch_heads, head_bytes);
  // NOTE: batch entries of a head follow one another if they can share its bias in the L2 cache.
  constexpr bool BY_HEAD = SCORED && BIAS_KIND == BiasKind::DENSE && !VARLEN;
  const int head = BY_HEAD ? place.batch_head / p.batch : place.batch_head % p.heads;
  const int batch = BY_HEAD ? place.batch_head % p.batch : place.batch_head / p.heads;
  return {sequences, place.q0, head, VARLEN ? sequence : batch,
          0,         0,        -1,   head / (p.heads / p.heads_kv)};
}

// Tells the compiler that a tile is the same in every lane: it cannot infer this through the stages
// of a ring.
__device__ __forceinline__ WorkTile uniform(WorkTile tile) {
  // Every lane has read the tile before one of them gives its place back; shuffles order nothing.
  __syncwarp();
  return {uniform<VARLEN>(tile), uniform(tile.q0),    uniform(tile.head), uniform(tile.batch),
          uniform(tile.steps),   uniform(tile.first), uniform(tile.slot), uniform(tile.head_kv)};
}
