// largest_keys -- the most important keys of a head: a mark for each key, and the rising places of
//                 kept keys.
//
// Idea         A radix select. Numbers of at least 0 have the order of their bits, with NaN above
//              all. Four passes find the least kept number byte by byte. Each counts the next byte
//              of all numbers that match it so far. Then each warp goes through a part of the keys
//              in order. The counts of the warps before give the places of its keys.
// Kept simple  A block to a head, whatever its length: the passes read from the L1 and L2 caches.
// Rounding     none
// Mirror       cupyattn.diffusion.ranking.largest_of_rows, to the bit: of equal ones the later
// Bound        none is needed
#include "prims/config.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct LargestParams {
  const uint32_t* importance;  // [heads, len_kv], bits of floats, 0 or more, or NaN
  bool* kept;                  // [heads, len_kv]
  int32_t* places;             // [heads, count], rising
  int32_t len_kv;
  int32_t count;  // 1 to len_kv
};

constexpr int DIGIT_BITS = 8;
constexpr int DIGITS = 1 << DIGIT_BITS;
constexpr int LANE_DIGITS = DIGITS / WARP_SIZE;  // that a lane looks through

// Counts, in a part of the keys, of numbers above the least kept number, and equal to it.
struct Counts {
  int greater, ties;
};

// Sum over the lanes before this one.
__device__ __forceinline__ int sum_before(int x) {
  int sum = x;
#pragma unroll
  for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
    const int other = __shfl_up_sync(FULL_WARP, sum, offset);
    if (lane_id() >= offset) sum += other;
  }
  return sum - x;
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void largest_keys(
    const __grid_constant__ LargestParams p) {
  __shared__ int histogram[DIGITS];
  __shared__ uint32_t found;  // known bits of the least kept number
  __shared__ int wanted;      // of the numbers that share these bits, the largest
  __shared__ Counts of_warp[NUM_WARPS];
  const int64_t head = blockIdx.x;
  const uint32_t* importance = p.importance + head * p.len_kv;  // [len_kv]
  bool* kept = p.kept + head * p.len_kv;                        // [len_kv]
  int32_t* places = p.places + head * p.count;                  // [count]
  if (thread_id() == 0) found = 0, wanted = p.count;

  uint32_t known = 0;  // mask of the bits that are known
  for (int shift = 32 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
    for (int i = thread_id(); i < DIGITS; i += NUM_THREADS) histogram[i] = 0;
    __syncthreads();  // the counts are zero, the bits found are visible
    const uint32_t prefix = found;
#pragma unroll 4
    for (int key = thread_id(); key < p.len_kv; key += NUM_THREADS)
      if (const uint32_t bits = importance[key]; (bits & known) == prefix)
        atomicAdd(&histogram[bits >> shift & (DIGITS - 1)], 1);
    __syncthreads();  // every number is counted before the digit is looked for
    if (warp_id() == 0) {
      // From the largest digit down: lane 0 has the last LANE_DIGITS.
      const int first = DIGITS - 1 - lane_id() * LANE_DIGITS;
      int own = 0;
#pragma unroll
      for (int i = 0; i < LANE_DIGITS; ++i) own += histogram[first - i];
      const int above = sum_before(own), rest = wanted - above;
      __syncwarp();  // all have read `wanted` before one writes it
      if (rest > 0 && rest <= own) {
        int digit = first, left = rest;
        while (left > histogram[digit]) left -= histogram[digit--];
        found = prefix | uint32_t(digit) << shift;
        wanted = left;
      }
    }
    known |= uint32_t(DIGITS - 1) << shift;
    __syncthreads();  // the digit is visible before the counts become zero
  }

  // Warps take parts of the keys, whole accesses of a warp each.
  const uint32_t least = found;
  const int part = round_up(ceil_div(p.len_kv, NUM_WARPS), WARP_SIZE);
  const int64_t begin = int64_t(warp_id()) * part, end = min(int64_t(p.len_kv), begin + part);
  Counts own = {};
#pragma unroll 4
  for (int64_t key = begin + lane_id(); key < end; key += WARP_SIZE) {
    const uint32_t bits = importance[key];
    own.greater += bits > least, own.ties += bits == least;
  }
#pragma unroll
  for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) {
    own.greater += __shfl_xor_sync(FULL_WARP, own.greater, offset);
    own.ties += __shfl_xor_sync(FULL_WARP, own.ties, offset);
  }
  if (lane_id() == 0) of_warp[warp_id()] = own;
  __syncthreads();  // the counts of all warps are visible before they are added up
  Counts before = {};
  int ties = 0;  // of all warps
#pragma unroll 1
  for (int warp = 0; warp < NUM_WARPS; ++warp) {
    if (warp < warp_id())
      before.greater += of_warp[warp].greater, before.ties += of_warp[warp].ties;
    ties += of_warp[warp].ties;
  }
  const int dropped = ties - wanted;  // ties, the first of them
  const uint32_t lanes_before = (1u << lane_id()) - 1;
#pragma unroll 2
  for (int64_t first = begin; first < end; first += WARP_SIZE) {
    const int64_t key = first + lane_id();
    const bool valid = key < end;
    const uint32_t bits = valid ? importance[key] : 0;
    const bool is_greater = valid && bits > least, is_tie = valid && bits == least;
    const uint32_t greater = __ballot_sync(FULL_WARP, is_greater);
    const uint32_t tied = __ballot_sync(FULL_WARP, is_tie);
    const int greater_before = before.greater + __popc(greater & lanes_before);
    const int ties_before = before.ties + __popc(tied & lanes_before);
    const bool keeps = is_greater || (is_tie && ties_before >= dropped);
    if (valid) kept[key] = keeps;
    if (keeps) places[greater_before + max(0, ties_before - dropped)] = key;
    before.greater += __popc(greater), before.ties += __popc(tied);
  }
}
