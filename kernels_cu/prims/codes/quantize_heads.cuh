// quantize_heads.cuh -- rows of the same tokens of several heads in one block. A number of a
// prepared row has 2 bytes, and rotation tables have 8 for it. So the heads of a block share what a
// lane has read of tables and weights. A lane has the same 8 columns of both halves of a row, whose
// 32 bytes in a table are a sector.
// HeadRows  rows wait, in shared memory or registers, for the scales of their groups
// OwnRows   a warp has whole groups: it finds their scales by itself, and keeps no rows
#pragma once

#include "prims/codes/quantize_rows.cuh"

// Whether a block takes rows of several heads of Q or of K. All heads of an operand then share
// weights, or all heads of a part of its rows: cupyattn/plans/quantize.py plans it so.
constexpr bool HEADS_TOGETHER = HEADS_Q > 1 || HEADS_K > 1;
static_assert(
    !HEADS_TOGETHER || (FACTORS_FIRST && !QK_ROTATE && !ZERO_POINTS && VEC == 8 &&
                        LANE_ACCESSES == 2 && LANES >= 4 && LANES * 2 * VEC == HEAD_DIM),
    "heads share a block if each is normalised and turned by column: 64, 128 or 256, in 16 bits");
// Whether rows of K, or of the operand of a Cut, become codes by the code below. Blocks of one head
// of K do beside several heads of Q, because one bound of registers holds for both.
constexpr bool K_BY_UNITS = HEADS_K > 1 || (HEADS_Q > 1 && !GATHERED);
template <typename Cut>
constexpr bool BY_UNITS = Cut::MEAN ? K_BY_UNITS : HEADS_Q > 1;

// Shared memory of a multiprocessor, in KB.
constexpr int SHARED_KB = __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
                              ? 100
                          : __CUDA_ARCH__ < 900 ? 164
                                                : 228;
// Whether three blocks of 256 threads share a multiprocessor, rather than two. Their 80 registers
// hold one row at a time in float16 with one vector of weights and interleaved pairs. Blocks of K
// then have whole groups of one head. Other settings spill.
constexpr bool THREE_BLOCKS = ELEM_IS_HALF && HEAD_DIM >= 128 && !NORM_BY_PART &&
                              ROPE_INTERLEAVED && SHARED_KB >= 228 && HEADS_K == 1 && !GATHERED &&
                              STEP_K != Step::CODES;
// Rows of the same token that a lane prepares at a time, with one read of tables and weights.
constexpr int ROWS_TOGETHER = THREE_BLOCKS ? 1 : 2;
// Rows of a lane that wait in shared memory if two blocks share a multiprocessor. Codes of V take
// the space of one. Other rows stay in registers.
constexpr int ROWS_HELD = (SHARED_KB > 100 ? 4 : 2) - (STEP_V == Step::VALUES);

// Dynamic shared memory of a block.
__device__ __forceinline__ unsigned char* dynamic_space() {
  extern __shared__ __align__(16) unsigned char space[];
  return space;
}

// Columns between both accesses of a lane: the lanes of a row read its first half together, then
// its second half.
constexpr int BETWEEN = ANGLES;
// Column of an access of a lane.
__device__ __forceinline__ int half_col(int access) {
  return access * BETWEEN + int(lane_in_row()) * VEC;
}

// A number for each column, in shared memory. All lanes of a row read 16 bytes at a time. Between
// the columns of two lanes are 16 bytes, so eight lanes read from all banks.
struct HeadColumns {
  static constexpr int SPACING = VEC + 4;         // of lanes
  alignas(16) float x[HEAD_DIM / VEC * SPACING];  // [HEAD_DIM / VEC, SPACING]
  __device__ __forceinline__ float& at(int col) { return x[col + col / VEC * 4]; }
  // Index of a lane's first column, and four numbers from number j of an access on.
  static __device__ __forceinline__ int first() { return lane_in_row() * SPACING; }
  __device__ __forceinline__ Vec<float, 4> four(int first, int access, int j) const {
    return *reinterpret_cast<const Vec<float, 4>*>(
        &x[first + access * (BETWEEN / VEC * SPACING) + j]);
  }
};

