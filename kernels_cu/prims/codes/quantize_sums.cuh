// quantize_sums.cuh -- reductions over the rows of a head, slice by slice: the sum of every channel
// over the rows of its mean. Over all rows, also its least and largest numbers.
#pragma once

#include "prims/codes/quantize_heads.cuh"

// Rows that a sum waits for at once, and at the end of a head, where some may not exist.
constexpr int ROWS_IN_FLIGHT = ceil_div(FACTORS_FIRST ? 4 : 8, LANE_ACCESSES),
              ROWS_AT_END = ceil_div(2, LANE_ACCESSES);

// The same for rows that are prepared as rows of several heads are. At HEAD_DIM 128 the registers
// of two blocks hold two rows, unless weights by part meet pairs of halves. Elsewhere two spill.
constexpr int UNITS_IN_FLIGHT =
    HEAD_DIM == 128 && (ROPE_INTERLEAVED || !NORM_BY_PART) ? ROWS_TOGETHER : 1;

// Rows that are combined in shared memory: all rows of a pass, or one for each warp if a pass has
// twice as many. It has if lanes prepare rows, because they then have twice the columns.
constexpr int FOLDED_ROWS = PREPARED ? NUM_WARPS : ROWS_PER_PASS;
__device__ __forceinline__ int folded_row() { return PREPARED ? warp_id() : row_in_pass(); }
template <bool HALVES>  // whether lanes have columns of both halves
__device__ __forceinline__ int folded_col(int access) {
  if (PREPARED && lane_id() >= LANES) return HEAD_DIM;
  if constexpr (HALVES) return half_col(access);
  return col_of(access);
}

// Shared memory of the block, for one piece of work after the other. For codes of V it holds a
// tile.
constexpr int FOLD_WORDS = FOLDED_ROWS * HEAD_DIM,
              TILE_WORDS = STEP_V == Step::VALUES ? BLOCK_COLS * VALUES_PAD / 4 : 0,
              SPACE_WORDS = FOLD_WORDS > TILE_WORDS ? FOLD_WORDS : TILE_WORDS;
__device__ __forceinline__ uint32_t* shared_space() {
  __shared__ alignas(16) uint32_t space[SPACE_WORDS];
  return space;
}

// Folds the rows of a warp: its first LANES lanes get the results of all lanes for their columns.
template <typename T, typename Combine>
__device__ __forceinline__ void fold_warp(T (&of_lane)[LANE_ACCESSES][VEC], Combine combine) {
#pragma unroll
  for (int offset = LANES; offset < WARP_SIZE; offset *= 2)
#pragma unroll
    for (auto& access : of_lane)
#pragma unroll
      for (T& x : access) x = combine(x, __shfl_xor_sync(FULL_WARP, x, offset));
}

// Folds the lanes' numbers of each column, in rising order of their rows: result(column, all). The
// whole block takes part; `space` holds numbers of 4 bytes.
template <bool HALVES, typename T, typename Combine, typename Result>
__device__ __forceinline__ void fold_columns(
    uint32_t* space, T (&of_lane)[LANE_ACCESSES][VEC], Combine combine, Result result) {
  auto all = reinterpret_cast<T(*)[HEAD_DIM]>(space);  // [FOLDED_ROWS, HEAD_DIM]
  if constexpr (PREPARED) fold_warp(of_lane, combine);
  __syncthreads();  // all threads have folded the numbers before these
#pragma unroll
  for (int a = 0; a < LANE_ACCESSES; ++a)
    if (folded_col<HALVES>(a) < HEAD_DIM)
#pragma unroll
      for (int j = 0; j < VEC; ++j) all[folded_row()][folded_col<HALVES>(a) + j] = of_lane[a][j];
  __syncthreads();  // every lane's numbers are there before they are folded
  for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS) {
    T folded = all[0][col];
    for (int row = 1; row < FOLDED_ROWS; ++row) folded = combine(folded, all[row][col]);
    result(col, folded);
  }
}

