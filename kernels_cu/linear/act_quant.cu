// act_quant -- activations to INT8 codes, with a float scale for every 128 adjacent channels of a
//              row. With OUTLIERS, some channels are kept in 16 bits.
//
// Idea         Memory decides, as in quantize.cu. A group of 128 numbers fits in the registers of
//              LANES neighbouring lanes, with few accesses each. So nothing is read twice, and
//              shared memory is not needed. A lane holds PASSES groups, 64 bytes of them, and all
//              its loads are in flight before it reads the first. One lane computes each scale:
//              with divisions in every lane, issue slots would be the limit, not memory.
// Kept simple  A channel kept in 16 bits counts as 0 in its group, so others set the scale.
// Rounding     R1 scale, inverse, code: each operation rounded once (quant.cuh); kept channels are
//              rounded to outlier_t
// Mirror       cupyattn.reference.act_quant.quantize_rows, to the bit
// Bound        docs/MATH_REFERENCE.md [L14]: half a scale
#include "prims/config.cuh"
#include "prims/codes/gemm.cuh"
#include "prims/codes/quant.cuh"
#include "prims/instructions/griddepcontrol.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct ActQuantParams {
  const void* X;         // [rows, channels]
  int8_t* codes;         // [rows, channels], contiguous
  float* scales;         // [rows, ceil(channels / SLICE)], contiguous
  void* kept;            // [rows, kept_stride] of outlier_t; not written unless OUTLIERS
  const int32_t* place;  // [channels], where a channel is kept, -1: it is not; not read likewise
  int64_t X_stride;
  int32_t rows;
  int32_t channels;
  int32_t outliers;     // channels that are kept
  int32_t kept_stride;  // the rest of a row is zeros
};

constexpr int LANES = SLICE / VEC < WARP_SIZE ? SLICE / VEC : WARP_SIZE;  // per group
constexpr int LANE_ACCESSES = SLICE / (LANES * VEC);                      // per lane and group
constexpr int LANE_BYTES = LANE_ACCESSES * VEC * int(sizeof(elem_t));     // the same
constexpr int PASSES = LANE_BYTES < 64 ? 64 / LANE_BYTES : 1;  // 8 at most: fewer than LANES
constexpr int GROUPS_PER_PASS = NUM_THREADS / LANES;

// First channel of this lane's access to a group of a row.
__device__ __forceinline__ int channel_of(int group, int access) {
  return group * SLICE + (access * LANES + thread_id() % LANES) * VEC;
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void act_quant(
    const __grid_constant__ ActQuantParams p) {
  griddepcontrol_launch_dependents();  // a product may begin
  const int lane = thread_id() % LANES;
  const int row_groups = ceil_div(p.channels, SLICE);
  // NOTE: the host ensures that 32 bits suffice to count groups.
  const uint32_t first = blockIdx.x * (PASSES * GROUPS_PER_PASS) + thread_id() / LANES;
  int row[PASSES], group[PASSES];  // group of the row
  Words<elem_t, VEC> x[PASSES][LANE_ACCESSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    if (pass == 0) {
      row[pass] = first / row_groups, group[pass] = first % row_groups;
    } else {
      row[pass] = row[pass - 1], group[pass] = group[pass - 1] + GROUPS_PER_PASS;
      while (group[pass] >= row_groups) group[pass] -= row_groups, ++row[pass];
    }
    const elem_t* X = static_cast<const elem_t*>(p.X) + row[pass] * p.X_stride;  // [channels]
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      x[pass][a] = {};
      const int channel = channel_of(group[pass], a);
      if (row[pass] < p.rows && channel < p.channels)
        x[pass][a] = *reinterpret_cast<const Words<elem_t, VEC>*>(X + channel);
    }
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) x[pass][a].use_from_here();

  // The largest magnitude of every group, and flags of this lane's kept numbers.
  uint32_t absmax[PASSES], kept[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    absmax[pass] = kept[pass] = 0;
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      const int channel = channel_of(group[pass], a);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        uint32_t magnitude = magnitude_bits(x[pass][a].element(j));
        if constexpr (OUTLIERS)
          if (row[pass] < p.rows && channel < p.channels)
            if (const int place = p.place[channel + j]; place >= 0) {
              static_cast<outlier_t*>(p.kept)[int64_t(row[pass]) * p.kept_stride + place] =
                  from_float<outlier_t>(x[pass][a].element(j));
              kept[pass] |= 1u << (a * VEC + j);
              magnitude = 0;
            }
        absmax[pass] = max(absmax[pass], magnitude);
      }
    }
    absmax[pass] = shfl_max<LANES>(absmax[pass]);
  }

  // Lane i of a group makes the scale of pass i: a division takes some twenty instructions.
  uint32_t own_absmax = absmax[0];
#pragma unroll
  for (int pass = 1; pass < PASSES; ++pass)
    if (lane == pass) own_absmax = absmax[pass];
  const Scale own = scale_of_absmax(own_absmax);  // R1

#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const float inverse = __shfl_sync(FULL_WARP, own.inverse, pass, LANES);
    if (row[pass] >= p.rows) continue;
    if (lane == pass) p.scales[int64_t(row[pass]) * row_groups + group[pass]] = own.scale;
    int8_t* codes = p.codes + int64_t(row[pass]) * p.channels;  // [channels]
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      const int channel = channel_of(group[pass], a);
      int c[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        c[j] = code_s8(x[pass][a].element(j), inverse);  // R1
        if (OUTLIERS && (kept[pass] >> (a * VEC + j) & 1)) c[j] = 0;
      }
      if (channel < p.channels) store_s8(codes + channel, c);
    }
    if constexpr (OUTLIERS)
      if (group[pass] == 0)
        for (int i = p.outliers + lane; i < p.kept_stride; i += LANES)
          static_cast<outlier_t*>(p.kept)[int64_t(row[pass]) * p.kept_stride + i] =
              from_float<outlier_t>(0.0f);
  }
}
