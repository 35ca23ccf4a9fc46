// scored_step.cuh -- scores of a step in the Hopper forms of fa_int8 with softcap or bias, and with
// a mask beside them. Softcap and bias change numbers, not integers. So scores are first converted
// to log2 units, and the softmax takes them with a factor of 1. A kernel with a mask alone keeps
// its integers (step_bits.cuh).
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/params.cuh"
#include "prims/schedule/work_tile.cuh"
#include "prims/score/score.cuh"
#include "prims/score/score_hook.cuh"
#include "prims/score/step_scores.cuh"

// R3: S in log2 units. A bias of -inf also masks scores whose factor is not finite: such scores
// become 0, to which the bias is added. `q` is the first of this lane's two rows. A step without
// keys may have any scale.
__device__ __forceinline__ void make_scores(
    float (&S_acc)[BLOCK_KV / 2], const int32_t (&dot)[BLOCK_KV / 2], const float (&Q_factor)[2],
    const float (&K_scale)[SCALES], const AttnParams& p, const WorkTile& tile, int q, int kv0) {
  Factors factor;
  make_factors(factor, Q_factor, K_scale);
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i)
    S_acc[i] = float(dot[i]) * factor[i / PART][i / 2 % 2];  // R3
  if constexpr (BIAS) {
    bool finite = true;
#pragma unroll
    for (int j = 0; j < SCALES; ++j)
      finite &= fabsf(factor[j][0]) < -NEG_INF && fabsf(factor[j][1]) < -NEG_INF;
    if (kv0 < p.len_kv && !__all_sync(FULL_WARP, finite)) {
      uint32_t bits[2];
      BiasInMemory(p, tile.batch, tile.head).admitted(bits, q, kv0);
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 2; ++i)
        if (!is_admitted(bits, i)) S_acc[i] = 0.0f;
    }
  }
}

// -inf for scores that are masked by the places of row and key.
__device__ __forceinline__ void mask_by_place(
    float (&S_acc)[BLOCK_KV / 2], const AttnParams& p, int q, int kv0, int unmasked) {
  if (ScoreMask::admits_all(p, q, kv0, unmasked)) return;
  const ScoreMask mask(p, q, kv0);
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i)
    if (!mask.admits(i)) S_acc[i] = NEG_INF;
}

// The scores of the step whose K is in `stage`, changed by softcap, bias and mask. `empty`: the
// barrier of that stage if it is not read further, or nothing.
template <typename... Barrier>
__device__ __forceinline__ void score_step(
    float (&S_acc)[BLOCK_KV / 2], const int32_t (&dot)[BLOCK_KV / 2], const float (&Q_factor)[2],
    const float (&K_scale)[SCALES], ScoreChange<SCORED>& change_scores,
    const Scoring<SCORED>& scoring, ScorePlaces<SCORED>& places, const AttnParams& p,
    const WorkTile& tile, int stage, int warp_row, int kv0, int step, int unmasked,
    Barrier&... empty) {
  const int q = tile.q0 + warp_row + lane_id() / 4;
  make_scores(S_acc, dot, Q_factor, K_scale, p, tile, q, kv0);
  change_scores(scoring, places, p, S_acc, stage, warp_row, q, step, empty...);  // R3
  mask_by_place(S_acc, p, q, kv0, unmasked);
}