// SUMS_FIRST: counts a slice whose results this block has stored. The last slice of a head waits
// for the others. It publishes the sums of all, and stores the extrema of all in place of the
// first.
template <bool EXTREMA>
__device__ __forceinline__ void count_slice(const QuantizeParams& p, const Place& at) {
  int32_t* summed = p.summed_slices + at.batch_head;
  if (at.slice + 1 == p.splits)
    for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS) {
      await_count(summed, at.slice);
      publish(p.head_sum + at.batch_head * HEAD_DIM + col, sum_of_slices(p, at, col));
      if constexpr (EXTREMA) {
        const auto [least, most] = extrema_of_slices(p, at, p.splits, col);
        at.extrema(p, 0)[col] = least;
        at.extrema(p, 0)[HEAD_DIM + col] = most;
      }
    }
  __syncthreads();  // every thread has stored before the block counts
  if (thread_id() == 0) red_release_add(summed, 1);
}

// Of a lane's channels, over its rows in rising order.
template <bool EXTREMA, bool ROWS_PREPARED>
struct LaneSums {
  float sum[LANE_ACCESSES][VEC] = {};
  Ends<typename Rowwise<ROWS_PREPARED>::Number, VEC> ends[LANE_ACCESSES];

  // All rows of the slice, ROWS of a lane at a time: next rows are on their way while a lane adds
  // these. Past the last row, the last row is repeated, and adds nothing.
  template <int ROWS, typename Params>  // that have a Preparation
  __device__ __forceinline__ void add_rows(const Params& p, const Place& at, float eps) {
    if (at.rows <= 0) return;                      // an empty sequence has no row to repeat
    const HeadColumns* weight = weights_of(true);  // [WEIGHT_VECTORS] of K: Q has no such sums
    const elem_t* X = at.X(p) + half_col(0);  // [rows, HEAD_DIM], from the columns of this lane on
    constexpr bool AHEAD = ROWS > 1;          // whether first parts of tables are on their way, too
    Words<elem_t, VEC> next[ROWS][LANE_ACCESSES];
    TableRow tables[ROWS];
    int row[ROWS];  // of the head
    auto find_rows = [&](int row0) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        row[i] = row_of_mean(
            at.row0 + min(row0 + i * ROWS_PER_PASS + row_in_pass(), at.rows - 1), at.length);
    };
    auto load = [&] {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) load_row(next[i], X + (row[i] - at.row0) * p.X_stride.len);
    };
    auto load_tables = [&](int i, int part) {
      tables[i].load_part(p.cos, p.sin, TableRow::offset(p.position + row[i]), part);
    };
    auto load_first = [&] {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) load_tables(i, 0);
    };
    constexpr int LAST = TableRow::PARTS - 1;
    find_rows(0);
    load();
    if constexpr (AHEAD) load_first();
    int first_col = HeadColumns::first();
    keep(first_col);
#pragma unroll 1
    for (int row0 = 0; row0 < at.rows; row0 += ROWS * ROWS_PER_PASS) {
      PreparedRow made[ROWS];
      rows_of_words(made, next, eps);
      __syncwarp();  // no hazard: weights and tables are not read before, when words take registers
      if constexpr (!AHEAD) load_first();
      load_tables(0, LAST);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const HeadColumns& own = weight[NORM_BY_PART && row[i] >= int(p.weight_step)];
#pragma unroll
        for (int a = 0; a < LANE_ACCESSES; ++a)
#pragma unroll
          for (int j = 0; j < VEC; j += 4) weigh_four(made[i], a, j, own.four(first_col, a, j));
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        tables[i].turn(made[i], 0);
        if (i + 1 == ROWS) continue;
        __syncwarp();  // no hazard: the next numbers take the registers of these
        load_tables(i + 1, LAST);
      }
      find_rows(row0 + ROWS * ROWS_PER_PASS);
      __syncwarp();  // no hazard: the next words take the registers of first parts
      load();
#pragma unroll
      for (int i = 0; i < ROWS; ++i) tables[i].turn(made[i], LAST);
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        if (row0 + i * ROWS_PER_PASS + row_in_pass() < at.rows)
#pragma unroll
          for (int a = 0; a < LANE_ACCESSES; ++a)
