// zero_points.cuh -- correction of a product of codes by zero points. With x = s (c - z),
//   sum (c_q - z_q)(c_k - z_k) = sum c_q c_k - (z_q sum c_k + z_k (sum c_q - HEAD_DIM z_q)).
// These are whole numbers of at most 2^24, which int32 and float hold exactly
// (docs/MATH_REFERENCE.md [L16]).
// A kernel without ZERO_POINTS compiles all of this to nothing.
#pragma once

#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

// The zero point of the rows whose scale is at `scale`. Both have the same offset in their arrays.
__device__ __forceinline__ int zero_of(
    const int32_t* first_zero, const float* first_scale, const float* scale) {
  return first_zero[scale - first_scale];
}

// Lies behind the kernel's own shared storage.
struct ZeroTiles {
  int2 Q[BLOCK_Q];               // of a row: z_q and sum c_q - HEAD_DIM z_q
  int2 K[NUM_STAGES][BLOCK_KV];  // of a key: z_k and sum c_k

  // S3: the product of two rows of codes less their zero points, from the product of the codes.
  __device__ __forceinline__ int32_t without(int32_t dot, int row, int stage, int key) const {
    if constexpr (ZERO_POINTS) {
      const int2 q = Q[row], k = K[stage][key];
      dot -= q.x * k.y + q.y * k.x;
    }
    return dot;
  }
};
constexpr int ZERO_TILES_BYTES = ZERO_POINTS ? sizeof(ZeroTiles) : 0;

// The zero points of one head of one batch entry, and the sums of the codes of its rows.
struct ZeroPoints {
  ZeroTiles* tiles;
  const int32_t* Q_zero;      // [ceil(len_q / GROUP_Q)]
  const int32_t* K_zero;      // [ceil(len_kv / GROUP_KV)]
  const int32_t* Q_code_sum;  // [len_q]
  const int32_t* K_code_sum;  // [len_kv]

  // Q_scale and K_scale point to the scales of the head. NOTE: zero points have the same offsets as
  // scales, so that no further pointer lives through the loop.
  __device__ __forceinline__ ZeroPoints(
      void* behind, const AttnParams& call, const QuantParams& quant, const float* Q_scale,
      const float* K_scale, int64_t batch, int64_t head, int64_t head_kv)
      : tiles(static_cast<ZeroTiles*>(behind)) {
    Q_zero = quant.Q_zero + (Q_scale - quant.Q_scale);
    K_zero = quant.K_zero + (K_scale - quant.K_scale);
    Q_code_sum = quant.Q_code_sum + batch * quant.Q_sum_stride_batch +
                 head * quant.Q_sum_stride_head + first_scale<1>(call.cu_seqlens_q, batch);
    K_code_sum = quant.K_code_sum + batch * quant.K_sum_stride_batch +
                 head_kv * quant.K_sum_stride_head + first_scale<1>(call.cu_seqlens_k, batch);
  }

  // S1, visible after the next barrier: rows from q0 on. Past the end the last row is repeated.
  __device__ __forceinline__ void load_rows(int q0, int len_q) const {
    if constexpr (ZERO_POINTS)
      for (int i = thread_id(); i < BLOCK_Q; i += NUM_THREADS) {
        const int row = min(q0 + i, len_q - 1), zero = Q_zero[row / GROUP_Q];
        tiles->Q[i] = make_int2(zero, Q_code_sum[row] - HEAD_DIM * zero);
      }
  }

  // S6: the zero point of a row of the block that attended to a key, hence after a barrier; else 0.
  __device__ __forceinline__ int of_row(int row, bool attended) const {
    return ZERO_POINTS && attended ? tiles->Q[row].x : 0;
  }

  // S2, with the copies of the stage: keys from kv0 on, the last repeated past the end.
  __device__ __forceinline__ void load_keys(int stage, int kv0, int len_kv) const {
    if constexpr (ZERO_POINTS)
      for (int i = thread_id(); i < BLOCK_KV; i += NUM_THREADS) {
        const int key = min(kv0 + i, len_kv - 1);
        cp_async<4>(&tiles->K[stage][i].x, K_zero + key / GROUP_KV, true);
        cp_async<4>(&tiles->K[stage][i].y, K_code_sum + key, true);
      }
  }
};
