// norm_quant -- rows normalised, modulated, activated and rotated, then INT8 codes and scales: what
//               a model does between two products, in one pass.
//
// Idea         Memory decides, so a row is read once and stays in registers until its codes are
//              written. A team of warps shares a row; a lane has CHUNKS runs of eight neighbouring
//              channels. The factors of every channel are made once for several rows. The next row
//              is on its way during the present one.
// Differs from row_quant.cu, which takes numbers unchanged, and rows of any length.
// Data flow    x -> mean, root mean square -> z -> y -> activation -> rotation -> largest
//              magnitude -> codes. Rotation turns runs of eight in registers, then numbers
//              of RADIX runs, which change lanes through shared memory once.
// Kept simple  A row has 32,768 channels at most.
// Rounding     N1 sums and their factors; N2 z, g, h and y; N3 activation; N4 each butterfly; R1
//              scale and code. But for N3, each operation is rounded once, and named.
// Mirror       cupyattn.reference.norm_quant.norm_quant_mirror, to the bit but for N3
// Bound        docs/MATH_REFERENCE.md [L82]
#include "prims/config.cuh"
#include "prims/codes/gemm.cuh"
#include "prims/codes/quant.cuh"
#include "prims/instructions/griddepcontrol.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct NormQuantParams {
  const void* X;       // [rows, CHANNELS] of elem_t; GLU: [rows, 2 CHANNELS]
  int8_t* codes;       // [rows, CHANNELS], contiguous
  float* scales;       // [rows, 1] or [rows, ceil(CHANNELS / SLICE)], contiguous
  const void* weight;  // [CHANNELS] of weight_t; null: ones
  const void* bias;    // [CHANNELS] of weight_t; null: zeros
  const void* scale;   // [ceil(rows / group_rows), CHANNELS] of modulation_t; null: zeros
  const void* shift;   // [ceil(rows / group_rows), CHANNELS] likewise
  int64_t X_stride;
  int64_t scale_stride;
  int64_t shift_stride;
  int32_t rows;
  int32_t group_rows;  // that share a row of scale and shift
  int32_t steps;       // rows of a team
  float eps;           // added to the mean square
};

constexpr int RUN = 8;                           // neighbouring channels of a lane
constexpr int TEAM_WARPS = NUM_WARPS / BLOCK_M;  // that share a row
constexpr int LANES = TEAM_WARPS * WARP_SIZE;    // the same
constexpr int CHUNKS = BLOCK_N / (LANES * RUN);  // runs of a lane
constexpr int RUN_ACCESSES = RUN / VEC;
constexpr float PER_CHANNEL = 1.0f / CHANNELS;

static_assert(
    TEAM_WARPS >= 1 && TEAM_WARPS * BLOCK_M == NUM_WARPS,
    "NUM_WARPS must be a multiple of BLOCK_M: as many warps for every row");
static_assert(
    CHUNKS >= 1 && CHUNKS * LANES * RUN == BLOCK_N && BLOCK_N >= CHANNELS,
    "BLOCK_N must be a multiple of 8 channels for every lane of a row, and hold the row");
static_assert(
    ROTATE == 0 || (ROTATE >= RUN && CHANNELS % ROTATE == 0), "ROTATE must divide CHANNELS");
static_assert(CHUNKS * RUN <= 32, "BLOCK_N must be at most 32 channels for every lane of a row");
static_assert(ROTATE == 0 || BY_ROW, "a rotated row has one scale");

// Rotation: word w of a row, of SPAN, meets the words that are a multiple of SPAN past it.
constexpr bool ROTATED = ROTATE != 0;
constexpr int RADIX = ROTATED ? ROTATE / RUN : RUN;
constexpr int SPAN = CHANNELS / RADIX;
constexpr int TASKS = ceil_div(SPAN, LANES);  // words of a lane

constexpr bool AFFINE = WEIGHTED || MODULATED;
// g and h take the signs of a rotation if no activation lies between.
constexpr bool SIGNS_IN_AFFINE = ROTATED && AFFINE && ACTIVATION == Activation::NONE;
// g and h are in shared memory, if it has room for them, and leave registers to more blocks.
constexpr bool AFFINE_IN_SHARED = AFFINE && NUM_THREADS <= 256;
constexpr int WIDE = 4;                    // numbers of an access to shared memory
constexpr int RUN_PARTS = 2 * RUN / WIDE;  // accesses to g and h of a run

