// score_hook.cuh -- softcap, bias and masks of a Hopper form. The producer loads data beside K, and
// the consumers change a step's scores before the softmax. A kernel that is not SCORED compiles all
// of this to nothing.
//
// A form holds `ScorePlaces` in its shared storage and initialises them. It names its arguments
// (`const Scoring<SCORED> scoring SCORE_ARGUMENTS;`, SCORE_PARAMETERS last in the kernel's list).
// Its producer takes steps from `TileSteps` and loads with `ScoreLoads`. Its consumers call
// `ScoreChange` when the scores of a step have arrived.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mbarrier.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/params.cuh"
#include "prims/schedule/work_tile.cuh"
#include "prims/score/mask_bits.cuh"
#include "prims/score/score_bias.cuh"
#include "prims/score/softcap.cuh"

constexpr bool MASKED = SCORED && MASK_KIND != MaskKind::NONE;
constexpr bool DENSE_BIAS = SCORED && BIAS_KIND == BiasKind::DENSE;
// Tiles differ in work or share a bias, so blocks take the next tile when they are free.
constexpr bool SCORES_UNEVEN = MASKED || DENSE_BIAS;

// The copy engine fetches 256 bytes of a row into L2 at a time. If a step takes all of them, data
// that is read once may leave first. If it takes 128, the other half would be evicted before its
// step.
constexpr bool WHOLE_FETCHES = BIAS_BOXES % 2 == 0;

// Bytes that arrive with K of a step: bias, and bits if the step is mixed.
constexpr int BIAS_BYTES = BIAS_BOXES * BIAS_BOX_ROWS * 128;
constexpr int MASK_BYTES = MASKED ? MASK_TILE_WORDS * 4 : 0;
// Shared memory of a stage.
constexpr int SCORE_STAGE_BYTES = SCORED ? BIAS_BOXES * BIAS_BOX_PITCH + MASK_BYTES : 0;

static_assert(
    !(SCORED && STACKED) || (MASK_KIND != MaskKind::ROWS && BIAS_KIND != BiasKind::DENSE &&
                             BIAS_KIND != BiasKind::ROWS),
    "stacked heads take a mask or bias that is the same for all of them and their rows");
// The arguments of a kernel; none of a plain one.
template <bool>
struct Scoring {};
template <>
struct Scoring<true> {
  const ScoreParams& params;
  const TensorMap& bias_map;
};

// Places in shared memory. Bits lie in the stage of their K. The bias has a separate ring, because
// the last V of a tile takes a stage without a bias.
template <bool>
struct ScorePlaces {
  __device__ __forceinline__ void init(int) {}
};
template <>
struct ScorePlaces<true> {
  alignas(1024) unsigned char bias[NUM_STAGES][BIAS_IN_RING ? BIAS_BOXES * BIAS_BOX_PITCH : 1];
  alignas(128) uint32_t bits[NUM_STAGES][MASKED ? MASK_TILE_WORDS : 1];
  Mbarrier bias_empty[NUM_STAGES];

  // Called by one thread; `warps` is the number of consumer warps.
  __device__ __forceinline__ void init(int warps) {
    for (int s = 0; s < NUM_STAGES; ++s) mbarrier_init(bias_empty[s], warps);
  }
};

// ---- the producer ----------------------------------------------------------------------------

// The steps of a tile of query rows that a mask lists. A plain tile has no list.
template <bool>
struct TileSteps {
  __device__ __forceinline__ TileSteps(const Scoring<SCORED>&, const AttnParams&, const WorkTile&) {
  }
  __device__ __forceinline__ int steps() const { return 0; }
  __device__ __forceinline__ int whole() const { return 0; }
  __device__ __forceinline__ int take() { return 0; }
};
template <>
struct TileSteps<true> {
  ListedSteps listed;
  int number = 0, next;

  __device__ __forceinline__
  TileSteps(const Scoring<true>& scoring, const AttnParams& p, const WorkTile& tile)
      : listed(
            scoring.params, tile.batch, tile.head, tile.q0, kv_begin(p, tile.q0),
            kv_end(p, tile.q0, BLOCK_Q)),
        next(listed[0]) {}
  __device__ __forceinline__ int steps() const { return listed.steps(); }
  // Number of first steps that admit every key.
  __device__ __forceinline__ int whole() const { return listed.whole(); }
  // The next step. Meanwhile the step after it is being loaded.
  __device__ __forceinline__ int take() {
    const int step = next;
    next = listed[++number];
    return step;
  }
};

// Loads beside K of a step.
template <bool>
struct ScoreLoads {
  __device__ __forceinline__ int bytes(int) const { return 0; }
  __device__ __forceinline__ void operator()(
      const Scoring<false>&, ScorePlaces<false>&, int, Mbarrier&, const WorkTile&, int) {}
};
template <>
struct ScoreLoads<true> {
  RingPosition<NUM_STAGES> bias_at;

