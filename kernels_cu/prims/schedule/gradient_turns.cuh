// gradient_turns.cuh -- blocks of keys that add to dQ in turn, so that every run has the same bits.
//
// Blocks take numbers as they begin, and add to a tile of dQ in the order of these numbers. So a
// block waits only for lower numbers, whose blocks have begun and wait for still lower ones. Hence
// no deadlock, however few blocks run at once. The first block of a tile stores its part, the last
// block stores rows.
#pragma once

#include "prims/schedule/counter.cuh"
#include "prims/io/gradient_sm90.cuh"

constexpr int64_t L2_SHARE = 32 << 20;  // bytes of rows and sums that stay in the L2 cache

struct TurnAt {      // the rows of dQ of a step
  float* sums;       // [QUERY_SUMS_BOXES or 2, QUERY_SUMS_TILE], of the parts of these rows
  elem_t* dQ;        // [rows, HEAD_DIM]
  int rows;          // number of rows
  bool first, last;  // whether this block adds to them first, or last
};

struct BlockOfKeys {
  int head;  // key heads of all entries, one entry's after the other
  int kv0;
  bool reversed;  // whether the first keys of this head come first, and their last rows
};
// Under a causal mask the first keys have most rows. The last keys come first, which wait for no
// block. In the last heads the first keys come first, so that the longest blocks do not begin last.
constexpr bool REVERSES = ORDERED && CAUSAL && !BLOCK_MASK;

// The `index`th block to begin, of `blocks`. Without ORDERED the first keys, which have most causal
// rows, come first. With ORDERED heads run side by side, so that few blocks of one head wait for
// each other. The L2 cache limits how many: Q, dO and the sums of dQ take 8 bytes per element.
__device__ __forceinline__ BlockOfKeys
block_of_keys(int index, int blocks, int kv_blocks, int len_q) {
  if constexpr (!ORDERED) return {index / kv_blocks, index % kv_blocks * BLOCK_KV, false};
  const int fit = max(1, int(L2_SHARE / (max(len_q, 1) * int64_t(COLS) * 8)));
  const int at_once = min(fit, blocks / kv_blocks);  // of few rows more fit than 32 bits count
  const int first = index / (at_once * kv_blocks) * at_once, left = blocks / kv_blocks - first;
  const int heads = min(at_once, left), within = index - first * kv_blocks;
  const bool reversed = REVERSES && left <= at_once;
  const int number = reversed ? within / heads : kv_blocks - 1 - within / heads;
  return {first + within % heads, number * BLOCK_KV, reversed};
}

// Steps of a block of keys over rows, the last rows of a head first if `reversed`.
struct TurnSteps : RowSteps {
  bool reversed;
  __device__ __forceinline__ TurnSteps(
      const AttnParams& p, const BackwardParams& grad, int64_t batch, int first, int last, int kv0,
      bool reversed)
      : RowSteps(p, grad, batch, first, last, kv0), reversed(reversed) {}
  __device__ __forceinline__ int q0() const {
    if (!REVERSES || !reversed) return RowSteps::q0();
    return round_down(rows.begin, BLOCK_Q) + round_down(rows.end - 1, BLOCK_Q) - number;
  }
};

// Number of blocks of keys that add to the rows from q0 on before the block at kv0.
__device__ __forceinline__ int blocks_before(
    const AttnParams& p, int64_t batch, int head, int q0, int kv0, bool reversed) {
  if (REVERSES && reversed) return kv0 / BLOCK_KV - kv_begin(p, q0) / BLOCK_KV;
  const int end = kv_end(p, q0, BLOCK_Q);
  if constexpr (BLOCK_MASK) {
    const KeptKeys keys(p, batch, head, q0, kv0 + 2 * BLOCK_KV - 1, end);
    return (keys.end - keys.begin) / BLOCK_KV;
  }
  return ceil_div(end, BLOCK_KV) - 1 - kv0 / BLOCK_KV;
}