struct SharedStorage {
  alignas(16) float affine[AFFINE_IN_SHARED ? CHUNKS * RUN_PARTS : 1]
                          [AFFINE_IN_SHARED ? NUM_THREADS : 1][WIDE];
  alignas(16) float row[ROTATED ? BLOCK_M : 1][ROTATED ? CHANNELS : 1];
  // Results of the warps for three reductions. Even and odd rows have separate places, so that a
  // warp that is ahead overwrites nothing that another has yet to read.
  uint32_t of_warp[2][3][NUM_WARPS];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

using Run = float[RUN];
using RunPart = Vec<float, WIDE>;

// First channel of run a of a thread.
__device__ __forceinline__ int channel_of(int a, int thread = thread_id()) {
  return (a * LANES + thread % LANES) * RUN;
}
// Whether a channel is one of the row.
__device__ __forceinline__ bool is_channel(int channel) {
  return BLOCK_N == CHANNELS || channel < CHANNELS;
}

// Synchronises all warps of a team.
__device__ __forceinline__ void team_sync() {
  if constexpr (TEAM_WARPS == 1) {
    __syncwarp();
  } else {
    __syncthreads();  // what every warp wrote to shared memory is visible
  }
}

// Neighbours among the lanes of a team added, then neighbours of the sums; every lane gets the sum.
__device__ __forceinline__ float team_sum(float x, uint32_t (&of_warp)[NUM_WARPS]) {
  x = shfl_sum_of_neighbours<WARP_SIZE>(x);
  if constexpr (TEAM_WARPS > 1) {
    if (lane_id() == 0) of_warp[warp_id()] = __float_as_uint(x);
    __syncthreads();  // the sums of all warps are visible
    const int first = warp_id() / TEAM_WARPS * TEAM_WARPS;
    float sums[TEAM_WARPS];
#pragma unroll
    for (int i = 0; i < TEAM_WARPS; ++i) sums[i] = __uint_as_float(of_warp[first + i]);
    x = sum_of_neighbours(sums);
  }
  return x;
}
__device__ __forceinline__ uint32_t team_max(uint32_t x, uint32_t (&of_warp)[NUM_WARPS]) {
  x = shfl_max<WARP_SIZE>(x);
  if constexpr (TEAM_WARPS > 1) {
    if (lane_id() == 0) of_warp[warp_id()] = x;
    __syncthreads();  // the maxima of all warps are visible
    const int first = warp_id() / TEAM_WARPS * TEAM_WARPS;
#pragma unroll
    for (int i = 0; i < TEAM_WARPS; ++i) x = max(x, of_warp[first + i]);
  }
  return x;
}

// The runs of a lane in the order of memory. Past the last row it repeats, past its channels are
// zeros.
struct Loaded {
  Words<elem_t, VEC> of[HALVES][CHUNKS][RUN_ACCESSES];

  __device__ __forceinline__ void load(const NormQuantParams& p, int row) {
    const elem_t* X =
        static_cast<const elem_t*>(p.X) + min(row, p.rows - 1) * p.X_stride + channel_of(0);
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
        for (int i = 0; i < RUN_ACCESSES; ++i) {
          const int past = a * LANES * RUN + i * VEC;  // channels past the first of this lane
          if (BLOCK_N != CHANNELS) of[half][a][i] = {};
          if (is_channel(channel_of(0) + past))
            of[half][a][i] =
                *reinterpret_cast<const Words<elem_t, VEC>*>(X + half * CHANNELS + past);
        }
  }
  __device__ __forceinline__ float element(int half, int a, int j) const {
    return of[half][a][j / VEC].element(j % VEC);
  }
};

// A run of a vector over the channels; `otherwise` if there is no vector, or no channel.
template <typename T>
__device__ __forceinline__ Vec<float, RUN> read_run(const T* x, int channel, float otherwise) {
  Vec<float, RUN> run;
#pragma unroll
  for (int j = 0; j < RUN; ++j) run.v[j] = otherwise;
  if (x == nullptr) return run;
  if constexpr (BY_EIGHT) {
    if (is_channel(channel)) run = read_eight(x + channel);
  } else {
#pragma unroll
    for (int j = 0; j < RUN; ++j)
      if (channel + j < CHANNELS) run.v[j] = to_float(x[channel + j]);
  }
  return run;
}

// Minus signs of the channels of a run before it is rotated, as sign bits. Channel j has one if an
// odd number of digits of its place in the group, in base 4, are 3. Without signs one channel of a
// group would gather the mean of all. With these, a row of the matrix sums to at most the root of
// its size, and of 128 to the root of twice that.
struct Signs {
  uint32_t half[2];  // of the first four channels but the last, and of the others likewise

