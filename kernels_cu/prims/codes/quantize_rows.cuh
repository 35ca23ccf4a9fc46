// quantize_rows.cuh -- rows of an operand that a block quantises: addresses, division among lanes,
// registers of a lane, and codes of groups.
#pragma once

#include "prims/config.cuh"
#include "prims/schedule/counter.cuh"
#include "prims/params.cuh"
#include "prims/codes/quant.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int ACCESSES = HEAD_DIM / VEC;  // per row
constexpr int LANES =                     // per row
    PREPARED ? PAIR_LANES : power_of_two_from(ACCESSES < WARP_SIZE ? ACCESSES : WARP_SIZE);
constexpr int LANE_ACCESSES = PREPARED ? 2 * LANE_PAIRS : ceil_div(ACCESSES, LANES);  // of a row
constexpr int ROWS_PER_PASS = NUM_THREADS / LANES;
static_assert(
    !PREPARED || ROPE_PAIRS == VEC, "rows that are prepared need VEC to divide HEAD_DIM / 2");

// How an operand is cut: ROWS rows to a block, of HEADS neighbouring heads, GROUP to a scale, and
// whether a mean is subtracted.
template <int ROWS_, int GROUP_, int HEADS_, bool MEAN_>
struct Cut {
  static constexpr int ROWS = ROWS_, GROUP = GROUP_, HEADS = HEADS_;
  static constexpr bool MEAN = MEAN_;
  static constexpr int GROUPS = ROWS > GROUP ? ROWS / GROUP : 1;  // scales that a block needs
  static constexpr int PASSES = ceil_div(ROWS, ROWS_PER_PASS);
  static constexpr int REGISTERS =  // of a thread, that hold rows
      PASSES * LANE_ACCESSES * sizeof(Words<elem_t, VEC>) / 4;
  static_assert(GROUP >= 1, "quantize needs GROUP_Q and GROUP_KV, the rows per scale");
  static_assert(
      ROWS % GROUP == 0 || GROUP % ROWS == 0,
      "a block must hold whole groups of GROUP_Q or GROUP_KV rows, or divide a group");
  static_assert(
      HEADS == 1 || (HEADS % 2 == 0 && ROWS % (HEADS * GROUP) == 0),
      "a block of several heads must hold an even number of them, and whole groups of each");
};
using CutQ = Cut<BLOCK_Q, GROUP_Q, HEADS_Q, false>;
using CutK = Cut<BLOCK_KV, GROUP_KV, HEADS_K, true>;

// The work of a launch for an operand, its predecessor, its division, and whether rows are
// prepared.
template <Step FIRST_, Step STEP_, typename Cut_, bool PREPARED_>
struct Task {
  static constexpr bool PREPARED = PREPARED_;
  static constexpr Step FIRST = FIRST_;
  static constexpr Step STEP = STEP_;
  using Cut = Cut_;
};

// Calls run(task, parameters, block within the operand) for the operand of this block. The first
// blocks are V's, followed by K's and Q's. SUMS_FIRST: quantize_turns.cuh does it.
// NOTE: run is an object of a class, because NVRTC 13.0 takes a generic lambda for a host function.
template <typename Run>
__device__ __forceinline__ void on_its_operand(
    const QuantizeParams& q, const QuantizeParams& k, const QuantizeParams& v, Run run) {
  uint32_t block = blockIdx.x;
  if (block < v.blocks) return run(Task<FIRST_V, STEP_V, CutQ, false>(), v, block);
  block -= v.blocks;
  if (block < k.blocks) return run(Task<FIRST_K, STEP_K, CutK, PREPARED>(), k, block);
  run(Task<FIRST_Q, STEP_Q, CutQ, PREPARED>(), q, block - k.blocks);
}

