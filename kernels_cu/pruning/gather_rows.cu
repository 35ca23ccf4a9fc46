// gather_rows -- kept rows of K and V, moved together; of V alone if K is quantised in place.
//
// Idea         Memory decides. A row takes as few accesses as its alignment allows, side by side in
//              a group of lanes. A thread loads several rows of both operands before it stores the
//              first.
// Kept simple  The operand plays Q's part in config.cuh: BLOCK_Q rows to a block.
// Rounding     none: bits are moved
// Mirror       indexing
// Bound        none is needed
#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/codes/quant.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct GatherParams {
  const void* K;          // [batch, heads_kv, len_kv, HEAD_DIM]; null: its rows stay
  const void* V;          // [batch, heads_kv, len_kv, HEAD_DIM]
  void* kept_K;           // [batch, heads_kv, count, HEAD_DIM], contiguous
  void* kept_V;           // [batch, heads_kv, count, HEAD_DIM], contiguous
  const int32_t* places;  // [batch * heads_kv, count]
  Strides K_stride;
  Strides V_stride;
  int32_t heads_kv;
  int32_t count;
};

constexpr int ACCESSES = HEAD_DIM / VEC;  // per row
constexpr int ROW_LANES =
    power_of_two_from(ACCESSES) < WARP_SIZE ? power_of_two_from(ACCESSES) : WARP_SIZE;
constexpr int LANE_ACCESSES = ceil_div(ACCESSES, ROW_LANES);
constexpr int PASS_ROWS = NUM_THREADS / ROW_LANES;  // rows that all threads take at a time
constexpr int PASSES = BLOCK_Q / PASS_ROWS;
static_assert(BLOCK_Q % PASS_ROWS == 0, "BLOCK_Q must be whole passes of all threads over rows");
using Access = Words<elem_t, VEC>;

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void gather_rows(
    const __grid_constant__ GatherParams p) {
  const uint32_t chunks = ceil_div(p.count, BLOCK_Q);
  const int row0 = blockIdx.x % chunks * BLOCK_Q + thread_id() / ROW_LANES;
  const int64_t batch_head = blockIdx.x / chunks;
  const int64_t batch = batch_head / p.heads_kv, head = batch_head % p.heads_kv;
  const int col0 = thread_id() % ROW_LANES * VEC;
  const int32_t* places = p.places + batch_head * p.count;  // [count]
  const elem_t* K = static_cast<const elem_t*>(p.K)         // [len_kv, HEAD_DIM]
                    + batch * p.K_stride.batch + head * p.K_stride.head + col0;
  const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM]
                    + batch * p.V_stride.batch + head * p.V_stride.head + col0;
  const int64_t kept = batch_head * p.count * HEAD_DIM + col0;
  elem_t* kept_K = static_cast<elem_t*>(p.kept_K) + kept;  // [count, HEAD_DIM]
  elem_t* kept_V = static_cast<elem_t*>(p.kept_V) + kept;  // [count, HEAD_DIM]

  int64_t place[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = row0 + pass * PASS_ROWS;
    place[pass] = row < p.count ? places[row] : 0;
  }
  Access k[PASSES][LANE_ACCESSES], v[PASSES][LANE_ACCESSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      const int col = a * ROW_LANES * VEC;
      if (row0 + pass * PASS_ROWS < p.count && col0 + col < HEAD_DIM) {
        if (p.K != nullptr)
          k[pass][a] = *reinterpret_cast<const Access*>(K + place[pass] * p.K_stride.len + col);
        v[pass][a] = *reinterpret_cast<const Access*>(V + place[pass] * p.V_stride.len + col);
      }
    }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      k[pass][a].use_from_here();
      v[pass][a].use_from_here();
    }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      const int col = a * ROW_LANES * VEC;
      const int64_t row = row0 + pass * PASS_ROWS;
      if (row < p.count && col0 + col < HEAD_DIM) {
        if (p.K != nullptr) *reinterpret_cast<Access*>(kept_K + row * HEAD_DIM + col) = k[pass][a];
        *reinterpret_cast<Access*>(kept_V + row * HEAD_DIM + col) = v[pass][a];
      }
    }
}
