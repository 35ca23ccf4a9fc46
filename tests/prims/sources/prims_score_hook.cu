// prims_score_hook -- a tile of query rows as a Hopper form takes it, with scores that are given: a
// warp loads bias and mask of each step into a ring, and the others change their scores by them.
#include "prims/score/score_hook.cuh"

constexpr int ROWS = 16;  // of a warp

struct SharedStorage {
  ScorePlaces<SCORED> places;
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];
};

// The arguments with arrays that are parameters of their own.
__device__ Scoring<true> with_arrays(
    const Scoring<true>& given, ScoreParams& params, uint32_t* bits, int32_t* listed) {
  params = given.params;
  params.mask_bits = bits, params.tile_steps = listed;
  return {params, given.bias_map};
}
__device__ Scoring<false> with_arrays(const Scoring<false>&, ScoreParams&, uint32_t*, int32_t*) {
  return {};
}

extern "C" __global__ void change(
    const __grid_constant__ AttnParams given,
    const int32_t* place,  // [4]: batch, head, first row; which step the last warp skips
    uint32_t* bits,        // [mask tiles, key_tiles, MASK_TILE_WORDS]
    int32_t* listed,       // [lists, 2 + key_tiles]
    const bias_t* bias,    // [1, 3, len_q], of BiasKind::ROWS
    const float* x,        // [BLOCK_Q, len_kv]
    float* S,              // [BLOCK_Q, len_kv], of steps that are taken
    int32_t* constants     // [6]
        SCORE_PARAMETERS) {
  __shared__ alignas(1024) SharedStorage smem;
  AttnParams p = given;
  p.bias = bias;
  ScoreParams params;
  const Scoring<SCORED> passed SCORE_ARGUMENTS;
  const Scoring<SCORED> scoring = with_arrays(passed, params, bits, listed);
  WorkTile tile{};
  tile.batch = place[0], tile.head = place[1], tile.q0 = place[2];
  if (thread_id() == 0) {
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(smem.full[s], 1);
      mbarrier_init(smem.empty[s], NUM_WARPS);
    }
    smem.places.init(NUM_WARPS);
    fence_mbarrier_init();
    const int sizes[] = {MASKED,     DENSE_BIAS, SCORES_UNEVEN,
                         BIAS_BYTES, MASK_BYTES, SCORE_STAGE_BYTES};
    for (int i = 0; i < 6; ++i) constants[i] = sizes[i];
  }
  __syncthreads();  // the barriers are initialised before anyone waits or arrives

  TileSteps<MASKED> steps(scoring, p, tile);
  const int count = MASKED ? steps.steps() : p.len_kv / BLOCK_KV;
  RingPosition<NUM_STAGES> at;
  if (warp_id() == NUM_WARPS) {  // the producer, one thread
    if (lane_id() != 0) return;
    ScoreLoads<SCORED> load;
    for (int i = 0; i < count; ++i, at.advance()) {
      const int step = MASKED ? steps.take() : i * BLOCK_KV;
      mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // its bits were read
      mbarrier_arrive_expect_tx(smem.full[at.stage], load.bytes(step));
      if constexpr (SCORED) load(scoring, smem.places, at.stage, smem.full[at.stage], tile, step);
    }
    return;
  }
  const int warp_row = warp_id() * ROWS, row = warp_row + lane_id() / 4, q = tile.q0 + row;
  ScoreChange<SCORED> change_scores;
  change_scores.begin(p, tile, q);
  for (int i = 0; i < count; ++i, at.advance()) {
    const int step = MASKED ? steps.take() : i * BLOCK_KV;
    const int first = row * p.len_kv + first_key(step) + lane_id() % 4 * 2;  // of score 0
    mbarrier_wait_parity(smem.full[at.stage], at.parity);  // bias and bits have arrived
    if (warp_id() == NUM_WARPS - 1 && i == place[3]) {
      change_scores.skip(smem.places);
      if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
      continue;
    }
    float S_acc[BLOCK_KV / 2];
#pragma unroll
    for (int j = 0; j < BLOCK_KV / 2; ++j)
      S_acc[j] = x[first + j / 2 % 2 * 8 * p.len_kv + j / 4 * 8 + j % 2];
    if (i % 2 == 0) {
      change_scores(
          scoring, smem.places, p, S_acc, at.stage, warp_row, q, step, smem.empty[at.stage]);
    } else {
      change_scores(scoring, smem.places, p, S_acc, at.stage, warp_row, q, step);
      __syncwarp();  // all lanes have read their bits
      if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
    }
#pragma unroll
    for (int j = 0; j < BLOCK_KV / 2; ++j)
      S[first + j / 2 % 2 * 8 * p.len_kv + j / 4 * 8 + j % 2] = S_acc[j];
  }
}
