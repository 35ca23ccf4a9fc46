// score.cuh -- what features do to a score: which keys a query row may attend to.
// A kernel without features compiles all of this to one comparison with len_kv.
#pragma once

#include "prims/config.cuh"
#include "prims/params.cuh"

// Keys [0, kv_end) are all that any of the query rows [q0, q0 + rows) may attend to.
__device__ __forceinline__ int kv_end(const AttnParams& p, int q0, int rows) {
  if constexpr (CAUSAL) return max(0, min(p.len_kv, q0 + rows + p.causal_shift));
  return p.len_kv;
}

// Keys [0, kv_unmasked) are attended to by every row from q0 on: no mask is needed there.
__device__ __forceinline__ int kv_unmasked(const AttnParams& p, int q0) {
  if constexpr (CAUSAL) return max(0, min(p.len_kv, q0 + 1 + p.causal_shift));
  return p.len_kv;
}

// May query row `row` attend to key `key`?
__device__ __forceinline__ bool admitted(const AttnParams& p, int row, int key) {
  if constexpr (CAUSAL) return key < p.len_kv && key <= row + p.causal_shift;
  return key < p.len_kv;
}
