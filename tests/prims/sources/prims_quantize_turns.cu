// prims_quantize_turns -- which work is done: the sums of slices, and codes, which only count.
#include "prims/schedule/quantize_turns.cuh"

struct Count {
  template <typename Own>
  __device__ __forceinline__ void operator()(Own, const QuantizeParams& p, uint32_t block) {
    // NOTE: an int32 for each block in the place of codes.
    if (thread_id() == 0) atomicAdd(reinterpret_cast<int32_t*>(p.codes) + block, 1);
  }
};

extern "C" __global__ void turns(
    const __grid_constant__ QuantizeParams of_q, const __grid_constant__ QuantizeParams of_k,
    const __grid_constant__ TurnParams given,
    elem_t* X,           // [2, 70, 24]
    float* partial_sum,  // [2, 3, 24]
    int32_t* summed,     // [2]
    uint64_t* head_sum,  // [2, 24]
    int32_t* next,       // [1]
    int32_t* q_done,     // [10]
    int32_t* k_done) {   // [6]
  QuantizeParams q = of_q, k = of_k, v = {};
  TurnParams turn = given;
  k.X = X, k.partial_sum = partial_sum, k.summed_slices = summed, k.head_sum = head_sum;
  turn.next = next;
  q.codes = reinterpret_cast<int8_t*>(q_done), k.codes = reinterpret_cast<int8_t*>(k_done);
  in_turn(q, k, v, turn, Count());
}