  __device__ __forceinline__ explicit Signs(int channel) {
    const uint32_t run = channel / SPAN;  // of the group; its lowest bit shares a digit with j
    const uint32_t rest = run >> 1;
    half[0] = __popc(rest & rest >> 1 & 0x55555555) << 31;
    half[1] = half[0] ^ run << 31;
  }
  __device__ __forceinline__ float apply(float x, int j) const {
    const uint32_t third = j % 4 == 3 ? 0x80000000u : 0;
    return __uint_as_float(__float_as_uint(x) ^ half[j / 4] ^ third);
  }
};

// N2: y = g z + h, with g = weight (1 + scale) and h = bias (1 + scale) + shift.
struct Affine {
  Run g[AFFINE_IN_SHARED ? 1 : CHUNKS], h[AFFINE_IN_SHARED ? 1 : CHUNKS];
  int end = 0;  // the first row that they are not of

  __device__ __forceinline__ void load(const NormQuantParams& p, SharedStorage& smem, int row) {
    row = min(row, p.rows - 1);
    if (row < end) return;
    const int64_t group = MODULATED ? row / p.group_rows : 0;
    end = MODULATED ? int(group + 1) * p.group_rows : p.rows;
    const auto *weight = static_cast<const weight_t*>(p.weight),
               *bias = static_cast<const weight_t*>(p.bias);
    const auto *scale = static_cast<const modulation_t*>(p.scale),
               *shift = static_cast<const modulation_t*>(p.shift);
    const int thread = thread_id_anew();  // this is rare, and shall keep no registers
    if (scale != nullptr) scale += group * p.scale_stride;
    if (shift != nullptr) shift += group * p.shift_stride;
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a) {
      const int channel = channel_of(a, thread), own = AFFINE_IN_SHARED ? 0 : a;
      const auto w = read_run(WEIGHTED ? weight : nullptr, channel, 1.0f);
      const auto b = read_run(WEIGHTED ? bias : nullptr, channel, 0.0f);
      const auto s = read_run(MODULATED ? scale : nullptr, channel, 0.0f);
      const auto t = read_run(MODULATED ? shift : nullptr, channel, 0.0f);
#pragma unroll
      for (int j = 0; j < RUN; ++j) {
        const float factor = __fadd_rn(1.0f, s.v[j]);
        g[own][j] = __fmul_rn(w.v[j], factor);
        h[own][j] = __fmaf_rn(b.v[j], factor, t.v[j]);
        if constexpr (SIGNS_IN_AFFINE) {
          const Signs signs(channel);
          g[own][j] = signs.apply(g[own][j], j), h[own][j] = signs.apply(h[own][j], j);
        }
      }
      if constexpr (AFFINE_IN_SHARED)
#pragma unroll
        for (int i = 0; i < RUN_PARTS; ++i) {
          const float* from =  // [WIDE]
              i * WIDE < RUN ? g[0] + i * WIDE : h[0] + (i * WIDE - RUN);
          *reinterpret_cast<RunPart*>(smem.affine[a * RUN_PARTS + i][thread]) = {
              from[0], from[1], from[2], from[3]};
        }
    }
  }
  // A thread reads its own numbers alone, hence no barrier.
  __device__ __forceinline__ void apply(const SharedStorage& smem, Run (&x)[CHUNKS]) const {
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
      for (int i = 0; i < RUN / WIDE; ++i) {
        RunPart factor, offset;
        if constexpr (AFFINE_IN_SHARED) {
          const auto& parts = smem.affine;
          factor = *reinterpret_cast<const RunPart*>(parts[a * RUN_PARTS + i][thread_id()]);
          offset =
              *reinterpret_cast<const RunPart*>(parts[a * RUN_PARTS + RUN / WIDE + i][thread_id()]);
        } else {
#pragma unroll
          for (int j = 0; j < WIDE; ++j)
            factor.v[j] = g[a][i * WIDE + j], offset.v[j] = h[a][i * WIDE + j];
        }
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
          float& number = x[a][i * WIDE + j];
          number = __fmaf_rn(number, factor.v[j], offset.v[j]);
        }
      }
  }
};

// N1: subtracts the mean of the row.
__device__ __forceinline__ void centre(Run (&x)[CHUNKS], uint32_t (&of_warp)[NUM_WARPS]) {
  Run sums;
#pragma unroll
  for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
    for (int j = 0; j < RUN; ++j) sums[j] = a == 0 ? x[a][j] : __fadd_rn(sums[j], x[a][j]);
  const float mean = __fmul_rn(team_sum(sum_of_neighbours(sums), of_warp), PER_CHANNEL);
#pragma unroll
  for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
    for (int j = 0; j < RUN; ++j)
      x[a][j] = is_channel(channel_of(a) + j) ? __fsub_rn(x[a][j], mean) : 0.0f;
}