  // Number of bytes that `full` must expect.
  __device__ __forceinline__ int bytes(int step) const {
    return BIAS_BYTES + (is_mixed(step) ? MASK_BYTES : 0);
  }
  // Loads them, once the stage of K has been read. K goes first, because its stage is free before
  // the place of the bias.
  __device__ __forceinline__ void operator()(
      const Scoring<true>& scoring, ScorePlaces<true>& places, int stage, Mbarrier& full,
      const WorkTile& tile, int step) {
    const ScoreParams& s = scoring.params;
    const int kv0 = first_key(step);
    if (is_mixed(step)) {
      const int64_t place =
          mask_tile(s, tile.batch, tile.head, tile.q0) * s.key_tiles + kv0 / BLOCK_KV;
      cp_async_bulk(places.bits[stage], s.mask_bits + place * MASK_TILE_WORDS, MASK_BYTES, full);
    }
    if constexpr (BIAS_IN_RING) {
      mbarrier_wait_parity(places.bias_empty[bias_at.stage], bias_at.parity ^ 1);
      for (int b = 0; b < BIAS_BOXES; ++b) {
        unsigned char* box = places.bias[bias_at.stage] + b * BIAS_BOX_PITCH;
        const int key = kv0 + b * BIAS_BOX_COLS, row = BIAS_KIND == BiasKind::KEYS ? 0 : tile.q0;
        const int head = tile.head * s.bias_head, batch = tile.batch * s.bias_batch;
        if (DENSE_BIAS && WHOLE_FETCHES && s.bias_once)
          cp_async_bulk_tensor_4d_evict_first(box, scoring.bias_map, full, key, row, head, batch);
        else
          cp_async_bulk_tensor_4d(box, scoring.bias_map, full, key, row, head, batch);
      }
      bias_at.advance();
    }
  }
};

// ---- the consumers ---------------------------------------------------------------------------

// Softcap, bias and mask of the scores of a step, in this order.
template <bool>
struct ScoreChange {
  __device__ __forceinline__ void begin(const AttnParams&, const WorkTile&, int) {}
  __device__ __forceinline__ void operator()(
      const Scoring<false>&, ScorePlaces<false>&, const AttnParams&, float (&)[BLOCK_KV / 2], int,
      int, int, int, Mbarrier& empty) {
    if (lane_id() == 0) mbarrier_arrive(empty);
  }
  __device__ __forceinline__ void operator()(
      const Scoring<false>&, ScorePlaces<false>&, const AttnParams&, float (&)[BLOCK_KV / 2], int,
      int, int, int) {}
  __device__ __forceinline__ void skip(ScorePlaces<false>&) {}
};
template <>
struct ScoreChange<true> {
  RingPosition<NUM_STAGES> bias_at;
  float row_bias[2];  // BiasKind::ROWS: of this lane's two rows

  // A tile begins; `q` is the first of the lane's two rows.
  __device__ __forceinline__ void begin(const AttnParams& p, const WorkTile& tile, int q) {
    if constexpr (BIAS_KIND == BiasKind::ROWS) {
      const BiasInMemory bias(p, tile.batch, tile.head);
      row_bias[0] = bias.at(q, 0), row_bias[1] = bias.at(q + 8, 0);
    }
  }
  // The step whose K is in `stage`, which this call frees (`empty`). `warp_row` is the first of the
  // warp's 16 rows in the tile, `q` the first of this lane's two rows.
  __device__ __forceinline__ void operator()(
      const Scoring<true>& scoring, ScorePlaces<true>& places, const AttnParams& p,
      float (&S_acc)[BLOCK_KV / 2], int stage, int warp_row, int q, int step, Mbarrier& empty) {
    uint32_t bits[2];
    if (is_mixed(step)) load_mask(bits, places.bits[stage], warp_row);
    if constexpr (MASKED) __syncwarp();  // all lanes have read their bits
    if (lane_id() == 0) mbarrier_arrive(empty);
    change(scoring.params, places, p, S_acc, warp_row, q, step, bits);
  }
  // The same for a step whose stage is read later: its reader frees it.
  __device__ __forceinline__ void operator()(
      const Scoring<true>& scoring, ScorePlaces<true>& places, const AttnParams& p,
      float (&S_acc)[BLOCK_KV / 2], int stage, int warp_row, int q, int step) {
    uint32_t bits[2];
    if (is_mixed(step)) load_mask(bits, places.bits[stage], warp_row);
    change(scoring.params, places, p, S_acc, warp_row, q, step, bits);
  }
  // Skips a step that this warp does not take, once it has arrived.
  __device__ __forceinline__ void skip(ScorePlaces<true>& places) {
    if constexpr (BIAS_IN_RING) {
      if (lane_id() == 0) mbarrier_arrive(places.bias_empty[bias_at.stage]);
      bias_at.advance();
    }
  }

 private:
  __device__ __forceinline__ void change(
      const ScoreParams& s, ScorePlaces<true>& places, const AttnParams& p,
      float (&S_acc)[BLOCK_KV / 2], int warp_row, int q, int step, const uint32_t (&bits)[2]) {
    const bool mixed = is_mixed(step);
    if constexpr (SOFTCAP) softcap(s, S_acc);
    if constexpr (BIAS_KIND == BiasKind::ROWS) add_row_bias(S_acc, row_bias, s.bias_factor);
    if constexpr (BIAS_IN_RING) {
      const unsigned char* boxes = places.bias[bias_at.stage];
      if constexpr (BIAS_KIND == BiasKind::KEYS)
        add_key_bias<bias_t>(S_acc, boxes, s.bias_factor);
      else
        add_dense_bias<bias_t>(S_acc, boxes, warp_row, s.bias_factor);
      __syncwarp();  // all lanes have read the bias
      if (lane_id() == 0) mbarrier_arrive(places.bias_empty[bias_at.stage]);
      bias_at.advance();
    }
    if (mixed) apply_mask(S_acc, bits);
    // NOTE: all rows of a warp raise M together. Rows past a sequence have scores of 0, regardless
    // of mask and bias.
    if (VARLEN && (MASKED || BIAS) && q - lane_id() / 4 + 16 > p.len_q) {
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 2; ++i)
        if (q + i / 2 % 2 * 8 >= p.len_q) S_acc[i] = 0.0f;
    }
  }
};
