// zero_points_sm90.cuh -- correction of wgmma's products of codes by zero points (zero_points.cuh
// has the formula). Accumulators begin with the correction,
//   sum (c_q - z_q)(c_k - z_k) = -(z_q sum c_k + z_k (sum c_q - HEAD_DIM z_q)) + sum c_q c_k.
// so a score costs one fused multiplication, plus a quarter for the row's term if 16 keys share
// z_k. The terms of the keys are stored beside K; a separate warp loads them. A kernel
// without ZERO_POINTS compiles all of this to nothing.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mbarrier.cuh"
#include "prims/params.cuh"
#include "prims/codes/quantize_q.cuh"
#include "prims/score/score.cuh"
#include "prims/score/score_hook.cuh"
#include "prims/score/step_scores.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/schedule/work_tile.cuh"
#include "prims/codes/zero_points.cuh"

// Terms of the keys of a step, negated so that consumers only add.
struct alignas(16) KeyZeros {
  int32_t code_sum[BLOCK_KV];  // -sum c_k, in the order of `place`
  int32_t zero[SCALES];        // -z_k

  // Place of a key. In each 16 keys, key 8 n + 2 t + j is at 4 t + 2 n + j. (Lane t of a quad has
  // these scores.)
  __device__ __forceinline__ static int place(int key) {
    return key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2;
  }
};

// Arrivals at a full stage: the thread that copies K, and the warp that loads these terms.
constexpr int PRODUCERS = ZERO_POINTS ? 2 : 1;

// Lies behind the kernel's own shared storage.
struct SharedZeros {
  KeyZeros K[NUM_STAGES];
  int2 Q[NUM_WARPS][16];  // of the rows of a warp that computes: z_q and sum c_q - HEAD_DIM z_q