// Position of a block: rows row0, row0 + 1, ... of one (batch, head), or of the rows of its mean.
// Of several heads it is the first; of_head returns the others.
struct Place {
  int64_t batch, head, batch_head;
  int slice;   // which of the parts of a head, each of as many rows
  int row0;    // first row
  int rows;    // rows of this block that exist; VARLEN: none where not positive
  int first;   // PACKED: first row of the sequence in the packed array
  int length;  // rows of this head
  __device__ __forceinline__ Place(
      const QuantizeParams& p, uint32_t block, int rows_of_block, bool of_mean = false,
      int heads_of_block = 1) {
    const uint32_t slices = of_mean ? p.splits : ceil_div(p.length, rows_of_block);
    const uint32_t index = block / slices * heads_of_block, heads = p.heads;
    batch_head = index, batch = index / heads, head = index % heads;
    slice = block % slices;
    row0 = slice * rows_of_block;
    first = 0, length = p.length;
    if constexpr (VARLEN) {
      const Sequence sequence(p.cu_seqlens, batch, p.length);
      first = sequence.first, length = sequence.length;
    }
    rows = min(rows_of_block, (of_mean ? rows_of_mean(length) : length) - row0);
  }
  __device__ __forceinline__ Place of_head(int further) const {
    Place other = *this;
    other.head += further, other.batch_head += further;
    return other;
  }
  __device__ __forceinline__ const elem_t* X(const QuantizeParams& p) const {  // [rows, HEAD_DIM]
    return static_cast<const elem_t*>(p.X) + batch * p.X_stride.batch + head * p.X_stride.head +
           (PACKED ? first + row0 : row0) * p.X_stride.len;
  }
  // The number of the first row among all tokens of the operand.
  __device__ __forceinline__ int64_t token0(const QuantizeParams& p) const {
    return PACKED ? first + row0 : batch * p.length + row0;
  }
  // The row of X for row i of this block. The places of all rows are loaded before the first row,
  // which waits for its place.
  __device__ __forceinline__ int place(const QuantizeParams& p, int i) const {
    if (!GATHERED || p.places == nullptr) return i;
    return p.places[batch_head * p.length + row0 + i] - row0;
  }
  __device__ __forceinline__ int8_t* codes(const QuantizeParams& p) const {  // [rows, CODES_PITCH]
    if constexpr (PACKED) return p.codes + (head * p.total + first + row0) * CODES_PITCH;
    return p.codes + (batch_head * p.length + row0) * CODES_PITCH;
  }
  __device__ __forceinline__ int8_t* value_codes(const QuantizeParams& p) const {
    return p.codes + (PACKED ? head : batch_head) * HEAD_DIM * p.padded +  // [HEAD_DIM, padded]
           ::first_scale<VALUES_PAD>(p.cu_seqlens, batch) * VALUES_PAD + row0;
  }
  template <int GROUP>
  __device__ __forceinline__ int64_t first_scale(const QuantizeParams& p) const {  // of this block
    return batch * p.scale_stride_batch + head * p.scale_stride_head +
           ::first_scale<GROUP>(p.cu_seqlens, batch) + row0 / GROUP;
  }
  __device__ __forceinline__ int32_t* code_sum(const QuantizeParams& p) const {  // [rows]
    return p.code_sum + batch * p.sum_stride_batch + head * p.sum_stride_head +
           ::first_scale<1>(p.cu_seqlens, batch) + row0;
  }
  // Sums and extrema of slice `split` of the head.
  __device__ __forceinline__ float* partial_sum(const QuantizeParams& p, int split) const {
    return p.partial_sum + (batch_head * p.splits + split) * HEAD_DIM;  // [HEAD_DIM]
  }
  __device__ __forceinline__ uint32_t* extrema(const QuantizeParams& p, int split) const {
    return p.extrema + (batch_head * p.splits + split) * 2 * HEAD_DIM;  // [2, HEAD_DIM]
  }
};

// The same, computed again: keeping it meanwhile would take registers that rows need.
__device__ __forceinline__ Place
again(const QuantizeParams& p, uint32_t block, int rows_of_block, int heads_of_block = 1) {
  asm volatile("" : "+r"(block));
  return Place(p, block, rows_of_block, false, heads_of_block);
}

__device__ __forceinline__ int lane_in_row() { return threadIdx.x % LANES; }
__device__ __forceinline__ int row_in_pass() { return threadIdx.x / LANES; }
__device__ __forceinline__ int row_of(int pass) { return pass * ROWS_PER_PASS + row_in_pass(); }
__device__ __forceinline__ int col_of(int access) {
  return PREPARED ? PreparedRow::column(access) : (access * LANES + lane_in_row()) * VEC;
}

