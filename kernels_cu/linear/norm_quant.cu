// norm_quant -- rows normalised, modulated, activated and rotated, then INT8 codes and scales: what
//               a model does between two products, in one pass.
//
// Idea         A row is read once and stays in registers until its codes are written. A team of
//              lanes shares a row; a lane has CHUNKS runs of eight neighbouring channels. Many runs
//              make instructions few, so that memory decides. A block has rows of one group, and
//              makes the factors of every channel once. The next row is on its way during the
//              present one: to registers, or to shared memory if lanes have many numbers.
// Differs from row_quant.cu, which takes numbers unchanged, and rows of any length.
// Data flow    x -> mean, root mean square -> z -> y -> activation -> rotation -> largest
//              magnitude -> codes. The lanes of a group that is rotated are in one warp, each
//              with four of its runs. Butterflies of these 32 numbers come first; then the numbers
//              change lanes through the warp's shared memory once, for those across lanes.
// Kept simple  A row has 32,768 channels at most.
// Rounding     N1 sums and their factors; N2 z, g, h and y; N3 activation; N4 each butterfly; R1
//              scale and code. But for N3, each operation is rounded once, and named.
// Mirror       cupyattn.reference.norm_quant.norm_quant_mirror, to the bit but for N3
// Bound        docs/MATH_REFERENCE.md [L82]
#include "prims/config.cuh"
#include "prims/codes/gemm.cuh"
#include "prims/codes/quant.cuh"
#include "prims/instructions/griddepcontrol.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/io/joint_rows.cuh"
#include "prims/io/tile_io.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct NormQuantParams : JointRowsParams<JOINT_ROWS> {
  const void* X;       // [rows, CHANNELS] of elem_t; GLU: [rows, 2 CHANNELS]; JOINT_ROWS: the
                       // first `split` rows of each batch entry, the others lie in `below`
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

constexpr int RUN = 8;                                       // neighbouring channels of a lane
constexpr int LANES = NUM_THREADS / BLOCK_M;                 // that share a row, a team
constexpr int PART = LANES < WARP_SIZE ? LANES : WARP_SIZE;  // of them in one warp
constexpr int TEAM_WARPS = ceil_div(LANES, PART);            // of a team
constexpr int CHUNKS = BLOCK_N / (LANES * RUN);              // runs of a lane
constexpr int RUN_ACCESSES = RUN / VEC;
constexpr float PER_CHANNEL = 1.0f / CHANNELS;

static_assert(
    LANES * BLOCK_M == NUM_THREADS && TEAM_WARPS * PART == LANES && WARP_SIZE % PART == 0,
    "the lanes of a row must be whole warps, or a power of two in a warp");
static_assert(
    CHUNKS >= 1 && CHUNKS * LANES * RUN == BLOCK_N && BLOCK_N >= CHANNELS,
    "BLOCK_N must be a multiple of 8 channels for every lane of a row, and hold the row");
static_assert(
    ROTATE == 0 || (ROTATE >= RUN && CHANNELS % ROTATE == 0), "ROTATE must divide CHANNELS");
constexpr int MOST_AHEAD = ROTATE == 0 ? 32 : 96;  // channels of a lane beside the next row's
static_assert(
    CHUNKS * RUN <= (NEXT_IN_SHARED ? 160 : MOST_AHEAD),
    "BLOCK_N must be at most 32 channels for every lane of a row, 96 of a rotated row, or 160 if "
    "the next row is in shared memory");
static_assert(ROTATE == 0 || BY_ROW, "a rotated row has one scale");

