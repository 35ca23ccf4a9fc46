// channel_scales.cuh -- scales and means of the channels of V. They are loaded asynchronously when
// a tile begins, so no thread waits for them at its end.
#pragma once

#include "prims/params.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"

// A channel has one scale. Otherwise each tile of keys has one, by which its sum was multiplied
// before it was added to others. The remaining scale is 1.
constexpr bool ONE_V_SCALE = GROUP_V == 1 << 30;

// Zeros past HEAD_DIM, and for a sequence without keys, which has no scales and means.
template <int COLS>
struct alignas(8) ChannelScales {
  float scale[COLS], mean[COLS];

  // Starts to load the scales and means of a head, with the THREADS threads of a warpgroup or a
  // block.
  template <int THREADS>
  __device__ __forceinline__ void load(
      const AttnParams& p, const ValueParams& values, int head_kv, int batch) {
    const float* V_scale = values.V_scale  // [HEAD_DIM]
                           + batch * values.V_scale_stride_batch +
                           head_kv * values.V_scale_stride_head +
                           first_scale<GROUP_V>(p.cu_seqlens_k, batch) * HEAD_DIM;
    const float* V_mean = values.V_mean  // [HEAD_DIM]
                          + (int64_t(batch) * p.heads_kv + head_kv) * HEAD_DIM;
#pragma unroll
    for (int col0 = 0; col0 < COLS; col0 += THREADS) {
      const int col = col0 + threadIdx.x % THREADS;
      if (COLS % THREADS != 0 && col >= COLS) break;
      const bool given = col < HEAD_DIM && p.len_kv > 0;
      if (ONE_V_SCALE)
        cp_async<4>(&scale[col], V_scale + col, given);
      else
        scale[col] = 1.0f;
      cp_async<4>(&mean[col], V_mean + col, given && values.V_mean);
    }
    cp_async_commit_group();
  }

  // Converts sums of codes in a fragment to numbers: each sum times the scale of its channel, plus
  // l times the mean of the channel. The result is divided by l, the sum of a row's weights, except
  // in a piece.
  template <bool IS_PIECE, int COUNT, typename Sum>
  __device__ __forceinline__ void apply(
      float (&O)[COUNT], const Sum (&O_acc)[COUNT], const float (&l)[2]) const {
    float inverse_l[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) inverse_l[h] = l[h] == 0.0f ? 0.0f : 1.0f / l[h];
#pragma unroll
    for (int n = 0; n < COUNT / 4; ++n) {
      const int col = n * 8 + lane_id() % 4 * 2;
      const float2 scales = *reinterpret_cast<const float2*>(scale + col);
      const float2 means = *reinterpret_cast<const float2*>(mean + col);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // two columns of row g, and of row g + 8
        const int h = i / 2;
        const float s = i % 2 ? scales.y : scales.x, m = i % 2 ? means.y : means.x;
        const float x = float(O_acc[4 * n + i]);
        O[4 * n + i] = IS_PIECE ? fmaf(x, s, m * l[h]) : fmaf(x, s * inverse_l[h], m);  // R7
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (l[h] == 0.0f)  // a row without keys is 0
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) O[i / 2 * 4 + 2 * h + i % 2] = 0.0f;
  }
};
