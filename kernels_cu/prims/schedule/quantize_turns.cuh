// quantize_turns.cuh -- order of the work of quantize.cu, if codes of a head need its sums.
//
// In each round, blocks sum the slices of one head. They also make the codes of a head that was
// summed some rounds earlier, with rows still in the L2 cache. Then they take a share of the
// independent work. Blocks take pieces of work in this order as they begin, and a piece waits only
// for pieces before it, whose blocks have already begun. Hence no deadlock, however few blocks run.
#pragma once

#include "prims/codes/quantize_sums.cuh"

struct TurnParams {
  int32_t* next;   // [1], zero at first: the number of the next piece of work
  int32_t rounds;  // with a head of K or V each, and the heads of Q that share it
  int32_t lag;     // rounds from the sums of a head to its codes
};

// Does a piece of work of this operand: sums a slice, or calls run(task, parameters,
// block within the operand) for codes.
template <typename Own, typename Run>
__device__ __forceinline__ void works_on(
    const QuantizeParams& p, const TurnParams& turn, int round, int work, Run run) {
  constexpr bool WAITS = Own::FIRST != Step::NONE;
  if constexpr (WAITS) {
    if (work < p.first_blocks) {
      if (round < turn.rounds)
        sum_slice<Own::FIRST == Step::EXTREMA, Own::PREPARED>(p, round * p.first_blocks + work);
      return;
    }
    work -= p.first_blocks;
  }
  const int head = WAITS ? round - turn.lag : round;
  if (0 <= head && head < turn.rounds) run(Own(), p, head * p.blocks + work);
}

template <typename Run>
__device__ __forceinline__ void in_turn(
    const QuantizeParams& q, const QuantizeParams& k, const QuantizeParams& v,
    const TurnParams& turn, Run run) {
  using V = Task<FIRST_V, STEP_V, CutQ, false>;
  using K = Task<FIRST_K, STEP_K, CutK, PREPARED>;
  using Q = Task<FIRST_Q, STEP_Q, CutQ, PREPARED>;
  __shared__ uint32_t taken;
  uint32_t ticket;
  if (thread_id() == 0) ticket = atomicAdd(turn.next, 1);
  if constexpr (HEADS_TOGETHER) share_weights(q, k);  // while the number is on its way
  if (thread_id() == 0) taken = ticket;
  const uint32_t of_round =
      v.first_blocks + v.blocks + k.first_blocks + k.blocks + q.first_blocks + q.blocks;
  __syncthreads();  // the number and the weights are there before a thread reads them
  const int round = taken / of_round;
  const int work = taken % of_round;
  const int of_v = v.first_blocks + v.blocks, of_k = k.first_blocks + k.blocks;
  if (work >= of_v + of_k)
    works_on<Q>(q, turn, round, work - of_v - of_k, run);
  else if (work >= of_v)
    works_on<K>(k, turn, round, work - of_v, run);
  else
    works_on<V>(v, turn, round, work, run);
}