// Rotation: run q of a row, of GROUPS, is turned with the runs that are a multiple of GROUPS past
// it. ACROSS lanes of a warp have them, TURNED neighbours in this order each. A lane has runs of as
// many groups as SETS.
constexpr bool ROTATED = ROTATE != 0;
constexpr int GROUPS = ROTATED ? CHANNELS / ROTATE : 1;
constexpr int TURNED = 4;
constexpr int SETS = ROTATED ? CHUNKS / TURNED : 1;
constexpr int SPAN = GROUPS * RUN;        // channels between runs of a group
constexpr int LANE_SPAN = TURNED * SPAN;  // and between lanes of a group
constexpr int ACROSS = ROTATED ? CHANNELS / LANE_SPAN : 1;
constexpr int PART_GROUPS = PART / ACROSS;         // groups of a warp
constexpr int PART_SPAN = PART_GROUPS * RUN;       // channels of these side by side
constexpr int WIDE = 4;                            // numbers of an access to shared memory
constexpr int TASKS = ROTATED ? RUN / ACROSS : 1;  // WIDE words of a lane, of ACROSS lanes each
static_assert(
    ROTATE == 0 ||
        (SETS * TURNED == CHUNKS && ACROSS * LANE_SPAN == CHANNELS && PART_GROUPS * ACROSS == PART),
    "a lane must have 32 numbers of a group that is rotated, the lanes of one warp all of it");

using Access = Words<elem_t, VEC>;  // neighbouring elements of a row, as they are read
constexpr int ACCESSES = HALVES * CHUNKS * RUN_ACCESSES;  // of a lane

constexpr bool AFFINE = WEIGHTED || MODULATED;
// g and h are in shared memory, if it has room for them, and leave registers to more blocks.
constexpr bool EACH_ROW = AFFINE && FACTORS_OF_ROW;
constexpr bool AFFINE_IN_SHARED = AFFINE && !EACH_ROW && (BLOCK_M > 1 || NUM_THREADS <= 256);
constexpr int RUN_PARTS = 2 * RUN / WIDE;  // accesses to g and h of a run

struct SharedStorage {
  alignas(16) float affine[AFFINE_IN_SHARED ? CHUNKS * RUN_PARTS : 1][AFFINE_IN_SHARED ? LANES : 1]
                          [WIDE];
  // Of the lanes of a team in one warp: numbers that change lanes.
  alignas(
      16) float part[ROTATED ? BLOCK_M * TEAM_WARPS : 1][ROTATED ? ACROSS * TURNED * PART_SPAN : 1];
  // Results of the warps for three reductions. Even and odd rows have separate places, so that a
  // warp that is ahead overwrites nothing that another has yet to read.
  uint32_t of_warp[2][3][NUM_WARPS];
  // The next row of each team, if it waits here. A thread reads its own copies alone, hence no
  // barrier. Copies begin at a line of 128 bytes: 16 bytes behind one the pass took 1.2 times as
  // long.
  alignas(NEXT_IN_SHARED ? 128 : sizeof(Access))
      Access next[NEXT_IN_SHARED ? ACCESSES : 1][NEXT_IN_SHARED ? NUM_THREADS : 1];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

using Run = float[RUN];
using RunPart = Vec<float, WIDE>;

// Channels from the first run of a lane to run a.
__device__ __forceinline__ constexpr int run_offset(int a) {
  return ROTATED ? a / TURNED * PART_SPAN + a % TURNED * SPAN : a * LANES * RUN;
}
// First channel of run a of a thread; at least CHANNELS if it has none.
__device__ __forceinline__ int channel_of(int a, int thread = thread_id()) {
  const int lane = thread % LANES;
  if constexpr (!ROTATED) return lane * RUN + run_offset(a);
  const int group = lane / PART * (SETS * PART_GROUPS) + lane % PART_GROUPS;
  if (BLOCK_N != CHANNELS && group + a / TURNED * PART_GROUPS >= GROUPS) return CHANNELS;
  return lane % PART / PART_GROUPS * LANE_SPAN + group * RUN + run_offset(a);
}
// Whether a channel is one of the row.
__device__ __forceinline__ bool is_channel(int channel) {
  return BLOCK_N == CHANNELS || channel < CHANNELS;
}
// Whether channel j of run a of this thread is one. Most rows consist of whole runs, and a lane of
// a rotated row has all runs of a group or none.
__device__ __forceinline__ bool has_channel(int a, int j = 0) {
  return is_channel(channel_of(ROTATED ? a / TURNED * TURNED : a) + (CHANNELS % RUN == 0 ? 0 : j));
}

// Synchronises the warps of a team.
__device__ __forceinline__ void team_sync() {
  if constexpr (BLOCK_M == 1) {
    __syncthreads();  // what every warp wrote to shared memory is visible
  } else {
    named_barrier_sync(1 + thread_id() / LANES, LANES);  // the same, to this team
  }
}

// Neighbours among the lanes of a team added, then neighbours of the sums; every lane gets the sum.
__device__ __forceinline__ float team_sum(float x, uint32_t (&of_warp)[NUM_WARPS]) {
  x = shfl_sum_of_neighbours<PART>(x);
  if constexpr (TEAM_WARPS > 1) {
    if (lane_id() == 0) of_warp[warp_id()] = __float_as_uint(x);
    team_sync();  // the sums of all warps are visible
    const int first = warp_id() / TEAM_WARPS * TEAM_WARPS;
    float sums[power_of_two_from(TEAM_WARPS)] = {};
#pragma unroll
    for (int i = 0; i < TEAM_WARPS; ++i) sums[i] = __uint_as_float(of_warp[first + i]);
    x = sum_of_neighbours(sums);
  }
  return x;
}
__device__ __forceinline__ uint32_t team_max(uint32_t x, uint32_t (&of_warp)[NUM_WARPS]) {
  x = shfl_max<PART>(x);
  if constexpr (TEAM_WARPS > 1) {
    if (lane_id() == 0) of_warp[warp_id()] = x;
    team_sync();  // the maxima of all warps are visible
    const int first = warp_id() / TEAM_WARPS * TEAM_WARPS;
#pragma unroll
    for (int i = 0; i < TEAM_WARPS; ++i) x = max(x, of_warp[first + i]);
  }
  return x;
}

// The runs of a lane in the order of memory. Past the last row it repeats, past its channels are
// zeros.
struct Loaded {
  Access of[HALVES][CHUNKS][RUN_ACCESSES];