  // S2 load the terms beside K of every step of every tile, by a whole warp, until there are no
  // more. V_STEPS: stages of a tile that hold V alone.
  template <int V_STEPS, typename SharedStorage>
  __device__ __forceinline__ void load_keys(
      SharedStorage& smem, Mbarrier (&full)[NUM_STAGES], Mbarrier (&empty)[NUM_STAGES],
      const AttnParams& call, const QuantParams& quant, const Scoring<SCORED>& scoring) {
    RingPosition<Q_STAGES> Q_at;
    RingPosition<NUM_STAGES> at;
    while (true) {
      mbarrier_wait_parity(smem.Q_full[Q_at.stage], Q_at.parity);  // the tile is there
      const WorkTile tile = uniform(smem.tile[Q_at.stage]);
      __syncwarp();  // all lanes have read
      if (lane_id() == 0) mbarrier_arrive(smem.Q_empty[Q_at.stage]);
      Q_at.advance();
      if (tile.q0 < 0) return;
      const auto& p = of_sequences<int8_t>(call, tile);
      const int32_t* zero = quant.K_zero  // [ceil(len_kv / GROUP_KV)]
                            + tile.batch * quant.K_scale_stride_batch +
                            tile.head_kv * quant.K_scale_stride_head +
                            first_scale<GROUP_KV>(call.cu_seqlens_k, tile.batch);
      const int32_t* code_sum = quant.K_code_sum  // [len_kv]
                                + tile.batch * quant.K_sum_stride_batch +
                                tile.head_kv * quant.K_sum_stride_head +
                                first_scale<1>(call.cu_seqlens_k, tile.batch);
      const KeptKeys keys(
          p, tile.batch, tile.head, tile.q0, kv_begin(p, tile.q0), kv_end(p, tile.q0, BLOCK_Q));
      int number = round_down(keys.begin, BLOCK_KV) + tile.first * BLOCK_KV;  // of a step
      TileSteps<MASKED> listed(scoring, p, tile);
#pragma unroll 1  // registers suffice for one
      for (int step = 0; step < tile.steps + V_STEPS; ++step, number += BLOCK_KV, at.advance()) {
        // Keys past the end are masked, and repeat the last key.
        const int kv0 = MASKED ? first_key(listed.take()) : keys.key(number);
        const int last = max(p.len_kv - 1, 0);
        constexpr int LANE_KEYS = ceil_div(BLOCK_KV, WARP_SIZE);
        int32_t sum[LANE_KEYS];
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i)
          sum[i] = code_sum[min(kv0 + i * WARP_SIZE + lane_id(), last)];
        const int of_keys = zero[uint32_t(min(kv0 + lane_id() * SCALE_KEYS, last)) / GROUP_KV];
        mbarrier_wait_parity(empty[at.stage], at.parity ^ 1);  // these were read
        KeyZeros& to = K[at.stage];
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i)
          if (const int key = i * WARP_SIZE + lane_id(); key < BLOCK_KV)
            to.code_sum[KeyZeros::place(key)] = -sum[i];
        if (lane_id() < SCALES) to.zero[lane_id()] = -of_keys;
        __syncwarp();  // all lanes have written
        if (lane_id() == 0) mbarrier_arrive(full[at.stage]);
      }
    }
  }

  // S1 load the terms of this lane's rows, `row` of the tile and row + 8. Rows past the end have
  // codes of 0 and zero point 0, so their scores are 0 regardless of the data behind them.
  __device__ __forceinline__ void load_rows(
      const AttnParams& call, const QuantParams& quant, const float* Q_scale, const WorkTile& tile,
      int row, int len_q) {
    if constexpr (ZERO_POINTS) {
      const int32_t* code_sum = quant.Q_code_sum  // [len_q]
                                + tile.batch * quant.Q_sum_stride_batch +
                                tile.head * quant.Q_sum_stride_head +
                                first_scale<1>(call.cu_seqlens_q, tile.batch);
      const int h = lane_id() % 4, q = tile.q0 + row + h * 8;  // two lanes of four load a row each
      __syncwarp();  // all lanes have read the terms of the tile before
      if (h < 2) {
        int2 own = {};
        if (q < len_q) {
          own.x = zero_of(quant.Q_zero, quant.Q_scale, Q_scale + q / GROUP_Q);
          own.y = code_sum[q] - HEAD_DIM * own.x;
        }
        rows(thread_id_anew())[h * 8] = own;
      }
      __syncwarp();  // all lanes have written
    }
  }

  // S3: the initial values of the scores of a step.
  __device__ __forceinline__ void begin(int32_t (&dot)[BLOCK_KV / 2], int stage) {
    if constexpr (ZERO_POINTS) {
      const int thread = thread_id_anew();
      const int2 of_row[2] = {rows(thread)[0], rows(thread)[8]};
      const int* of_lane = K[stage].code_sum + thread % 4 * 4;  // [BLOCK_KV - thread % 4 * 4]
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 2; i += 8) {  // 16 keys
        // NOTE: ptxas loads no further ahead than this. All loads at once were spilled.
        if (i % 16 == 0) __syncwarp();
        const int4 sum = *reinterpret_cast<const int4*>(of_lane + i * 2);
        const int of_key[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int2 q = of_row[j / 2 % 2];
          dot[i + j] = q.x * of_key[j / 4 * 2 + j % 2] + q.y * K[stage].zero[i / PART];
        }
      }
    }
  }

  // S6: the zero point of the lane's row h.
  __device__ __forceinline__ int of_row(int h) {
    return ZERO_POINTS ? rows(thread_id_anew())[h * 8].x : 0;
  }

 private:
  // Terms of this lane's first row; the other row is 8 further.
  __device__ __forceinline__ int2* rows(int thread) {
    return &Q[thread / WARP_SIZE][thread % WARP_SIZE / 4];
  }
};
constexpr int SHARED_ZEROS_BYTES = ZERO_POINTS ? sizeof(SharedZeros) : 0;