// ---- results of slices --------------------------------------------------------------------------

constexpr int SPLITS_IN_FLIGHT = SUMS_FIRST ? 8 : 16;  // that a sum waits for at once

// The sum of the slices of a head, in rising order.
__device__ __forceinline__ float sum_of_slices(const QuantizeParams& p, const Place& at, int col) {
  const float* sums = at.partial_sum(p, 0) + col;
  float total = 0.0f;
  for (int split0 = 0; split0 < p.splits; split0 += SPLITS_IN_FLIGHT) {
    float some[SPLITS_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < SPLITS_IN_FLIGHT; ++i)
      some[i] = split0 + i < p.splits ? sums[(split0 + i) * HEAD_DIM] : 0.0f;
#pragma unroll
    for (float x : some) total += x;
  }
  return total;
}

// The least and the largest number of a column, as ordered_bits.
struct Extrema {
  uint32_t least, most;
};
__device__ __forceinline__ Extrema
extrema_of_slices(const QuantizeParams& p, const Place& at, int slices, int col) {
  const uint32_t* extrema = at.extrema(p, 0) + col;
  Extrema found = {~0u, 0};
#pragma unroll 8
  for (int split = 0; split < slices; ++split) {
    found.least = min(found.least, extrema[split * 2 * HEAD_DIM]);
    found.most = max(found.most, extrema[split * 2 * HEAD_DIM + HEAD_DIM]);
  }
  return found;
}

// Waits until the extrema of a head are there, and returns how many slices hold all of them.
__device__ __forceinline__ int await_slices(const QuantizeParams& p, const Place& at) {
  if (!SUMS_FIRST || p.summed_slices == nullptr) return p.splits;
  await_count(p.summed_slices + at.batch_head, p.splits);
  return 1;  // the last slice has stored the extrema of all in place of the first
}

// R0: the mean of a column over rows_of_mean of a head, or over all rows if they were summed
// before. The sums of its slices are added in rising order and divided. The mean is 0 if none is
// subtracted. It is also 0 if the sum is not finite, because one NaN would otherwise reach every
// key of the head. The first block of the head stores it.
__device__ __forceinline__ float channel_mean(const QuantizeParams& p, const Place& at, int col) {
  if (p.mean == nullptr) return 0.0f;
  const float total = SUMS_FIRST && p.head_sum != nullptr
                          ? await_published(p.head_sum + at.batch_head * HEAD_DIM + col)
                          : sum_of_slices(p, at, col);
  const bool finite = magnitude_bits(total) < INFINITY_BITS;
  const int rows = p.summed > 0 ? p.summed : rows_of_mean(at.length);
  const float mean = finite ? total / max(1, rows) : 0.0f;
  if (at.row0 == 0) p.mean[at.batch_head * HEAD_DIM + col] = mean;
  return mean;
}

// Reach of a column of a head from its mean. The rounded difference rises with x, so its ends are
// at the ends of x.
template <bool ZEROS>
__device__ __forceinline__ ReachWith<ZEROS> channel_reach(
    const QuantizeParams& p, const Place& at, int col, float mean) {
  const auto [least, most] = extrema_of_slices(p, at, await_slices(p, at), col);
  ReachWith<ZEROS> reach = {};
  if (least > most) return reach;  // there are no rows
  reach.admit(__fsub_rn(from_ordered_bits(least), mean));
  reach.admit(__fsub_rn(from_ordered_bits(most), mean));
  return reach;
}

// Whether a block has no rows, in `cols` columns from col0 on. The first block of a sequence
// without rows still stores its mean.
__device__ __forceinline__ bool is_empty(
    const QuantizeParams& p, const Place& at, int col0 = 0, int cols = HEAD_DIM) {
  if (!VARLEN || at.rows > 0) return false;
  for (int col = thread_id(); at.row0 == 0 && col < cols; col += NUM_THREADS)
    channel_mean(p, at, col0 + col);
  return true;
}

// ---- V ------------------------------------------------------------------------------------------