  // Begins to read a row: into these registers, or into shared memory, from where take() moves it.
  __device__ __forceinline__ void request(const NormQuantParams& p, SharedStorage& smem, int row) {
    const elem_t* X =  // [CHANNELS], or of both halves
        row_of(p, p.X, row, p.X_stride) + channel_of(0);
    const uint32_t place = NEXT_IN_SHARED ? shared_address(&smem.next[0][thread_id()]) : 0;
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
        for (int i = 0; i < RUN_ACCESSES; ++i) {
          if (BLOCK_N != CHANNELS && !NEXT_IN_SHARED) of[half][a][i] = {};
          if (!has_channel(a, i * VEC)) continue;
          const elem_t* from = X + half * CHANNELS + run_offset(a) + i * VEC;  // [VEC]
          const auto access = reinterpret_cast<const Access*>(from);
          const int n = (half * CHUNKS + a) * RUN_ACCESSES + i;
          if constexpr (!NEXT_IN_SHARED) {
            of[half][a][i] = *access;
          } else if constexpr (sizeof(Access) >= 4) {
            cp_async<sizeof(Access)>(place + n * int(sizeof(smem.next[0])), access, true);
          } else {  // too narrow for cp.async: an ordinary copy
            smem.next[n][thread_id()] = *access;
          }
        }
    if constexpr (NEXT_IN_SHARED) cp_async_commit_group();
  }
  // Moves the row that was requested to registers. Its place in shared memory is free then.
  __device__ __forceinline__ void take(SharedStorage& smem) {
    if constexpr (NEXT_IN_SHARED) {
      cp_async_wait_group<0>();  // this thread's copies have arrived
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
          for (int i = 0; i < RUN_ACCESSES; ++i) {
            if (BLOCK_N != CHANNELS) of[half][a][i] = {};
            if (has_channel(a, i * VEC))
              of[half][a][i] = smem.next[(half * CHUNKS + a) * RUN_ACCESSES + i][thread_id()];
          }
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

// N2: y = g z + h, with g = weight (1 + scale) and h = bias (1 + scale) + shift.
struct Factors {
  Run g, h;

  // Of a run of channels, and a group of rows.
  __device__ __forceinline__ void load(const NormQuantParams& p, int64_t group, int channel) {
    const auto *weight = static_cast<const weight_t*>(p.weight),
               *bias = static_cast<const weight_t*>(p.bias);
    const auto *scale = static_cast<const modulation_t*>(p.scale),
               *shift = static_cast<const modulation_t*>(p.shift);
    if (scale != nullptr) scale += group * p.scale_stride;
    if (shift != nullptr) shift += group * p.shift_stride;
    const auto w = read_run(WEIGHTED ? weight : nullptr, channel, 1.0f);
    const auto b = read_run(WEIGHTED ? bias : nullptr, channel, 0.0f);
    const auto s = read_run(MODULATED ? scale : nullptr, channel, 0.0f);
    const auto t = read_run(MODULATED ? shift : nullptr, channel, 0.0f);
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
      const float factor = __fadd_rn(1.0f, s.v[j]);
      g[j] = __fmul_rn(w.v[j], factor);
      h[j] = __fmaf_rn(b.v[j], factor, t.v[j]);
    }
  }
  __device__ __forceinline__ void apply(Run& x) const {
#pragma unroll
    for (int j = 0; j < RUN; ++j) x[j] = __fmaf_rn(x[j], g[j], h[j]);
  }
};

// Factors of all runs of a lane, in shared memory for all teams of the block, or in registers.
struct Affine {
  static constexpr int TOGETHER = 5;  // runs that a thread reads together: more would spill
  Factors of[AFFINE_IN_SHARED || EACH_ROW ? 1 : CHUNKS];

  __device__ __forceinline__ void load(const NormQuantParams& p, SharedStorage& smem, int group) {
    if constexpr (EACH_ROW) return;
    const int thread = thread_id_anew();  // these registers are free before the first row
    if constexpr (BLOCK_M > 1) {
#pragma unroll TOGETHER
      for (int first = 0; first < CHUNKS; first += BLOCK_M) {
        const int a = first + thread / LANES;
        if (first + BLOCK_M <= CHUNKS || a < CHUNKS) keep(p, smem, group, a, thread);
      }
      __syncthreads();  // the factors of all runs are visible
    } else {
      // A thread reads its own numbers alone, hence no barrier.
#pragma unroll TOGETHER
      for (int a = 0; a < CHUNKS; ++a) keep(p, smem, group, a, thread);
    }
  }
  __device__ __forceinline__ void keep(
      const NormQuantParams& p, SharedStorage& smem, int64_t group, int a, int thread) {
    Factors& own = of[AFFINE_IN_SHARED ? 0 : a];
    own.load(p, group, channel_of(a, thread));
    if constexpr (AFFINE_IN_SHARED)
#pragma unroll
      for (int i = 0; i < RUN_PARTS; ++i) {
        const float* from = i * WIDE < RUN ? own.g + i * WIDE : own.h + (i * WIDE - RUN);  // [WIDE]
        *reinterpret_cast<RunPart*>(smem.affine[a * RUN_PARTS + i][thread % LANES]) = {
            from[0], from[1], from[2], from[3]};
      }
  }
  __device__ __forceinline__ void apply(
      const NormQuantParams& p, const SharedStorage& smem, int row, Run (&x)[CHUNKS]) const {
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a) {
      Factors factors;
      if constexpr (EACH_ROW) {
        factors.load(p, row / p.group_rows, channel_of(a));
      } else if constexpr (AFFINE_IN_SHARED) {
#pragma unroll
        for (int i = 0; i < RUN_PARTS; ++i) {
          const auto part = *reinterpret_cast<const RunPart*>(
              smem.affine[a * RUN_PARTS + i][thread_id() % LANES]);
          const int at = i * WIDE;
          float* to = at < RUN ? factors.g + at : factors.h + (at - RUN);  // [WIDE]
#pragma unroll
          for (int j = 0; j < WIDE; ++j) to[j] = part.v[j];
        }
      } else {
        factors = of[a];
      }
      factors.apply(x[a]);
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
    for (int j = 0; j < RUN; ++j) x[a][j] = __fsub_rn(x[a][j], has_channel(a, j) ? mean : 0.0f);
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

// N4: the sum of two numbers, and their difference; of the second number with a minus sign if so
// said. Each is rounded once.
__device__ __forceinline__ void butterfly(float& x, float& y, bool minus = false) {
  const float sum = __fadd_rn(x, y), difference = __fsub_rn(x, y);
  x = minus ? difference : sum;
  y = minus ? sum : difference;
}
// The same with a factor of y that is 1 or -1: the product is exact.
__device__ __forceinline__ void butterfly(float& x, float& y, float sign) {
  const float sum = __fmaf_rn(sign, y, x);
  y = __fmaf_rn(-sign, y, x);
  x = sum;
}

// N4: channels get their signs, then butterflies of numbers whose places in the group differ in one
// bit, from the lowest bit on. A channel has a minus sign if an odd number of digits of its place,
// in base 4, are 3. Without signs one channel of a group would gather the mean of all. With these,
// a row of the matrix sums to at most the root of its size, and of 128 to the root of twice that.
// NOTE: no sign costs an instruction. The sign of a digit is applied in the butterflies of its
// lower bit, since those before combine numbers that share it.

// The bits of a lane's own numbers: three of a place in a run, two of a run. A half of a run is
// stored at a time. Lanes that would meet in a bank begin with the other half.
__device__ __forceinline__ void turn_own(Run* x /*[TURNED]*/, float* part /*[TURNED, PART_SPAN]*/) {
  const int first = lane_id() & WIDE;  // of the half
  const float order = first ? -1.0f : 1.0f;
#pragma unroll
  for (int a = 0; a < TURNED; ++a) {
#pragma unroll
    for (int j = 0; j < RUN; j += 2) butterfly(x[a][j], x[a][j + 1], j % 4 == 2);
#pragma unroll
    for (int j = 0; j < RUN; ++j)
      if (!(j & 2)) butterfly(x[a][j], x[a][j + 2]);
#pragma unroll
    for (int j = 0; j < WIDE; ++j) butterfly(x[a][j], x[a][j + WIDE], a & 1 ? -order : order);
  }
  // The lowest bit of a lane is in one digit with the upper bit of a run.
  const float sign = lane_id() / PART_GROUPS & 1 ? -1.0f : 1.0f;
#pragma unroll
  for (int j = 0; j < RUN; ++j) {
    butterfly(x[0][j], x[1][j]), butterfly(x[2][j], x[3][j]);
    butterfly(x[0][j], x[2][j], sign), butterfly(x[1][j], x[3][j], sign);
  }
#pragma unroll
  for (int a = 0; a < TURNED; ++a)
#pragma unroll
    for (int i = 0; i < RUN; i += WIDE)
      *reinterpret_cast<RunPart*>(part + a * PART_SPAN + (first ^ i)) = {
          x[a][i], x[a][i + 1], x[a][i + 2], x[a][i + 3]};
}
// The bits of lanes; the upper two are a digit.
__device__ __forceinline__ void turn_across(float (&y)[ACROSS * WIDE]) {
#pragma unroll
  for (int bit = WIDE; bit < ACROSS * WIDE; bit *= 2)
#pragma unroll
    for (int i = 0; i < ACROSS * WIDE; ++i)
      if (!(i & bit)) butterfly(y[i], y[i + bit], bit == 2 * WIDE && i & 4 * WIDE);
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
    const NormQuantParams& p, SharedStorage& smem, int step, int row, int end, Run (&x)[CHUNKS]) {
  const int thread = thread_id_anew(), lane = thread % PART;
  float* part = smem.part[ROTATED ? thread / PART : 0];  // [ACROSS, TURNED, PART_SPAN]
  float y[SETS * TASKS][ACROSS * WIDE];
  uint32_t absmax = 0;
#pragma unroll
  for (int set = 0; set < SETS; ++set) {
    if (set > 0 || TEAM_WARPS == 1) __syncwarp();  // the numbers before are read
    turn_own(
        x + set * TURNED,
        part + lane / PART_GROUPS * (TURNED * PART_SPAN) + lane % PART_GROUPS * RUN);
    __syncwarp();  // the numbers of all lanes of a group are visible
#pragma unroll
    for (int task = 0; task < TASKS; ++task) {
      auto& own = y[set * TASKS + task];
#pragma unroll
      for (int i = 0; i < ACROSS; ++i) {
        const auto words = *reinterpret_cast<const RunPart*>(
            part + i * (TURNED * PART_SPAN) + (task * PART + lane) * WIDE);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) own[i * WIDE + j] = words.v[j];
      }
      turn_across(own);
      absmax = max(absmax, absmax_of(own));
    }
  }
  // Butterflies multiplied the sum of the squares by ROTATE. The scale corrects this.
  const Scale scale = scale_of_absmax(team_max(absmax, smem.of_warp[step % 2][2]));
  constexpr float UNIT = ROTATE == 64 ? 0.125f : ROTATE == 128 ? SQRT_HALF / 8 : 0.0625f;
  if (row >= end) return;
  if (thread % LANES == 0)  // a NaN keeps its bits
    p.scales[row] = scale.inverse == 0.0f ? scale.scale : __fmul_rn(scale.scale, UNIT);
#pragma unroll
  for (int n = 0; n < SETS * TASKS; ++n) {
    const int word = (n % TASKS * PART + lane) * WIDE;  // of [TURNED, PART_SPAN]
    const int set = thread % LANES / PART * SETS + n / TASKS;
    const int past = set * PART_SPAN + word % PART_SPAN;
    int8_t* codes =  // [ACROSS, LANE_SPAN]
        p.codes + int64_t(row) * CHANNELS + word / PART_SPAN * SPAN + past;
    if (BLOCK_N != CHANNELS && past >= SPAN) continue;
#pragma unroll
    for (int i = 0; i < ACROSS; ++i) {
      float scaled[WIDE];
#pragma unroll
      for (int j = 0; j < WIDE; ++j) scaled[j] = __fmul_rn(y[n][i * WIDE + j], scale.inverse);
      store_rounded_s8(codes + i * LANE_SPAN, scaled);  // R1
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
    const NormQuantParams& p, SharedStorage& smem, int step, int row, int end, Run (&x)[CHUNKS]) {
  int8_t* codes = p.codes + int64_t(row) * CHANNELS + channel_of(0);  // [CHUNKS, LANES * RUN]
  if constexpr (BY_ROW) {
    uint32_t absmax = 0;
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a) absmax = max(absmax, absmax_of(x[a]));
    const Scale scale = scale_of_absmax(team_max(absmax, smem.of_warp[step % 2][2]));
    if (row >= end) return;
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
      if (row >= end) continue;
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
  const int block_rows = p.steps * BLOCK_M;
  const int group_rows = EACH_ROW ? p.rows : p.group_rows;
  const int group_blocks = ceil_div(group_rows, block_rows), group = blockIdx.x / group_blocks;
  const int end = (group + 1) * group_rows;  // of the block's rows
  const int row0 =
      group * group_rows + blockIdx.x % group_blocks * block_rows + thread_id() / LANES;

  Affine affine;
  Loaded loaded;
  loaded.request(p, smem, min(row0, end - 1));
  if constexpr (AFFINE) affine.load(p, smem, group);
  for (int step = 0; step < p.steps; ++step) {
    const int row = row0 + step * BLOCK_M;
    loaded.take(smem);
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
    if (step + 1 < p.steps) loaded.request(p, smem, min(row + BLOCK_M, end - 1));

    if constexpr (NORM == Norm::LAYER) centre(x, smem.of_warp[step % 2][0]);
    if constexpr (NORM != Norm::NONE) normalise(x, p.eps, smem.of_warp[step % 2][1]);
    if constexpr (AFFINE) affine.apply(p, smem, min(row, end - 1), x);  // N2
#pragma unroll
    for (int a = 0; a < CHUNKS; ++a)
#pragma unroll
      for (int j = 0; j < RUN; ++j) {
        if constexpr (!GLU) x[a][j] = activated<ACTIVATION>(x[a][j]);  // N3
      }
    if constexpr (ROTATED) {
      store_rotated(p, smem, step, row, end, x);
    } else {
      store_in_place(p, smem, step, row, end, x);
    }
  }
}
