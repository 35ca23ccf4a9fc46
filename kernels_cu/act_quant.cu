// act_quant -- activations to INT8 codes, with a float scale for every 128 adjacent channels of a
//              row; with OUTLIERS, some channels are kept in 16 bits instead.
//
// Idea         Memory decides, as in quantize.cu, and a group is 128 numbers: it fits into the
//              registers of LANES neighbouring lanes, one access or a few to each, so nothing is
//              read twice and nobody meets in shared memory. A lane holds PASSES groups, 64 bytes
//              of them, and all of its loads are under way before the first is looked at.
// Kept simple  A channel that is kept is a 0 to its group: its scale is that of the others.
// Rounding     R1 scale, inverse, code: each operation rounded once (prims/quant.cuh); what is kept
//              is rounded to outlier_t
// Mirror       cupyattn.quant.blocks.quantize_rows, to the bit
// Bound        docs/MATH_REFERENCE.md, Q1: half a scale
#include "prims/config.cuh"
#include "prims/gemm.cuh"
#include "prims/quant.cuh"
#include "prims/warp.cuh"

// cupyattn/quant/activations.py packs it from one table of (name, type); a test compares the two.
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
constexpr int PASSES = LANE_BYTES < 64 ? 64 / LANE_BYTES : 1;
constexpr int GROUPS_PER_PASS = NUM_THREADS / LANES;

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void act_quant(
    const __grid_constant__ ActQuantParams p) {
  const int lane = thread_id() % LANES;
  const uint32_t row_groups = ceil_div(p.channels, SLICE);
  const int64_t first = int64_t(blockIdx.x) * (PASSES * GROUPS_PER_PASS) + thread_id() / LANES;
  int row[PASSES], col[PASSES];  // of this lane's first access
  Words<elem_t, VEC> x[PASSES][LANE_ACCESSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    // NOTE: the host sees to it that groups are counted in 32 bits.
    const uint32_t group = first + pass * GROUPS_PER_PASS;
    row[pass] = group / row_groups, col[pass] = group % row_groups * SLICE + lane * VEC;
    const elem_t* X = static_cast<const elem_t*>(p.X) + row[pass] * p.X_stride;  // [channels]
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      x[pass][a] = {};
      const int channel = col[pass] + a * LANES * VEC;
      if (row[pass] < p.rows && channel < p.channels)
        x[pass][a] = *reinterpret_cast<const Words<elem_t, VEC>*>(X + channel);
    }
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) x[pass][a].use_from_here();

#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const bool exists = row[pass] < p.rows;
    const int64_t row0 = int64_t(row[pass]) * p.channels;
    float value[LANE_ACCESSES][VEC];
    uint32_t absmax = 0;
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      const int channel = col[pass] + a * LANES * VEC;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        value[a][j] = x[pass][a].element(j);
        if constexpr (OUTLIERS) {
          const int place = exists && channel < p.channels ? p.place[channel + j] : -1;
          if (place >= 0) {
            static_cast<outlier_t*>(p.kept)[int64_t(row[pass]) * p.kept_stride + place] =
                from_float<outlier_t>(value[a][j]);
            value[a][j] = 0.0f;
          }
        }
        absmax = max(absmax, magnitude_bits(value[a][j]));
      }
    }
    const Scale scale = scale_of_absmax(shfl_max<LANES>(absmax));  // R1
    if (!exists) continue;
    if (lane == 0) p.scales[int64_t(row[pass]) * row_groups + col[pass] / SLICE] = scale.scale;
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a) {
      const int channel = col[pass] + a * LANES * VEC;
      int c[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) c[j] = code_s8(value[a][j], scale.inverse);  // R1
      if (channel < p.channels) store_s8(p.codes + row0 + channel, c);
    }
    if constexpr (OUTLIERS)
      if (col[pass] < SLICE)
        for (int i = p.outliers + lane; i < p.kept_stride; i += LANES)
          static_cast<outlier_t*>(p.kept)[int64_t(row[pass]) * p.kept_stride + i] =
              from_float<outlier_t>(0.0f);
  }
}
