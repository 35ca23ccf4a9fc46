// prims_varlen -- what a block sees of each batch entry with lengths of its own.
#include "prims/io/varlen.cuh"

extern "C" __global__ void varlen(
    const __grid_constant__ AttnParams given,
    const int32_t* cu_seqlens_q,  // [6]
    const int32_t* cu_seqlens_k,  // [6]
    int32_t* lengths,             // [5, 4]
    int64_t* offsets) {           // [5, 6], of pointers in bytes
  AttnParams call = given;
  call.cu_seqlens_q = cu_seqlens_q, call.cu_seqlens_k = cu_seqlens_k;
  const int batch = threadIdx.x;
  const auto& p = of_batch<int8_t, elem16_t>(call, batch);
  int i = 4 * batch;
  for (const int n : {p.len_q, p.len_kv, p.causal_shift, p.window_shift}) lengths[i++] = n;
  i = 6 * batch;
  for (const void* pointer : {p.Q, p.K, p.V, (const void*)p.O}) offsets[i++] = int64_t(pointer);
  offsets[i++] = lse_of(p, 99, 1) - given.lse;
  offsets[i] = first_scale<4>(cu_seqlens_k, batch);
}