// N1, N2: divides the row by its root mean square.
__device__ __forceinline__ void normalise(
    Run (&x)[CHUNKS], float eps, uint32_t (&of_warp)[NUM_WARPS]) {
  Run sums = {};
#pragma unroll
  for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
    for (int j = 0; j < RUN; ++j) sums[j] = __fmaf_rn(x[a][j], x[a][j], sums[j]);
  const float mean = __fmul_rn(team_sum(sum_of_neighbours(sums), of_warp), PER_CHANNEL);
  const float factor = norm_factor(mean, eps);
#pragma unroll
  for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
    for (int j = 0; j < RUN; ++j) x[a][j] = __fmul_rn(x[a][j], factor);
}

// N4: a butterfly of two numbers.
__device__ __forceinline__ void butterfly(float& x, float& y) {
  const float sum = __fadd_rn(x, y);
  y = __fsub_rn(x, y);
  x = sum;
}
// N4: butterflies of numbers whose places differ in one bit, bit after bit up to BITS.
template <int N, int BITS>
__device__ __forceinline__ void butterflies(float (&x)[N]) {
#pragma unroll
  for (int bit = 1; bit < BITS; bit *= 2)
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (!(i & bit)) butterfly(x[i], x[i + bit]);
}

// N4: rotates the runs of a lane, and stores them for other lanes.
// NOTE: a half of a run is stored at a time. Lanes that would meet in a bank begin with the other
// half. A sum fused with a factor of -1 is a difference, with the same rounding.
__device__ __forceinline__ void turn_runs(Run (&x)[CHUNKS], float (&row)[SPAN * RADIX]) {
  constexpr int HALF = RUN / 2;
  const bool upper_first = lane_id() & HALF;
  const float sign = upper_first ? -1.0f : 1.0f;
#pragma unroll
  for (int a = 0; a < CHUNKS; ++a) {
    butterflies<RUN, HALF>(x[a]);
    Vec<float, HALF> first, second;
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
      first.v[j] = __fmaf_rn(sign, x[a][j + HALF], x[a][j]);
      second.v[j] = __fmaf_rn(-sign, x[a][j + HALF], x[a][j]);
    }
    const int channel = channel_of(a);
    if (!is_channel(channel)) continue;
    *reinterpret_cast<Vec<float, HALF>*>(row + channel + (upper_first ? HALF : 0)) = first;
    *reinterpret_cast<Vec<float, HALF>*>(row + channel + (upper_first ? 0 : HALF)) = second;
  }
}

// A lane's part of the largest magnitude. A NaN stays.
template <int N>
__device__ __forceinline__ uint32_t absmax_of(const float (&x)[N]) {
  float found = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) found = max_nan(found, fabsf(x[i]));
  return magnitude_bits(found);
}

// N4, R1: codes of a rotated row, with a scale for all of it.
__device__ __forceinline__ void store_rotated(
    const NormQuantParams& p, SharedStorage& smem, int step, int row, Run (&x)[CHUNKS]) {
  const int thread = thread_id_anew(), lane = thread % LANES;
  const int team = ROTATED ? thread / LANES : 0;
  auto& words = reinterpret_cast<float (&)[SPAN * RADIX]>(smem.row[team]);
  turn_runs(x, words);
  team_sync();  // the runs of all lanes are visible
  float y[TASKS][RADIX];
  uint32_t absmax = 0;
#pragma unroll
  for (int task = 0; task < TASKS; ++task) {
    const int word = task * LANES + lane;
    if (word - lane_id() >= SPAN) continue;           // this warp has no word of the row
    const float* from = words + min(word, SPAN - 1);  // [RADIX, SPAN]
#pragma unroll
    for (int i = 0; i < RADIX; ++i) y[task][i] = from[i * SPAN];
    butterflies<RADIX, RADIX>(y[task]);
    absmax = max(absmax, absmax_of(y[task]));
  }
  // Butterflies multiplied the sum of the squares by ROTATE. The scale corrects this.
  const Scale scale = scale_of_absmax(team_max(absmax, smem.of_warp[step % 2][2]));
  constexpr float UNIT = ROTATE == 64 ? 0.125f : ROTATE == 128 ? SQRT_HALF / 8 : 0.0625f;
  if (lane == 0 && row < p.rows)  // a NaN keeps its bits
    p.scales[row] = scale.inverse == 0.0f ? scale.scale : __fmul_rn(scale.scale, UNIT);
#pragma unroll
  for (int task = 0; task < TASKS; ++task) {
    const int word = task * LANES + lane;
    if (word - lane_id() >= SPAN) continue;
    // Four lanes have four words side by side: each takes all of them of every fourth place.
    int8_t* codes =  // [RADIX / 4, 4 SPAN]
        p.codes + int64_t(row) * CHANNELS + lane % 4 * SPAN + round_down(word, 4);
#pragma unroll
    for (int i = 0; i < RADIX; i += 4) {
      float scaled[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) scaled[j] = __fmul_rn(y[task][i + j], scale.inverse);
      const uint32_t four =
          shfl_transpose_bytes(pack_s8(scaled[0], scaled[1], scaled[2], scaled[3]));  // R1
      if (row < p.rows && word < SPAN) *reinterpret_cast<uint32_t*>(codes + i * SPAN) = four;
    }
  }
}

