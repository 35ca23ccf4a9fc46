// producer.cuh -- S1 and S2 of the Hopper forms of fa_int8: rings of stages, and the thread that
// fills them, tile after tile. A form defines the parts of tiles, and the contents of a stage.
#pragma once

#include "prims/codes/quantize_q.cuh"
#include "prims/config.cuh"
#include "prims/instructions/mbarrier.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/io/varlen.cuh"
#include "prims/params.cuh"
#include "prims/schedule/pieces.cuh"
#include "prims/schedule/work_tile.cuh"
#include "prims/score/score.cuh"
#include "prims/score/score_hook.cuh"
#include "prims/score/step_scores.cuh"
#include "sm90/int8/warpgroups.cuh"

// The barriers of a ring. A stage is full when so many threads and the bytes that they announced
// have arrived. It is empty when one lane of each of so many warps has arrived.
template <int STAGES>
__device__ __forceinline__ void init_ring(
    Mbarrier (&full)[STAGES], int threads, Mbarrier (&empty)[STAGES], int warps) {
  for (int s = 0; s < STAGES; ++s) {
    mbarrier_init(full[s], threads);
    mbarrier_init(empty[s], warps);
  }
}

// The parts of tiles that blocks take, by index: whole tiles,
struct WholeTiles {
  struct Part {
    int tile;
    __device__ __forceinline__ void narrow(WorkTile&, int&) const {}
  };
  __device__ __forceinline__ Part operator()(int index) const { return {index}; }
};
// or, if tiles are alike, pieces of the tiles of the last wave.
struct CutTiles {
  struct Part : Piece {
    using Piece::Piece;
    // Cuts a tile to the steps of the piece, beginning at step `number`.
    __device__ __forceinline__ void narrow(WorkTile& whole, int& number) const {
      number = first * BLOCK_KV;
      whole.steps = steps, whole.first = first, whole.slot = slot;
    }
  };
  const PieceParams& pieces;
  __device__ __forceinline__ Part operator()(int index) const {
    return {pieces, index, int(blockIdx.x), int(gridDim.x)};
  }
};
__device__ __forceinline__ auto cut_if_alike(const PieceParams& pieces) {
  if constexpr (UNEVEN)
    return WholeTiles{};
  else
    return CutTiles{pieces};
}

// The step of a tile for which a stage is loaded.
struct KeyStep {
  int index;  // number of the step in the tile
  int kv0;    // its first key
  bool kept;  // false: it has no key, and kv0 lies behind the last one
  int len_kv;
  int score_bytes;  // that arrive with its K for softcap, bias and mask
  int whole;        // the first steps of the tile of which a mask admits every key
};

// K of the step whose first key is kv0.
template <int BYTES>
__device__ __forceinline__ void load_K(
    int8_t (&K)[CODE_BOXES][BYTES], const TensorMap& K_map, Mbarrier& full, const WorkTile& tile,
    int kv0) {
  for (int b = 0; b < CODE_BOXES; ++b)
    cp_async_bulk_tensor_4d(
        K[b], K_map, full, b * BOX_BYTES, tile.first_key() + kv0, tile.head_kv, tile.entry());
}