// Weights of Q or of K in shared memory, [WEIGHT_VECTORS].
constexpr int WEIGHT_VECTORS = NORM_BY_PART ? 2 : 1;
__device__ __forceinline__ HeadColumns* weights_of(bool of_k) {
  __shared__ HeadColumns weight[2][WEIGHT_VECTORS];
  return weight[of_k];
}
// Copies them there. A barrier must follow before they are read.
template <typename Params>
__device__ __forceinline__ void share_weights(const Params& q, const Params& k) {
#pragma unroll 1
  for (int i = thread_id(); i < 2 * WEIGHT_VECTORS * HEAD_DIM; i += NUM_THREADS) {
    const bool of_k = i >= WEIGHT_VECTORS * HEAD_DIM;
    const int nth = of_k ? i - WEIGHT_VECTORS * HEAD_DIM : i;
    const float* weight = of_k ? k.weight : q.weight;
    if (weight != nullptr) weights_of(of_k)[nth / HEAD_DIM].at(nth % HEAD_DIM) = weight[nth];
  }
}

// A lane's numbers of both tables for one token, in PARTS of PAIRS pairs. If pairs are neighbours,
// a part lies in one half of the row; otherwise in both.
struct TableRow {
  static constexpr int PAIRS = 4, PARTS = ceil_div(ROPE_PAIRS, PAIRS);
  RopeNumbers<PAIRS> cos[PARTS], sin[PARTS];
  // Bytes from the first row of a table to a lane's numbers in row `row`.
  static __device__ __forceinline__ int64_t offset(int row) {
    return (int64_t(row) * ROPE_TABLE + half_col(0)) * 4;
  }
  __device__ __forceinline__ void load(const float* of_cos, const float* of_sin, int64_t offset) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) load_part(of_cos, of_sin, offset, part);
  }
  __device__ __forceinline__ void load_part(
      const float* of_cos, const float* of_sin, int64_t offset, int part) {
    auto at = [&](const float* table) {
      return reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + offset);
    };
    const int pair0 = ROPE_INTERLEAVED ? 0 : part * PAIRS;
    const int further = ROPE_INTERLEAVED ? part * BETWEEN : 0;
    cos[part] = RopeNumbers<PAIRS>(at(of_cos) + further, pair0);
    sin[part] = RopeNumbers<PAIRS>(at(of_sin) + further, pair0);
  }
  __device__ __forceinline__ void turn(PreparedRow& x, int part) const {
    x.of[0].template turn<PAIRS>(part * PAIRS, cos[part], sin[part]);
  }
};

// Loads a lane's part of a row, whose first column for the lane is `row`.
__device__ __forceinline__ void load_row(
    Words<elem_t, VEC> (&words)[LANE_ACCESSES], const elem_t* row) {
#pragma unroll
  for (int a = 0; a < LANE_ACCESSES; ++a)
    words[a] = *reinterpret_cast<const Words<elem_t, VEC>*>(row + a * BETWEEN);
}
// Adds N numbers over groups of LANES lanes, each as shfl_sum_of_neighbours does, with fewer
// exchanges. A lane gets one sum: its lowest bits are the bits of the number's index in reverse.
template <int LANES, int N>
__device__ __forceinline__ float scatter_sum_of_neighbours(float (&x)[N]) {
  static_assert(N <= LANES);
#pragma unroll
  for (int offset = 1; offset < LANES; offset *= 2) {
    const int left = N / offset / 2;
    if (left == 0) {
      x[0] = __fadd_rn(x[0], __shfl_xor_sync(FULL_WARP, x[0], offset));
      continue;
    }
    const bool second = threadIdx.x & offset;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float sent = second ? x[i] : x[i + left], kept = second ? x[i + left] : x[i];
      x[i] = __fadd_rn(kept, __shfl_xor_sync(FULL_WARP, sent, offset));
    }
  }
  return x[0];
}
// Converts rows, and multiplies them by the factors that normalise them. A lane computes the factor
// of one row.
template <int ROWS>
__device__ __forceinline__ void rows_of_words(
    PreparedRow (&row)[ROWS], const Words<elem_t, VEC> (&words)[ROWS][LANE_ACCESSES], float eps) {
  // The squares of neighbours are added first. So halves of a row are added last if pairs are
  // neighbours, and first if pairs have a column of each half.
  constexpr int HALVES = ROPE_INTERLEAVED ? 2 : 1, PAIRS = ROPE_PAIRS / HALVES;
  float sums[ROWS * HALVES];  // [ROWS, HALVES]
#pragma unroll
  for (int i = 0; i < ROWS * HALVES; ++i) {
    if (i % HALVES == 0) Rowwise<true>::convert(row[i / HALVES], words[i / HALVES]);
    float terms[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) terms[j] = row[i / HALVES].square(0, i % HALVES * PAIRS + j);
    sums[i] = sum_of_neighbours(terms);
  }
  float sum = scatter_sum_of_neighbours<PAIR_LANES>(sums);
  if constexpr (HALVES > 1) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, ROWS));
  const float own = norm_factor(of_head_dim(sum), eps);
  float factor[ROWS] = {own};
  if constexpr (ROWS == 2) {
    const float other = __shfl_xor_sync(FULL_WARP, own, 1);
    const bool second = threadIdx.x % 2;
    factor[0] = second ? other : own, factor[1] = second ? own : other;
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int access = 0; access < LANE_ACCESSES; ++access)
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        row[i].element(access, j) = __fmul_rn(row[i].element(access, j), factor[i]);
}
// Multiplies four numbers of an access by their weights.
__device__ __forceinline__ void weigh_four(
    PreparedRow& row, int access, int j, const Vec<float, 4>& weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& x = row.element(access, j + i);
    x = __fmul_rn(x, weight.v[i]);
  }
}
// Multiplies rows of a token by their weights, and rotates them.
template <int ROWS>
__device__ __forceinline__ void finish_rows(
    PreparedRow (&row)[ROWS], const HeadColumns& weights, int first_col, const TableRow& tables) {
#pragma unroll
  for (int access = 0; access < LANE_ACCESSES; ++access)
#pragma unroll
    for (int j = 0; j < VEC; j += 4) {
      const auto weight = weights.four(first_col, access, j);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) weigh_four(row[i], access, j, weight);
    }
