// quantize_heads.cuh -- rows of the same tokens of several heads in one block. Rows that are
// prepared read 8 bytes of rotation tables a number, and 2 of their own. The heads of a block share
// what a lane has read of both tables, and of weights.
#pragma once

#include "prims/codes/quantize_rows.cuh"

// Both tables are read with the rows, before anything waits, if a lane has one row of each head.
constexpr bool TABLES_WITH_ROWS = true;

// Prepared rows of a lane in registers. Further rows lie in shared memory until they are coded.
constexpr int ROWS_KEPT = 4;

// Numbers of a head in shared memory, where all lanes of a row read 16 bytes at a time. Between the
// columns of two lanes are 16 bytes, so that eight lanes read from all banks.
struct HeadColumns {
  static constexpr int OF_LANE = ROPE_INTERLEAVED ? 2 * ROPE_PAIRS : ROPE_PAIRS;
  alignas(16) float x[HEAD_DIM + HEAD_DIM / OF_LANE * 4];
  __device__ __forceinline__ float& at(int col) { return x[col + col / OF_LANE * 4]; }
  __device__ __forceinline__ Vec<float, 4> four(int col) const {
    return *reinterpret_cast<const Vec<float, 4>*>(&x[col + col / OF_LANE * 4]);
  }
};

// What a lane has of both tables for one token.
struct TableRow {
  static constexpr int PAIRS = 4, PARTS = ceil_div(ROPE_PAIRS, PAIRS);
  RopeNumbers<PAIRS> cos[LANE_PAIRS][PARTS], sin[LANE_PAIRS][PARTS];
  __device__ __forceinline__ void load(const Preparation& how, int row, int i, int part) {
    const int64_t first =
        int64_t(row) * ROPE_TABLE + RopePairs<float>::table_column(PreparedRow::pair0(i));
    cos[i][part] = RopeNumbers<PAIRS>(how.cos + first, part * PAIRS);
    sin[i][part] = RopeNumbers<PAIRS>(how.sin + first, part * PAIRS);
  }
  __device__ __forceinline__ void turn(PreparedRow& x, int i, int part) const {
    x.of[i].template turn<PAIRS>(part * PAIRS, cos[i][part], sin[i][part]);
  }
};

template <typename Cut>
struct HeadRowsShared {
  static constexpr int WEIGHTS = NORM_BY_PART ? 2 : 1;  // vectors
  static constexpr int PASSES = ceil_div(Cut::ROWS / Cut::HEADS, ROWS_PER_PASS) * Cut::HEADS;
  static constexpr int HELD = PASSES > ROWS_KEPT ? PASSES - ROWS_KEPT : 0;  // rows of a lane
  static constexpr int FOURS = ceil_div(LANE_ACCESSES * VEC, 4);            // of a row of a lane
  HeadColumns weight[WEIGHTS], mean[Cut::MEAN ? Cut::HEADS : 1];
  Vec<float, 4> held[HELD > 0 ? HELD : 1][FOURS][HELD > 0 ? NUM_THREADS : 1];
};

// A lane's part of the block's rows, head after head. Past the last row, the last row is repeated:
// it adds nothing to the reach of its group, and is not stored.
template <typename Cut>
struct HeadRows {
  using Shared = HeadRowsShared<Cut>;
  static constexpr int ROWS = Cut::ROWS / Cut::HEADS;      // of a head
  static constexpr int GROUPS = Cut::GROUPS / Cut::HEADS;  // of a head
  static constexpr int PASSES = Shared::PASSES, HEAD_PASSES = PASSES / Cut::HEADS;
  static constexpr bool TABLES_FIRST = TABLES_WITH_ROWS && HEAD_PASSES == 1;
  static_assert(
      Cut::HEADS > 1 && FACTORS_FIRST && !QK_ROTATE && !ZERO_POINTS && VEC == 8 &&
          LANES * LANE_ACCESSES * VEC == HEAD_DIM,
      "heads share a block if they are normalised each and turned by column, in 16 bits");
  static_assert(Shared::HELD <= HEAD_PASSES, "more rows are held than the last head has");
  static_assert(
      Cut::ROWS % Cut::HEADS == 0 && ROWS % Cut::GROUP == 0,
      "a block of several heads must hold whole groups of each");
  Words<elem_t, VEC> x[PASSES][LANE_ACCESSES];
  PreparedRow made[ROWS_KEPT];
  Reach reach[PASSES];
  TableRow tables;