// V becomes e4m3 if P does, else INT8. Zero points go with integer codes of P.
constexpr bool VALUES_ARE_FLOATS = P_TYPE == PType::E4M3;
constexpr bool VALUE_ZEROS = ZERO_POINTS && !VALUES_ARE_FLOATS && P_TYPE != PType::BITS_16;
using ValueReach = ReachWith<VALUE_ZEROS>;
// One scale for all of V: its reach, or the reach of each entry if entries have separate lengths.
__device__ __forceinline__ ValueReach* values_reach(const QuantizeParams& p, const Place& at) {
  return reinterpret_cast<ValueReach*>(p.absmax) + (VARLEN ? at.batch : 0);
}

// ---- rows ---------------------------------------------------------------------------------------

// Rows of 16 bits whose weights and tables hardly fit in registers beside their floats. So the
// factors of all rows come first, while rows are words: a root and a quotient take registers, too.
constexpr bool FACTORS_FIRST = QK_NORM && !NORM_BY_TOKEN && ROPE_BY_COLUMN && sizeof(elem_t) == 2;

// Converts the loaded words of a lane's row to the numbers that are quantised. The result
// row(words, which, factor) has element(access, j). Its words() has the elements of an access side
// by side, each a Number. Without preparation, numbers are made from the words at each use.
template <bool>
struct Rowwise {
  using Number = elem_t;
  struct Row {
    const Words<elem_t, VEC> (&x)[LANE_ACCESSES];
    __device__ __forceinline__ float element(int a, int j) const { return x[a].element(j); }
  };
  __device__ __forceinline__ Rowwise(const QuantizeParams&, const Place&) {}
  template <int ROWS>
  __device__ __forceinline__ void find_factors(
      const Words<elem_t, VEC> (&)[ROWS][LANE_ACCESSES], float (&)[ROWS]) const {}
  __device__ __forceinline__ Row
  row(const Words<elem_t, VEC> (&x)[LANE_ACCESSES], int, float) const {
    return {x};
  }
  __device__ __forceinline__ const Words<Number, VEC>& words(const Row& row, int a) const {
    return row.x[a];
  }
};
template <>
struct Rowwise<true> {
  using Number = float;
  Preparation how;
  template <typename Params>  // that have a Preparation
  __device__ __forceinline__ Rowwise(const Params& p, const Place& at)
      : how(p, at.head, at.row0, at.token0(p)) {}
  template <typename Loaded>
  static __device__ __forceinline__ void convert(
      PreparedRow& found, const Loaded (&x)[LANE_ACCESSES]) {
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
#pragma unroll
      for (int j = 0; j < VEC; ++j) found.element(a, j) = x[a].element(j);
  }
  // FACTORS_FIRST: finds the factors that normalise ROWS rows. A lane computes the factors of some
  // rows, and hands them to the other lanes.
  template <int ROWS, typename Loaded>
  __device__ __forceinline__ void find_factors(
      const Loaded (&x)[ROWS][LANE_ACCESSES], float (&factor)[ROWS]) const {
    if constexpr (FACTORS_FIRST) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        PreparedRow own;
        convert(own, x[i]);
        factor[i] = own.square_sum();
      }
#pragma unroll
      for (int first = 0; first < ROWS; first += LANES) {
        float own = factor[first];
#pragma unroll
        for (int i = 1; i < LANES && first + i < ROWS; ++i) {
          const float other = factor[first + i];  // NOTE: as a branch it puts factors on the stack
          own = lane_in_row() == i ? other : own;
        }
        own = norm_factor(of_head_dim(own), how.eps);
#pragma unroll
        for (int i = 0; i < LANES && first + i < ROWS; ++i)
          factor[first + i] = __shfl_sync(FULL_WARP, own, i, LANES);
      }
    }
  }
  template <typename Loaded>
  __device__ __forceinline__ PreparedRow
  row(const Loaded (&x)[LANE_ACCESSES], int row, float factor) const {
    PreparedRow found;
    convert(found, x);
    if constexpr (FACTORS_FIRST) {
      found.normalise(how.of_row(row), factor);
      __syncwarp();  // no hazard: tables are not read before, when weights take registers
      found.follow_norm(how, row);
    } else {
      found.prepare(how, row);
    }
    return found;
  }
  __device__ __forceinline__ Words<Number, VEC> words(const PreparedRow& row, int a) const {
    Words<Number, VEC> found;
#pragma unroll
    for (int j = 0; j < VEC; ++j) found.words[j] = __float_as_uint(row.element(a, j));
    return found;
  }
};