// Loads Q of every tile, and for every step the scales of its keys. Once `empty` has completed,
// `load_stage` loads K, V and the data beside V into the stage. Bias and bits of a mask follow, and
// arrive at `full` as K does. Value is the storage type of V.
template <typename Value, typename SharedStorage, typename TileParts, typename LoadStage>
__device__ __forceinline__ void produce(
    SharedStorage& smem, Mbarrier (&full)[NUM_STAGES], Mbarrier (&empty)[NUM_STAGES],
    const AttnParams& call, const QuantParams& quant, const TensorMap& Q_map,
    const ScheduleParams& schedule, const Scoring<SCORED>& scoring, TileParts part_of,
    LoadStage load_stage) {
  TileRange tiles(call);
  RingPosition<Q_STAGES> Q_at;
  RingPosition<NUM_STAGES> at;  // of K and V
  ScoreLoads<SCORED> load_scores;
  int index = blockIdx.x;
  while (true) {
    const auto part = part_of(index);
    if (!tiles.reach(call, part.tile)) {
      mbarrier_wait_parity(smem.Q_empty[Q_at.stage], Q_at.parity ^ 1);  // the last was read
      smem.tile[Q_at.stage] = {{}, -1, 0, 0, 0, 0, -1};
      mbarrier_arrive(smem.Q_full[Q_at.stage]);
      return;
    }
    const Sequences<VARLEN> sequences(call, tiles.sequence);
    const auto& p = of_sequences<int8_t, Value>(call, sequences);
    WorkTile tile = work_tile<UNEVEN, sizeof(int8_t) + sizeof(Value)>(
        p, sequences, tiles.sequence, part.tile - tiles.first);
    const KeptKeys keys(
        p, tile.batch, tile.head, tile.q0, kv_begin(p, tile.q0), kv_end(p, tile.q0, BLOCK_Q));
    int number = round_down(keys.begin, BLOCK_KV);  // of a step, as KeptKeys counts
    tile.steps = max(1, ceil_div(keys.end - number, BLOCK_KV));
    TileSteps<MASKED> listed(scoring, p, tile);
    if (MASKED) tile.steps = listed.steps();
    part.narrow(tile, number);
    // S1 load Q
    mbarrier_wait_parity(smem.Q_empty[Q_at.stage], Q_at.parity ^ 1);  // this Q was read
    smem.tile[Q_at.stage] = tile;
    mbarrier_arrive_expect_tx(smem.Q_full[Q_at.stage], sizeof(smem.Q[0]));
    for (int b = 0; b < Q_BOXES; ++b)
      cp_async_bulk_tensor_4d(
          smem.Q[Q_at.stage][b], Q_map, smem.Q_full[Q_at.stage], b * Q_BOX_COLS,
          tile.first_row() + tile.q0, tile.head, tile.entry());
    Q_at.advance();
    // S2 load K, V
    load_stage.begin(call, tile);
    const float* K_scale = quant.K_scale  // [ceil(len_kv / GROUP_KV)]
                           + tile.batch * quant.K_scale_stride_batch +
                           tile.head_kv * quant.K_scale_stride_head +
                           first_scale<GROUP_KV>(call.cu_seqlens_k, tile.batch);
    const int steps = tile.steps + LoadStage::V_STEPS;
    const auto ask = [&] {  // which tile is next
      return int(UNEVEN ? gridDim.x + atomicAdd(schedule.next_tile, 1) : index + gridDim.x);
    };
    int next = 0;
    for (int step = 0; step < steps; ++step, number += BLOCK_KV, at.advance()) {
      // NOTE: requested here, the tile arrives while the last step waits for its stage. Causal
      // calls that load nothing else would be slower: 0.98 of the speed at head_dim 256 in FP8.
      if (SCORES_UNEVEN && step == steps - 1) next = ask();
      // NOTE: rows that keep no block take one step behind the last key, which is zeros. A box of
      // codes of V must begin at a multiple of 16 bytes, or it is an illegal instruction.
      bool kept = number < keys.end;
      int kv0 = BLOCK_MASK && !kept ? round_up(p.len_kv, BLOCK_KV) : keys.key(number);
      const int step_word = MASKED ? listed.take() : kv0;
      if (MASKED) kv0 = first_key(step_word), kept = kv0 < p.len_kv;
      const bool has_K = step < tile.steps;
      float scale[SCALES];
      load_scales(scale, K_scale, kv0, p.len_kv);
      mbarrier_wait_parity(empty[at.stage], at.parity ^ 1);  // this stage was read
      if (LISTED) smem.step[at.stage] = step_word;
      copy_scales(smem.K_scale[at.stage], scale);
      load_stage(
          tile, at,
          KeyStep{
              step, kv0, kept, p.len_kv, has_K ? load_scores.bytes(step_word) : 0, listed.whole()});
      if (SCORED && has_K)
        load_scores(scoring, smem.places, at.stage, full[at.stage], tile, step_word);
    }
    index = SCORES_UNEVEN ? next : ask();
  }
}