  static __device__ __forceinline__ int head_of(int pass) { return pass / HEAD_PASSES; }
  static __device__ __forceinline__ int row_in_head(int pass) { return row_of(pass % HEAD_PASSES); }
  static __device__ __forceinline__ int group_of(int pass) {
    return head_of(pass) * GROUPS + uint32_t(min(row_in_head(pass), ROWS - 1)) / Cut::GROUP;
  }

  // Whether this warp has rows in a pass. Otherwise it skips the pass.
  // NOTE: without the branch the compiler mixes the passes, and spills.
  static __device__ __forceinline__ bool has_rows(const Place& at, int pass) {
    return pass * ROWS_PER_PASS + warp_id() * (WARP_SIZE / LANES) < at.rows;
  }

  __device__ __forceinline__ void load(const QuantizeParams& p, const Place& at) {
    const elem_t* X = at.X(p);  // [HEADS, rows, HEAD_DIM]
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const elem_t* row = X + head_of(pass) * p.X_stride.head +
                          min(row_in_head(pass), at.rows - 1) * p.X_stride.len;
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a)
        x[pass][a] = *reinterpret_cast<const Words<elem_t, VEC>*>(row + col_of(a));
    }
    if constexpr (TABLES_FIRST) {
      const Rowwise<true> rowwise(p, at);
#pragma unroll
      for (int i = 0; i < LANE_PAIRS; ++i)
#pragma unroll
        for (int part = 0; part < TableRow::PARTS; ++part)
          tables.load(rowwise.how, min(row_in_head(0), at.rows - 1), i, part);
    }
  }

  // Fills shared memory, which is free before. The whole block takes part.
  __device__ __forceinline__ void share(Shared& shared, const QuantizeParams& p, const Place& at) {
    const float* weight = Rowwise<true>(p, at).how.weight;
#pragma unroll 1
    for (int i = thread_id(); i < Shared::WEIGHTS * HEAD_DIM; i += NUM_THREADS)
      shared.weight[i / HEAD_DIM].at(i % HEAD_DIM) = weight[i];
    if constexpr (Cut::MEAN)
#pragma unroll 1
      for (int i = thread_id(); i < Cut::HEADS * HEAD_DIM; i += NUM_THREADS)
        shared.mean[i / HEAD_DIM].at(i % HEAD_DIM) =
            channel_mean(p, at.of_head(i / HEAD_DIM), i % HEAD_DIM);
  }

  // Rows have arrived: prepares them and subtracts the mean of their head.
  __device__ __forceinline__ void begin(Shared& shared, const QuantizeParams& p, const Place& at) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) x[pass][a].use_from_here();
    const Rowwise<true> rowwise(p, at);
    float factor[PASSES];
    rowwise.find_factors(x, factor);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) reach[pass] = {};