// A head's mean in the columns of a lane: in registers, or in shared memory if prepared rows need
// the registers.
template <bool>
struct LaneMean {
  float x[LANE_ACCESSES][VEC];
  template <bool MEAN>
  __device__ __forceinline__ void find(const float (&of_head)[HEAD_DIM]) {
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        x[a][j] = MEAN && col_of(a) < HEAD_DIM ? of_head[col_of(a) + j] : 0.0f;
  }
  __device__ __forceinline__ float at(int a, int j) const { return x[a][j]; }
};
template <>
struct LaneMean<true> {
  const float* x;
  template <bool MEAN>
  __device__ __forceinline__ void find(const float (&of_head)[HEAD_DIM]) {
    x = of_head;
  }
  __device__ __forceinline__ float at(int a, int j) const { return x[col_of(a) + j]; }
};

// Prepared rows: numbers that are computed once, because their rotation tables have twice as many
// bytes as the rows. Empty if the loaded words become numbers at each use.
template <bool, int PASSES>
struct Made {};
template <int PASSES>
struct Made<true, PASSES> {
  PreparedRow row[PASSES];
};

// A lane's part of the block's rows and of the mean. Past the last row, the last row is repeated:
// it adds nothing to the reach of its group, and is not stored.
template <typename Cut>
struct Rows {
  static constexpr int PASSES = Cut::PASSES;
  Words<elem_t, VEC> x[PASSES][LANE_ACCESSES];
  Made<PREPARED, PASSES> made;
  LaneMean<PREPARED> mean;

  __device__ __forceinline__ void load(const QuantizeParams& p, const Place& at) {
    const elem_t* X = at.X(p);  // [rows, HEAD_DIM]
    int place[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
      place[pass] = at.place(p, min(row_of(pass), at.rows - 1));
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const elem_t* row = X + place[pass] * p.X_stride.len;
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) {
        x[pass][a] = {};
        if (col_of(a) < HEAD_DIM)
          x[pass][a] = *reinterpret_cast<const Words<elem_t, VEC>*>(row + col_of(a));
      }
    }
  }

  // The whole block takes part; `of_head` is free before.
  __device__ __forceinline__ void find_mean(
      float (&of_head)[HEAD_DIM], const QuantizeParams& p, const Place& at) {
    if constexpr (Cut::MEAN)
#pragma unroll 1
      for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS)
        of_head[col] = channel_mean(p, at, col);
  }

  // Rows have arrived, and the mean is `of_head`. Past the last row, the last row is repeated with
  // its position.
  __device__ __forceinline__ void begin(
      const float (&of_head)[HEAD_DIM], const QuantizeParams& p, const Place& at) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) x[pass][a].use_from_here();
    if constexpr (PREPARED) {
      const Rowwise<true> rowwise(p, at);
      float factor[PASSES];
      rowwise.find_factors(x, factor);
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        if constexpr (FACTORS_FIRST)
#pragma unroll
          for (int a = 0; a < LANE_ACCESSES; ++a) x[pass][a].use_from_here();  // not as floats
        made.row[pass] = rowwise.row(x[pass], min(row_of(pass), at.rows - 1), factor[pass]);
      }
    }
    mean.template find<Cut::MEAN>(of_head);
  }

  __device__ __forceinline__ decltype(auto) row(int pass) const {
    if constexpr (PREPARED)
      return (made.row[pass]);
    else
      return typename Rowwise<false>::Row{x[pass]};
  }

  template <typename Row>
  __device__ __forceinline__ float value(const Row& row, int a, int j) const {
    const float value = row.element(a, j);
    return Cut::MEAN ? __fsub_rn(value, mean.at(a, j)) : value;  // R0
  }

  // Reach of this lane's part of all rows. With a mean, the reach of a column is at its ends.
  __device__ __forceinline__ Reach reach() const {
    Reach found = {};
    if constexpr (Cut::MEAN && !PREPARED) {
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) {
        if (col_of(a) >= HEAD_DIM) continue;
        Ends<elem_t, VEC> ends(x[0][a]);
#pragma unroll
        for (int pass = 1; pass < PASSES; ++pass) ends.admit(x[pass][a]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          found.admit(__fsub_rn(ends.least.element(j), mean.at(a, j)));  // R0
          found.admit(__fsub_rn(ends.most.element(j), mean.at(a, j)));
        }
      }
    } else {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) found.admit(reach(pass));
    }
    return found;
  }

  // The same for one row.
  __device__ __forceinline__ Reach reach(int pass) const {
    if constexpr (!Cut::MEAN && !PREPARED) return reach_of(x[pass]);  // past the last column are 0
    const auto& own = row(pass);
    Reach found = {};
#pragma unroll
    for (int a = 0; a < LANE_ACCESSES; ++a)
      if (col_of(a) < HEAD_DIM)
#pragma unroll
        for (int j = 0; j < VEC; ++j) found.admit(value(own, a, j));
    return found;
  }

  // Raises the reach of every group, [GROUPS, SIDES] in shared memory, to that of its rows.
  __device__ __forceinline__ void raise(uint32_t* of_groups) const {
    if constexpr (Cut::GROUPS == 1) {
      const Reach found = shfl_max<WARP_SIZE>(reach());
      if (lane_id() == 0) found.raise(of_groups);
      return;
    }
    constexpr int NUMBERS = power_of_two_from(PASSES), LEFT = ceil_div(NUMBERS, LANES);
    uint32_t sides[SIDES][NUMBERS] = {};
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const Reach found = reach(pass);
#pragma unroll
      for (int i = 0; i < SIDES; ++i) sides[i][pass] = found.bits[i];
    }
    int first = 0;