// R1: codes of a run.
__device__ __forceinline__ void store_run(int8_t* codes, int channel, const Run& x, float inverse) {
#pragma unroll
  for (int i = 0; i < RUN_ACCESSES; ++i) {
    float scaled[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) scaled[j] = __fmul_rn(x[i * VEC + j], inverse);
    if (is_channel(channel + i * VEC)) store_rounded_s8(codes + i * VEC, scaled);
  }
}

// R1: codes of a row in its original order, with a scale for all of it or for every SLICE channels.
__device__ __forceinline__ void store_in_place(
    const NormQuantParams& p, SharedStorage& smem, int step, int row, Run (&x)[CHUNKS]) {
  int8_t* codes = p.codes + int64_t(row) * CHANNELS + channel_of(0);  // [CHUNKS, LANES * RUN]
  if constexpr (BY_ROW) {
    uint32_t absmax = 0;
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a) absmax = max(absmax, absmax_of(x[a]));
    const Scale scale = scale_of_absmax(team_max(absmax, smem.of_warp[step % 2][2]));
    if (row >= p.rows) return;
    if (thread_id() % LANES == 0) p.scales[row] = scale.scale;
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a)
      store_run(codes + a * LANES * RUN, channel_of(a), x[a], scale.inverse);
  } else {
    constexpr int SLICE_LANES = SLICE / RUN;
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a) {
      const int channel = channel_of(a);
      const Scale scale = scale_of_absmax(shfl_max<SLICE_LANES>(absmax_of(x[a])));
      if (row >= p.rows) continue;
      if (channel % SLICE == 0 && is_channel(channel))
        p.scales[int64_t(row) * ceil_div(CHANNELS, SLICE) + channel / SLICE] = scale.scale;
      store_run(codes + a * LANES * RUN, channel, x[a], scale.inverse);
    }
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) void norm_quant(
    const __grid_constant__ NormQuantParams p) {
  griddepcontrol_launch_dependents();  // a product may begin
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int row0 = blockIdx.x * (p.steps * BLOCK_M) + warp_id() / TEAM_WARPS;

  Affine affine;
  Loaded loaded;
  loaded.load(p, row0);
  for (int step = 0; step < p.steps; ++step) {
    const int row = row0 + step * BLOCK_M;
    if constexpr (AFFINE) affine.load(p, smem, row);
    Run x[CHUNKS];
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
      for (int j = 0; j < RUN; ++j) {
        x[a][j] = loaded.element(0, a, j);
        if constexpr (GLU) {
          const float other = loaded.element(1, a, j);
          const float gate = GATE_LAST ? other : x[a][j], up = GATE_LAST ? x[a][j] : other;
          x[a][j] = __fmul_rn(activated<ACTIVATION>(gate), up);  // N3
        }
      }
    if (step + 1 < p.steps) loaded.load(p, row + BLOCK_M);

    if constexpr (NORM == Norm::LAYER) centre(x, smem.of_warp[step % 2][0]);
    if constexpr (NORM != Norm::NONE) normalise(x, p.eps, smem.of_warp[step % 2][1]);
    if constexpr (AFFINE) affine.apply(smem, x);  // N2
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
      for (int j = 0; j < RUN; ++j) {
        if constexpr (!GLU) x[a][j] = activated<ACTIVATION>(x[a][j]);  // N3
        if constexpr (ROTATED && !SIGNS_IN_AFFINE) x[a][j] = Signs(channel_of(a)).apply(x[a][j], j);
      }
    if constexpr (ROTATED) {
      store_rotated(p, smem, step, row, x);
    } else {
      store_in_place(p, smem, step, row, x);
    }
  }
}
