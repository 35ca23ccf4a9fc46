// step_bits.cuh -- which keys of a step query rows attend to, in the Hopper forms of fa_int8. This
// follows from their places and, without softcap and bias, from the bits of a mask. Such a mask
// does not change numbers, so the softmax of a plain kernel takes the integers of its steps. The
// softmax treats a mixed step like a step that is masked by place.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/params.cuh"
#include "prims/score/mask_bits.cuh"
#include "prims/score/score.cuh"
#include "prims/score/score_hook.cuh"

// SCORED stands for a mask alone.
constexpr bool MASK_ALONE = MASKED && !SOFTCAP && !BIAS;
// Softcap or bias change the scores (scored_step.cuh).
constexpr bool SCORES_CHANGE = SCORED && !MASK_ALONE;

// The first steps of a tile may be whole: a mask of keys admits every key, and no place masks any.
// Then the softmax does not need their places.
// NOTE: not at HEAD_DIM 128, where products are longer: 0.99 of the speed.
constexpr bool WHOLE_STEPS =
    MASK_ALONE && MASK_KIND == MaskKind::KEYS && HEAD_DIM <= 64 && !(CAUSAL || WINDOW || VARLEN);

// The bits of a step, which came with its K; none if MASK_ALONE is false.
template <bool>
struct StepBits {
  __device__ __forceinline__ void admit() {}
  __device__ __forceinline__ void load(
      const ScorePlaces<SCORED>&, const AttnParams&, int, int, int, int) {}
  // Whether every score of the step is admitted, like ScoreMask::admits_all.
  __device__ __forceinline__ bool admit_all(
      const AttnParams& p, int q, int kv0, int unmasked) const {
    return ScoreMask::admits_all(p, q, kv0, unmasked);
  }
};
template <>
struct StepBits<true> {
  uint32_t bits[2];  // by row of the lane; all ones in a step that is not mixed
  bool mixed;

  // Every key: of a step that is not mixed.
  __device__ __forceinline__ void admit() {
    bits[0] = bits[1] = ~0u;
    mixed = false;
  }
  // By a whole warp, before it frees the stage of K. `warp_row` is the first of its 16 rows, `q`
  // the first of this lane's two.
  __device__ __forceinline__ void load(
      const ScorePlaces<true>& places, const AttnParams& p, int stage, int warp_row, int q,
      int step) {
    admit();
    mixed = is_mixed(step);
    if (mixed) load_mask(bits, places.bits[stage], warp_row);
    // NOTE: all rows of a warp raise M together. Rows past a sequence have scores of 0, and keep
    // every key regardless of their mask.
#pragma unroll
    for (int h = 0; VARLEN && h < 2; ++h)
      if (q + h * 8 >= p.len_q) bits[h] = ~0u;
  }
  __device__ __forceinline__ bool admit_all(
      const AttnParams& p, int q, int kv0, int unmasked) const {
    return !mixed && ScoreMask::admits_all(p, q, kv0, unmasked);
  }
};

// Which scores of a lane are admitted, by place and by bits, like ScoreMask by place.
// NOTE: these are types with a constructor, because functions that return a mask would change the
// machine code of plain kernels.
template <bool>
struct StepMask : ScoreMask {
  __device__ __forceinline__ StepMask(const AttnParams& p, int q, int kv0, const StepBits<false>&)
      : ScoreMask(p, q, kv0) {}
};
template <>
struct StepMask<true> {
  uint32_t admitted[2];  // by row, a bit for each score

  __device__ __forceinline__
  StepMask(const AttnParams& p, int q, int kv0, const StepBits<true>& step) {
    const ScoreMask place(p, q, kv0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      admitted[h] = step.bits[h] & bits_below(place.end[h]);
      if (WINDOW) admitted[h] &= ~bits_below(place.begin[h]);
    }
  }
  __device__ __forceinline__ bool admits(int i) const { return is_admitted(admitted, i); }
  // Whether any score from `first` to `last`, two scores of one row, is admitted.
  __device__ __forceinline__ bool admits_any(int first, int last) const {
    const uint32_t before = (1u << bit_of(first)) - 1, until = (2u << bit_of(last)) - 1;
    return admitted[first / 2 % 2] & until & ~before;
  }
  __device__ __forceinline__ static int bit_of(int i) { return i / 4 * 2 + i % 2; }
};

// Which halves of P_frag's registers belong to admitted keys: all ones in such a half, and in every
// half if a step has no bits. Register i holds the scores 2 i and 2 i + 1.
template <bool>
struct AdmittedPairs {
  AdmittedPairs() = default;
  __device__ __forceinline__ explicit AdmittedPairs(const StepMask<false>&) {}
  __device__ __forceinline__ uint32_t operator()(int) const { return ~0u; }
};
template <>
struct AdmittedPairs<true> {
  uint32_t bits[2][8];  // of a row: bit s, s + 8, ... at the top of a byte

  __device__ __forceinline__ explicit AdmittedPairs(const StepMask<true>& mask) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int s = 0; s < 8; ++s) bits[h][s] = mask.admitted[h] << (7 - s);
  }
  __device__ __forceinline__ uint32_t operator()(int i) const {
    const int bit = StepMask<true>::bit_of(2 * i);
    return prmt(bits[i % 2][bit % 8], bits[i % 2][bit % 8 + 1], 0xcc88 + bit / 8 * 0x1111);
  }
};