#pragma unroll
    for (int i = 0; i < SIDES; ++i) first = scatter_max<LANES>(sides[i]);
#pragma unroll
    for (int i = 0; i < LEFT; ++i)
      if (row_of(first + i) < Cut::ROWS)
#pragma unroll
        for (int side = 0; side < SIDES; ++side)
          atomicMax(&of_groups[row_of(first + i) / Cut::GROUP * SIDES + side], sides[side][i]);
  }

  // Stores the codes of the rows, and with zero points the sum of each row's codes. SATURATED:
  // numbers may exceed the scales.
  template <bool SATURATED>
  __device__ __forceinline__ void store(
      const QuantizeParams& p, const Place& at, const Coding (&coding)[Cut::GROUPS]) {
    int8_t* codes = at.codes(p) + row_in_pass() * CODES_PITCH;  // [rows, CODES_PITCH]
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if constexpr (!PREPARED)
#pragma unroll
        for (int a = 0; a < LANE_ACCESSES; ++a) x[pass][a].use_from_here();  // not reach's floats
      const int row = row_of(pass);
      const auto& own = this->row(pass);
      const Coding of_row = coding[uint32_t(min(row, Cut::ROWS - 1)) / Cut::GROUP];
      int sum = 0;
#pragma unroll
      for (int a = 0; a < LANE_ACCESSES; ++a) {
        if (col_of(a) >= HEAD_DIM) continue;
        int8_t* target = codes + pass * ROWS_PER_PASS * CODES_PITCH + col_of(a);
        if constexpr (SATURATED || ZERO_POINTS) {
          int c[VEC];
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            const float x = value(own, a, j);
            sum += c[j] = SATURATED ? of_row.saturated(x) : of_row.code(x);  // R1
          }
          if (row < at.rows) store_s8(target, c);
        } else {
          float scaled[VEC];
#pragma unroll
          for (int j = 0; j < VEC; ++j) scaled[j] = of_row.scaled(value(own, a, j));  // R1
          if (row < at.rows) store_rounded_s8(target, scaled);
        }
      }
      if constexpr (ZERO_POINTS) {
        sum = shfl_sum<LANES>(sum);
        if (lane_in_row() == 0 && row < at.rows) at.code_sum(p)[row] = sum;
      }
    }
  }
};
