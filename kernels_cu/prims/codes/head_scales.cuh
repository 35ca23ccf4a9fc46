// head_scales.cuh -- where the scales of one head begin.
#pragma once

#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/io/varlen.cuh"

__device__ __forceinline__ const float* Q_scale_of(  // [ceil(len_q / GROUP_Q)]
    const AttnParams& call, const QuantParams& quant, int64_t batch, int64_t head) {
  return quant.Q_scale + batch * quant.Q_scale_stride_batch + head * quant.Q_scale_stride_head +
         first_scale<GROUP_Q>(call.cu_seqlens_q, batch);
}
__device__ __forceinline__ const float* K_scale_of(  // [ceil(len_kv / GROUP_KV)]
    const AttnParams& call, const QuantParams& quant, int64_t batch, int64_t head_kv) {
  return quant.K_scale + batch * quant.K_scale_stride_batch + head_kv * quant.K_scale_stride_head +
         first_scale<GROUP_KV>(call.cu_seqlens_k, batch);
}