#pragma unroll
            for (int j = 0; j < VEC; ++j) sum[a][j] += made[i].element(a, j);
      if constexpr (AHEAD) {
        __syncwarp();  // no hazard: the next tables take the registers of these rows
        load_first();
      }
    }
  }

  // ROWS rows of the slice from row0 on, one of each pass. WHOLE: all of them exist. Otherwise the
  // last row is repeated past the end, and adds nothing.
  template <bool WHOLE, int ROWS>
  __device__ __forceinline__ void add(
      const QuantizeParams& p, const Place& at, const Rowwise<ROWS_PREPARED>& rowwise, int row0) {
    const elem_t* X = at.X(p);  // [rows, HEAD_DIM]
    Words<elem_t, VEC> x[ROWS][LANE_ACCESSES];
    auto row_at = [&](int nth) {
      const int last = WHOLE ? nth : min(nth, at.rows - 1);
      return EXTREMA ? last : row_of_mean(at.row0 + last, at.length) - at.row0;
    };
    auto row_of_pass = [&](int i) { return row_at(row0 + i * ROWS_PER_PASS); };
    int row[ROWS], place[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      row[i] = row_of_pass(i);
      place[i] = at.place(p, row[i]);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) {
        x[i][a] = {};
        if (col_of(a) < HEAD_DIM)
          x[i][a] = *reinterpret_cast<const Words<elem_t, VEC>*>(
              X + place[i] * p.X_stride.len + col_of(a));
      }
    if constexpr (ROWS_PREPARED) {  // computed again: keeping it takes registers
      asm volatile("" : "+r"(row0));
#pragma unroll
      for (int i = 0; i < ROWS; ++i) row[i] = row_of_pass(i);
    }
    float factor[ROWS];
    rowwise.find_factors(x, factor);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) x[i][a].use_from_here();
      const auto numbers = rowwise.row(x[i], row[i], factor[i]);
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) {
        if constexpr (EXTREMA) ends[a].admit(rowwise.words(numbers, a));
        if ((WHOLE || row0 + i * ROWS_PER_PASS < at.rows) &&
            (!EXTREMA || is_of_mean(at.row0 + row[i], at.length)))
#pragma unroll
          for (int j = 0; j < VEC; ++j) sum[a][j] += numbers.element(a, j);
      }
    }
  }
};

template <bool EXTREMA, bool ROWS_PREPARED>
__device__ __forceinline__ void sum_slice(const QuantizeParams& p, uint32_t block) {
  uint32_t* space = shared_space();  // for one fold after the other
  const Place at(p, block, p.split_rows, !EXTREMA);
  const Rowwise<ROWS_PREPARED> rowwise(p, at);
  LaneSums<EXTREMA, ROWS_PREPARED> own;
  constexpr int TOGETHER = ROWS_IN_FLIGHT * ROWS_PER_PASS, AT_END = ROWS_AT_END * ROWS_PER_PASS;
  constexpr bool HALVES = ROWS_PREPARED && K_BY_UNITS && !EXTREMA;
  if constexpr (HALVES) {
    own.template add_rows<UNITS_IN_FLIGHT>(p, at, rowwise.how.eps);
  } else {
    int row0 = 0;
#pragma unroll 1
    for (; row0 + TOGETHER <= at.rows; row0 += TOGETHER)
      own.template add<true, ROWS_IN_FLIGHT>(p, at, rowwise, row0 + row_in_pass());
#pragma unroll 1
    for (; row0 < at.rows; row0 += AT_END)
      own.template add<false, ROWS_AT_END>(p, at, rowwise, row0 + row_in_pass());
  }
  float* sums = at.partial_sum(p, at.slice);  // [HEAD_DIM]
  fold_columns<HALVES>(
      space, own.sum, [](float a, float b) { return a + b; },
      [&](int col, float x) { sums[col] = x; });
  if constexpr (EXTREMA) {
    uint32_t least[LANE_ACCESSES][VEC], most[LANE_ACCESSES][VEC];
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        least[a][j] = ordered_bits(own.ends[a].least.element(j));
        most[a][j] = ordered_bits(own.ends[a].most.element(j));
      }
    uint32_t* extrema = at.extrema(p, at.slice);  // [2, HEAD_DIM]
    fold_columns<false>(
        space, least, [](uint32_t a, uint32_t b) { return min(a, b); },
        [&](int col, uint32_t x) { extrema[col] = x; });
    fold_columns<false>(
        space, most, [](uint32_t a, uint32_t b) { return max(a, b); },
        [&](int col, uint32_t x) { extrema[HEAD_DIM + col] = x; });
  }
  if constexpr (SUMS_FIRST) count_slice<EXTREMA>(p, at);
}