#pragma unroll
  for (int part = 0; part < TableRow::PARTS; ++part)
#pragma unroll
    for (int i = 0; i < ROWS; ++i) tables.turn(row[i], part);
}
// Keeps a number in a register, so that it is not computed again at each use.
__device__ __forceinline__ void keep(int& x) { asm volatile("" : "+r"(x)); }
// Raises the largest magnitude of a row to that of a number. A NaN stays.
__device__ __forceinline__ void admit(float& most, float x) { most = max_nan(most, fabsf(x)); }

// Numbers 4 i to 4 i + 3 of a lane's part of a row.
__device__ __forceinline__ Vec<float, 4> four_of(const PreparedRow& row, int i) {
  Vec<float, 4> found;
#pragma unroll
  for (int j = 0; j < 4; ++j) found.v[j] = row.element(i * 4 / VEC, i * 4 % VEC + j);
  return found;
}
// Stores a lane's codes of a row, from its first column on: four(i) returns numbers 4 i to 4 i + 3.
template <typename Four>
__device__ __forceinline__ void store_codes(int8_t* codes, const Coding& of_row, Four four) {
#pragma unroll
  for (int a = 0; a < LANE_ACCESSES; ++a) {
    float scaled[VEC];
#pragma unroll
    for (int j = 0; j < VEC; j += 4) {
      const auto x = four((a * VEC + j) / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[j + i] = of_row.scaled(x.v[i]);  // R1
    }
    store_rounded_s8(codes + a * BETWEEN, scaled);
  }
}
struct FourKept {
  const PreparedRow& row;
  __device__ __forceinline__ Vec<float, 4> operator()(int i) const { return four_of(row, i); }
};

// Rows that wait for the scales of their groups. A unit of a warp has the rows of TOKENS tokens in
// TOGETHER heads, and TOGETHER rows of a lane.
template <typename Cut>
struct HeadRowsShared {
  static constexpr int TOGETHER = Cut::HEADS > 1 && ROWS_HELD > 1 ? ROWS_TOGETHER : 1;
  static constexpr int TOKENS = WARP_SIZE / LANES;
  static constexpr int HEAD_UNITS = Cut::HEADS / TOGETHER;  // units of the same tokens
  static constexpr int STEP = NUM_WARPS * TOKENS;           // rows from unit to unit
  static constexpr int UNITS =                              // of a warp
      HEAD_UNITS * ceil_div(Cut::ROWS / Cut::HEADS, STEP);
  static constexpr int HELD = UNITS < ROWS_HELD / TOGETHER ? UNITS : ROWS_HELD / TOGETHER;
  static constexpr int FOURS = ceil_div(LANE_ACCESSES * VEC, 4);  // of a row of a lane
  static constexpr int KEPT = UNITS - HELD;                       // units that stay in registers
  HeadColumns mean[Cut::MEAN ? Cut::HEADS : 1];                   // [HEADS]
  Vec<float, 4> held[HELD][TOGETHER][FOURS][NUM_THREADS];  // a lane's rows, as numbers to code
};

// A lane's part of the block's rows. Past the last row, a row before the end is repeated: it adds
// nothing to the reach of its group, and is not stored.
template <typename Cut>
struct HeadRows {
  using Shared = HeadRowsShared<Cut>;
  static constexpr int ROWS = Cut::ROWS / Cut::HEADS;      // of a head
  static constexpr int GROUPS = Cut::GROUPS / Cut::HEADS;  // of a head
  static constexpr int UNITS = Shared::UNITS, HELD = Shared::HELD, KEPT = Shared::KEPT,
                       TOGETHER = Shared::TOGETHER, STEP = Shared::STEP;
  // Whether row i of a lane belongs to the same group in all units.
  static constexpr bool ONE_GROUP = GROUPS == 1 && Shared::HEAD_UNITS == 1;
  // Whether tables of the next unit are on their way while rows are finished.
  static constexpr bool TABLES_AHEAD = ROWS_TOGETHER > 1 && Shared::HEAD_UNITS == 1;
  Words<elem_t, VEC> next[TOGETHER][LANE_ACCESSES];  // of the next unit
  TableRow tables;
  PreparedRow kept[KEPT > 0 ? KEPT : 1][TOGETHER];
  Reach reach[TOGETHER];
  int row0;         // row of this lane in the first unit
  int rows;         // of a head that exist
  int units;        // in which this warp has rows
  const elem_t* X;  // [rows, HEAD_DIM], from the columns of this lane on

  __device__ __forceinline__ HeadRows(const QuantizeParams& p, const Place& at) {
    row0 = row_in_pass();
    rows = min(at.rows, ROWS);
    const int own = rows - warp_id() * Shared::TOKENS;
    units = own > 0 ? min(ceil_div(own, STEP) * Shared::HEAD_UNITS, UNITS) : 0;
    X = at.X(p) + min(row0, rows - 1) * p.X_stride.len + half_col(0);
    load(p, 0);
    if constexpr (TABLES_AHEAD) load_tables(Rowwise<true>(p, at).how, 0);
  }
  static __device__ __forceinline__ int head_of(int unit, int i) {
    return unit % Shared::HEAD_UNITS * TOGETHER + i;
  }
  __device__ __forceinline__ int row_of(int unit) const {
    return unit / Shared::HEAD_UNITS * STEP + row0;
  }
  __device__ __forceinline__ int group_of(int unit, int i) const {
    return head_of(unit, i) * GROUPS + uint32_t(min(row_of(unit), ROWS - 1)) / Cut::GROUP;
  }
  __device__ __forceinline__ void load(const QuantizeParams& p, int unit) {
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) load_row(next[i], X + head_of(unit, i) * p.X_stride.head);
  }
  __device__ __forceinline__ void load_next(const QuantizeParams& p, int unit) {
    if ((unit + 1) % Shared::HEAD_UNITS == 0 && row_of(unit + 1) < rows) X += STEP * p.X_stride.len;
    load(p, unit + 1);
  }
  __device__ __forceinline__ void load_tables(const Preparation& how, int unit) {
    tables.load(how.cos, how.sin, TableRow::offset(min(row_of(unit), rows - 1)));
  }

  // Copies means to shared memory, which is free before. The whole block takes part.
  __device__ __forceinline__ void share(Shared& shared, const QuantizeParams& p, const Place& at) {
    if constexpr (Cut::MEAN)
#pragma unroll 1
      for (int i = thread_id(); i < Cut::HEADS * HEAD_DIM; i += NUM_THREADS)
        shared.mean[i / HEAD_DIM].at(i % HEAD_DIM) =
            channel_mean(p, at.of_head(i / HEAD_DIM), i % HEAD_DIM);
  }

  // Prepares the rows, subtracts the mean of their head, and raises the reach of every group.
  __device__ __forceinline__ void begin(
      Shared& shared, const QuantizeParams& p, const Place& at,
      uint32_t (&of_groups)[Cut::GROUPS]) {
    const Preparation how = Rowwise<true>(p, at).how;
    auto* held = &shared.held[0][0][0][thread_id()];
    int first_col = HeadColumns::first();
    keep(first_col);
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) reach[i] = {};
#pragma unroll 1
    for (int unit = 0; unit < min(HELD, units); ++unit) {
      PreparedRow row[TOGETHER];
      make(row, shared, p, how, first_col, unit, of_groups);
#pragma unroll
      for (int i = 0; i < TOGETHER * Shared::FOURS; ++i)
        held[i * NUM_THREADS] = four_of(row[i / Shared::FOURS], i % Shared::FOURS);
      held += TOGETHER * Shared::FOURS * NUM_THREADS;
    }
#pragma unroll
    for (int nth = 0; nth < KEPT; ++nth)
      if (HELD + nth < units) make(kept[nth], shared, p, how, first_col, HELD + nth, of_groups);
    if constexpr (ONE_GROUP)
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        reach[i] = shfl_max<WARP_SIZE>(reach[i]);
        if (lane_id() == 0) reach[i].raise(&of_groups[i]);
      }
  }

  // The same for one unit, whose rows it returns. Requests the next unit.
  __device__ __forceinline__ void make(
      PreparedRow (&row)[TOGETHER], const Shared& shared, const QuantizeParams& p,
      const Preparation& how, int first_col, int unit, uint32_t (&of_groups)[Cut::GROUPS]) {
    const int at = row_of(unit);
    if constexpr (!TABLES_AHEAD) load_tables(how, unit);
    rows_of_words(row, next, how.eps);
    __syncwarp();  // no hazard: weights are not read before, when words take registers
    if (unit + 1 < UNITS) load_next(p, unit);
    finish_rows(row, weights_of(Cut::MEAN)[NORM_BY_PART && at >= how.split], first_col, tables);
    if (TABLES_AHEAD && unit + 1 < UNITS) load_tables(how, unit + 1);
    float most[TOGETHER] = {};
#pragma unroll
    for (int access = 0; access < LANE_ACCESSES; ++access)
#pragma unroll
      for (int j = 0; j < VEC; j += 4)
#pragma unroll
        for (int nth = 0; nth < TOGETHER; ++nth) {
          Vec<float, 4> mean = {};
          if constexpr (Cut::MEAN)
            mean = shared.mean[head_of(unit, nth)].four(first_col, access, j);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& x = row[nth].element(access, j + i);
            if constexpr (Cut::MEAN) x = __fsub_rn(x, mean.v[i]);  // R0
            admit(most[nth], x);
          }
        }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      Reach found = {at < rows ? __float_as_uint(most[i]) : 0};
      if constexpr (ONE_GROUP) {
        reach[i].admit(found);
      } else {
        found = shfl_max<LANES>(found);
        if (lane_in_row() == 0 && at < rows) found.raise(&of_groups[group_of(unit, i)]);
      }
    }
  }

  // Stores the codes of the rows.
  __device__ __forceinline__ void store(
      const Shared& shared, const QuantizeParams& p, const Place& at,
      const Coding (&coding)[Cut::GROUPS]) const {
    const int64_t pitch = int64_t(PACKED ? p.total : p.length) * CODES_PITCH;  // of heads
    int8_t* codes = at.codes(p) + row0 * CODES_PITCH + half_col(0);
    const auto* held = &shared.held[0][0][0][thread_id()];
    auto row = [&](int unit, int i) {  // codes of row i of this lane, from its first column on
      return codes + head_of(unit, i) * pitch + unit / Shared::HEAD_UNITS * STEP * CODES_PITCH;
    };
#pragma unroll 1
    for (int unit = 0; unit < min(HELD, units); ++unit) {
      if (row_of(unit) < rows)
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
          store_codes(
              row(unit, i), coding[group_of(unit, i)],
              FourHeld{held + i * Shared::FOURS * NUM_THREADS});
      held += TOGETHER * Shared::FOURS * NUM_THREADS;
    }
#pragma unroll
    for (int nth = 0; nth < KEPT; ++nth)
      if (row_of(HELD + nth) < rows)
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
          store_codes(row(HELD + nth, i), coding[group_of(HELD + nth, i)], FourKept{kept[nth][i]});
  }
  struct FourHeld {
    const Vec<float, 4>* held;
    __device__ __forceinline__ Vec<float, 4> operator()(int i) const {
      return held[i * NUM_THREADS];
    }
  };
};