#pragma unroll
    for (int first = 0; first < HEAD_PASSES; ++first) {
      if (HEAD_PASSES > 1 && !has_rows(at, first)) continue;
      const int known = min(row_in_head(first), at.rows - 1);  // past the end the last row repeats
      const bool second = NORM_BY_PART && known >= rowwise.how.split;
      const HeadColumns& of_part = shared.weight[second];
      PreparedRow row[Cut::HEADS];
#pragma unroll
      for (int head = 0; head < Cut::HEADS; ++head) {
        auto& words = x[head * HEAD_PASSES + first];
#pragma unroll
        for (int a = 0; a < LANE_ACCESSES; ++a) words[a].use_from_here();  // not as floats
        rowwise.convert(row[head], words);
      }
#pragma unroll
      for (int access = 0; access < LANE_ACCESSES; ++access)
#pragma unroll
        for (int j = 0; j < VEC; j += 4) {
          const auto weight = of_part.four(col_of(access) + j);
#pragma unroll
          for (int head = 0; head < Cut::HEADS; ++head)
            row[head].weigh(access, j, factor[head * HEAD_PASSES + first], weight);
        }
#pragma unroll
      for (int i = 0; i < LANE_PAIRS; ++i)
#pragma unroll
        for (int part = 0; part < TableRow::PARTS; ++part) {
          if constexpr (!TABLES_FIRST) {
            __syncwarp();  // no hazard: tables are not read before the registers are free
            tables.load(rowwise.how, known, i, part);
          }
#pragma unroll
          for (int head = 0; head < Cut::HEADS; ++head) tables.turn(row[head], i, part);
        }
#pragma unroll
      for (int head = 0; head < Cut::HEADS; ++head)
        finish(shared, head * HEAD_PASSES + first, row[head]);
    }
  }

  // Subtracts the mean, finds the reach and keeps the row.
  __device__ __forceinline__ void finish(Shared& shared, int pass, PreparedRow& row) {
#pragma unroll
    for (int access = 0; access < LANE_ACCESSES; ++access)
#pragma unroll
      for (int j = 0; j < VEC; j += 4) {
        Vec<float, 4> mean = {};
        if constexpr (Cut::MEAN) mean = shared.mean[head_of(pass)].four(col_of(access) + j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = row.element(access, j + i);
          if constexpr (Cut::MEAN) x = __fsub_rn(x, mean.v[i]);  // R0
          reach[pass].admit(x);
        }
      }
    if (!is_held(pass))
      made[kept(pass)] = row;
    else
#pragma unroll
      for (int i = 0; i < Shared::FOURS; ++i)
        shared.held[pass % HEAD_PASSES][i][thread_id()] = four_of(row, i);
  }
  // The first rows of the last head lie in shared memory, so they take registers for a short time.
  static __device__ __forceinline__ bool is_held(int pass) {
    return head_of(pass) == Cut::HEADS - 1 && pass % HEAD_PASSES < Shared::HELD;
  }
  static __device__ __forceinline__ int kept(int pass) {
    return head_of(pass) < Cut::HEADS - 1 ? pass : pass - Shared::HELD;
  }
  static __device__ __forceinline__ Vec<float, 4> four_of(const PreparedRow& row, int i) {
    Vec<float, 4> found;
#pragma unroll
    for (int j = 0; j < 4; ++j) found.v[j] = row.element(i * 4 / VEC, i * 4 % VEC + j);
    return found;
  }

  // Raises the reach of every group, in shared memory, to that of its rows.
  __device__ __forceinline__ void raise(uint32_t (&of_groups)[Cut::GROUPS]) const {
    if constexpr (GROUPS == 1) {
#pragma unroll
      for (int head = 0; head < Cut::HEADS; ++head) {
        Reach found = {};
#pragma unroll
        for (int i = 0; i < HEAD_PASSES; ++i) found.admit(reach[head * HEAD_PASSES + i]);
        found = shfl_max<WARP_SIZE>(found);
        if (lane_id() == 0) found.raise(&of_groups[head]);
      }
    } else {
      constexpr int NUMBERS = power_of_two_from(PASSES), LEFT = ceil_div(NUMBERS, LANES);
      uint32_t most[NUMBERS] = {};
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) most[pass] = reach[pass].bits[0];
      const int first = scatter_max<LANES>(most);
#pragma unroll
      for (int i = 0; i < LEFT; ++i)
        if (first + i < PASSES && row_in_head(first + i) < ROWS)
          atomicMax(&of_groups[group_of(first + i)], most[i]);
    }
  }

  __device__ __forceinline__ void store(
      const Shared& shared, const QuantizeParams& p, const Place& at,
      const Coding (&coding)[Cut::GROUPS]) const {
    const int64_t pitch = int64_t(PACKED ? p.total : p.length) * CODES_PITCH;  // of heads
    int8_t* codes = at.codes(p) + row_in_pass() * CODES_PITCH;  // [HEADS, rows, CODES_PITCH]
    // Columns of a lane that lie side by side leave as one access.
    constexpr int SIDE_BY_SIDE = HeadColumns::OF_LANE / VEC;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (HEAD_PASSES > 1 && !has_rows(at, pass % HEAD_PASSES)) continue;
      const Coding of_row = coding[group_of(pass)];
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; a += SIDE_BY_SIDE) {
        float scaled[SIDE_BY_SIDE * VEC];
#pragma unroll
        for (int j = 0; j < SIDE_BY_SIDE * VEC; j += 4) {
          const int access = a + j / VEC;
          const int nth = (access * VEC + j % VEC) / 4;
          const auto four = is_held(pass) ? shared.held[pass % HEAD_PASSES][nth][thread_id()]
                                          : four_of(made[kept(pass)], nth);
#pragma unroll
          for (int i = 0; i < 4; ++i) scaled[j + i] = of_row.scaled(four.v[i]);  // R1
        }
        if (row_in_head(pass) < at.rows)
          store_rounded_s8(
              codes + head_of(pass) * pitch + pass % HEAD_PASSES * ROWS_PER_PASS * CODES_PITCH +
                  col_of(a),
              scaled);
      }
    }
  }
};
