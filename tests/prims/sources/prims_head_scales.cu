// prims_head_scales -- the first scales of every batch entry and head.
#include "prims/codes/head_scales.cuh"

extern "C" __global__ void head_scales(
    const __grid_constant__ QuantParams given,
    const float* Q_scale,       // [2, 4, 5] without VARLEN, [4, 9] with it
    const float* K_scale,       // [2, 2, 3] without VARLEN, [2, 9] with it
    const int32_t* cu_seqlens,  // [3]
    float* of_q,                // [2, 4]
    float* of_k) {              // [2, 2]
  QuantParams quant = given;
  quant.Q_scale = Q_scale, quant.K_scale = K_scale;
  AttnParams call = {};
  call.cu_seqlens_q = call.cu_seqlens_k = cu_seqlens;
  const int batch = threadIdx.x / 4, head = threadIdx.x % 4;
  of_q[batch * 4 + head] = *Q_scale_of(call, quant, batch, head);
  if (head % 2 == 0) of_k[batch * 2 + head / 2] = *K_scale_of(call, quant, batch, head / 2);
}