// Whether no block of keys adds to them after that block.
__device__ __forceinline__ bool is_last_turn(
    const AttnParams& p, int64_t batch, int head, int q0, int kv0, bool reversed) {
  if (REVERSES && reversed) return kv_end(p, q0, BLOCK_Q) <= kv0 + BLOCK_KV;
  const int begin = kv_begin(p, q0);
  if constexpr (BLOCK_MASK) {
    const KeptKeys keys(p, batch, head, q0, begin, kv0);
    return keys.end <= keys.begin;
  }
  return kv0 <= begin;
}

// The counter of blocks that have added to dQ of the rows from q0 on. Blocks of a cluster add to
// different columns, in PARTS parts with a counter each.
template <int PARTS>
__device__ __forceinline__ int32_t* turns_of(
    const AttnParams& call, const BackwardParams& grad, int64_t batch, int64_t head, int q0,
    int part) {
  return grad.turns + (padded_row(call, grad, batch, head) + q0) / 64 * PARTS + part;
}

// One thread: after the blocks before, lets this block add to the rows of every step.
template <int PARTS, typename Smem>
__device__ __forceinline__ void give_turns(
    Smem& smem, const AttnParams& call, const AttnParams& p, const BackwardParams& grad,
    TurnSteps steps, int64_t batch, int last_head, int kv0, int first_row, int part) {
  for (RingPosition<2> at; steps.head < last_head; at.advance()) {
    const int q0 = steps.q0();
    const int before = blocks_before(p, batch, steps.head, q0, kv0, steps.reversed);
    await_count(turns_of<PARTS>(call, grad, batch, steps.head, q0, part), before);
    mbarrier_wait_parity(smem.passed[at.stage], at.parity ^ 1);  // the last turn is over
    elem_t* dQ = static_cast<elem_t*>(grad.dQ)                   // [len_q, HEAD_DIM]
                 + batch * grad.dQ_stride.batch + steps.head * grad.dQ_stride.head +
                 first_row * grad.dQ_stride.len;
    smem.turn_at[at.stage] = {
        query_sums(call, grad, batch, steps.head, q0, 0), dQ + q0 * grad.dQ_stride.len,
        p.len_q - q0, before == 0, is_last_turn(p, batch, steps.head, q0, kv0, steps.reversed)};
    mbarrier_arrive(smem.turn[at.stage]);
    steps.advance(p, grad, batch, last_head, kv0);
  }
}

// Another thread: after this block, lets the next block add.
template <int PARTS, typename Smem>
__device__ __forceinline__ void pass_turns(
    Smem& smem, const AttnParams& call, const AttnParams& p, const BackwardParams& grad,
    TurnSteps steps, int64_t batch, int last_head, int kv0, int part) {
  for (RingPosition<2> at; steps.head < last_head; at.advance()) {
    mbarrier_wait_parity(smem.added[at.stage], at.parity);  // all warps have added
    red_release_add(turns_of<PARTS>(call, grad, batch, steps.head, steps.q0(), part), 1);
    mbarrier_arrive(smem.passed[at.stage]);
    steps.advance(p, grad, batch, last_head, kv0);
  }
}

// Adds a warpgroup's part of dQ to sums `tile` of the rows. This lane's rows are `row` and row + 8,
// its columns begin at `col`.
__device__ __forceinline__ void add_in_turn(
    const TurnAt& turn, float (&dQ_acc)[QUERY_SUMS], int tile, int row, int col, int64_t stride,
    float scale) {
  float* sums = turn.sums + tile * QUERY_SUMS_TILE;  // [QUERY_SUMS / 4, WARPGROUP, 4]
  if (!turn.last) {
    if (turn.first)
      store_query_sums(sums, dQ_acc);
    else
      add_query_sums(sums, dQ_acc);  // R12
    return;
  }
#pragma unroll
  for (int n = 0; n < QUERY_SUMS; n += QUERY_SUMS / 2) {  // all at once need too many registers
    float rows[QUERY_SUMS / 2];
#pragma unroll
    for (int i = 0; i < QUERY_SUMS / 2; ++i) rows[i] = dQ_acc[n + i];
    if (!turn.first) gather_query_sums(rows, sums + n * WARPGROUP);             // R12
    store_gradient(turn.dQ, stride, row, turn.rows, col + n * 2, rows, scale);  // R12
  }
}