// Rows of groups that a warp has as a whole, without a mean: it finds their scales by itself.
template <typename Cut>
struct OwnRows {
  static constexpr int ROWS = Cut::ROWS / Cut::HEADS;  // of a head
  static constexpr int TOKENS = WARP_SIZE / LANES;     // of a warp at a time
  static constexpr int TOGETHER = ROWS_TOGETHER;
  static constexpr bool FIT = !Cut::MEAN && TOKENS % Cut::GROUP == 0;
  // Whether the words of two steps are on their way.
  static constexpr bool TWICE = TOGETHER > 1 && Cut::HEADS % (2 * TOGETHER) == 0;
  // As scale_of_absmax does for N rows, with one division a lane. `bits` is the largest magnitude
  // of row threadIdx.x % N.
  template <int N>
  static __device__ __forceinline__ void scales_of(
      float (&scale)[N], Coding (&coding)[N], uint32_t bits) {
    const bool inverse = threadIdx.x & N;
    const float raised = fmaxf(__uint_as_float(bits), QK_MAX * SCALE_MIN);
    float own = __fdiv_rn(inverse ? QK_MAX : raised, inverse ? raised : QK_MAX);
    const bool finite = bits < INFINITY_BITS;
    if (!finite || (bits == 0 && !inverse)) own = inverse ? 0.0f : finite ? 1.0f : NOT_A_NUMBER;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scale[i] = __shfl_sync(FULL_WARP, own, i, 2 * N);
      coding[i].inverse = __shfl_sync(FULL_WARP, own, N + i, 2 * N);
    }
  }
  static __device__ __forceinline__ void quantize(const QuantizeParams& p, const Place& at) {
    const HeadColumns* weights = weights_of(false);  // [WEIGHT_VECTORS]
    const Preparation how = Rowwise<true>(p, at).how;
    const int64_t pitch = int64_t(PACKED ? p.total : p.length) * CODES_PITCH;  // of heads
#pragma unroll 1
    for (int first = warp_id() * TOKENS; first < min(ROWS, at.rows); first += NUM_WARPS * TOKENS) {
      const int row = first + lane_id() / LANES, known = min(row, at.rows - 1);
      const elem_t* X = at.X(p) + known * p.X_stride.len + half_col(0);
      int8_t* codes = at.codes(p) + row * CODES_PITCH + half_col(0);
      float* scales = p.scale + at.template first_scale<Cut::GROUP>(p) + row / Cut::GROUP;
      using Loaded = Words<elem_t, VEC>[TOGETHER][LANE_ACCESSES];
      Loaded next, then;  // of this step; of the step behind it, if TWICE
      auto load = [&](Loaded& words) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) load_row(words[i], X + i * p.X_stride.head);
        X += TOGETHER * p.X_stride.head;
      };
      load(next);
      if constexpr (TWICE) load(then);
      TableRow tables;
      tables.load(how.cos, how.sin, TableRow::offset(known));
      const bool second = NORM_BY_PART && known >= how.split, exists = row < at.rows;
      int first_col = HeadColumns::first();
      keep(first_col);
