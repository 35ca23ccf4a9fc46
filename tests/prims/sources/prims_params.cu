// prims_params -- every field of the parameter structs, as the kernel receives it.
#include "prims/params.cuh"

extern "C" __global__ void params(const __grid_constant__ AttnParams p,
                                  const __grid_constant__ QuantParams quant,
                                  int64_t* integers,  // [62]
                                  float* floats) {    // [4]
  int i = 0;
  for (const void* pointer : {p.Q, p.K, p.V, (const void*)p.O, (const void*)p.lse,
                              (const void*)p.S})
    integers[i++] = int64_t(pointer);
  for (const Strides& s : {p.Q_stride, p.K_stride, p.V_stride, p.O_stride})
    for (const int64_t stride : {s.batch, s.head, s.len}) integers[i++] = stride;
  for (const int n : {p.batch, p.heads, p.heads_kv, p.len_q, p.len_kv, p.causal_shift})
    integers[i++] = n;
  integers[i++] = int64_t(p.mask);
  integers[i++] = int64_t(p.bias);
  for (const ScoreStrides& s : {p.mask_stride, p.bias_stride})
    for (const int64_t stride : {s.batch, s.head, s.row, s.key}) integers[i++] = stride;
  integers[i++] = p.window_shift;
  integers[i++] = int64_t(p.kept_blocks);
  for (const int64_t stride : {p.kept_stride.batch, p.kept_stride.head, p.kept_stride.len})
    integers[i++] = stride;
  for (const float* table : {p.rope_cos, p.rope_sin}) integers[i++] = int64_t(table);
  integers[i++] = p.rope_offset_q;
  for (const int32_t* pointer : {p.cu_seqlens_q, p.cu_seqlens_k}) integers[i++] = int64_t(pointer);
  for (const int n : {p.total_q, p.bottom_right, p.stack}) integers[i++] = n;
  for (const float* pointer : {quant.Q_scale, quant.K_scale, quant.K_mean})
    integers[i++] = int64_t(pointer);
  for (const int64_t stride : {quant.Q_scale_stride_batch, quant.Q_scale_stride_head,
                               quant.K_scale_stride_batch, quant.K_scale_stride_head})
    integers[i++] = stride;
  for (const int32_t* pointer : {quant.Q_zero, quant.K_zero, quant.Q_code_sum, quant.K_code_sum})
    integers[i++] = int64_t(pointer);
  for (const int64_t stride : {quant.Q_sum_stride_batch, quant.Q_sum_stride_head,
                               quant.K_sum_stride_batch, quant.K_sum_stride_head})
    integers[i++] = stride;
  floats[0] = p.scale;
  floats[1] = p.scale_log2;
  floats[2] = p.softcap;
  floats[3] = p.softcap_inverse;
}