#pragma unroll 1
      for (int head = 0; head < Cut::HEADS; head += TOGETHER) {
        PreparedRow own[TOGETHER];
        rows_of_words(own, next, how.eps);
        __syncwarp();  // no hazard: weights are not read before, when words take registers
        if constexpr (TWICE) {
#pragma unroll
          for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
            for (int a = 0; a < LANE_ACCESSES; ++a) next[i][a] = then[i][a];
          if (head + 2 * TOGETHER < Cut::HEADS) load(then);
        } else if (head + TOGETHER < Cut::HEADS) {
          load(next);
        }
        finish_rows(own, weights[second], first_col, tables);
        float most[TOGETHER] = {};
#pragma unroll
        for (int a = 0; a < LANE_ACCESSES; ++a)
#pragma unroll
          for (int j = 0; j < VEC; ++j)
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) admit(most[i], own[i].element(a, j));
        uint32_t bits = __float_as_uint(most[0]);
        if constexpr (TOGETHER == 2) {  // every second lane takes the second row
          const uint32_t more = __float_as_uint(most[1]);
          const bool second = threadIdx.x % 2;
          bits = max(second ? more : bits, __shfl_xor_sync(FULL_WARP, second ? bits : more, 1));
        }
#pragma unroll
        for (int offset = TOGETHER; offset < LANES * Cut::GROUP; offset *= 2)
          bits = max(bits, __shfl_xor_sync(FULL_WARP, bits, offset));
        Coding coding[TOGETHER];
        float scale[TOGETHER];
        scales_of(scale, coding, bits);  // R1
        if (exists)
#pragma unroll
          for (int i = 0; i < TOGETHER; ++i) {
            if (lane_id() % (LANES * Cut::GROUP) == 0) scales[i * p.scale_stride_head] = scale[i];
            store_codes(codes + i * pitch, coding[i], FourKept{own[i]});
          }
        scales += TOGETHER * p.scale_stride_head;
        codes += TOGETHER * pitch;
      }
    }
  }
};
