// quantize -- Q, K and V in 16 or 32 bits to 8-bit codes. In Q and K, GROUP rows share a float
//             scale; in V, GROUP rows of a channel. With ZERO_POINTS each scale has a zero point.
//
// Idea         Memory decides. Every byte is read once and stays in registers between the search
//              for the maximum and the coding. It is written as a half or a quarter of its size. A
//              block takes rows of one head, or of heads that share rotation tables. LANES lanes
//              share a row, and a warp takes a few rows at a time. Rows of a group are combined in
//              shared memory, at any granularity. One launch serves all operands, so one starts as
//              another ends. Other blocks compute the mean or range of a head a little earlier, so
//              the second read comes from the L2 cache.
// Before it    quantize_reduce.cu, if groups span blocks without being a head
// Steps        ROWS    codes of whole groups of rows
//              CODES   codes with scales that are given or were computed before
//              VALUES  codes of V, one scale per channel of GROUP_V rows, stored transposed as
//                      attention reads them: here each byte moves anyway
// Kept simple  The scale of a row is scale[row / GROUP]. A maximum of bits depends on no order.
// Rounding     R0 x - mean; R1 scale, inverse, code: each operation rounded once (quant.cuh)
// Mirror       cupyattn.quant.quantizers, to the bit: quantize_symmetric, quantize_affine (zero
//              points), quantize_values, quantize_values_affine (V)
// Bound        cupyattn.bounds.quantisation: half a scale, or what clips; V: or a step of e4m3
#include "prims/codes/quantize_heads.cuh"
#include "prims/schedule/quantize_turns.cuh"

// Bytes of dynamic shared memory, for rows of several heads.
template <Step STEP, typename Cut>
__host__ __device__ constexpr int heads_bytes() {
  if constexpr (STEP == Step::ROWS)  // otherwise Cut may have no groups
    if constexpr (BY_UNITS<Cut> && !OwnRows<Cut>::FIT) return sizeof(HeadRowsShared<Cut>);
  return 0;
}
constexpr int Q_BYTES = heads_bytes<STEP_Q, CutQ>(), K_BYTES = heads_bytes<STEP_K, CutK>();
extern "C" __device__ int smem_bytes = Q_BYTES > K_BYTES ? Q_BYTES : K_BYTES;

// Blocks hold whole groups.
template <typename Cut>
__device__ __forceinline__ void quantize_rows(const QuantizeParams& p, uint32_t block) {
  __shared__ uint32_t absmax[Cut::GROUPS * SIDES];  // [GROUPS, SIDES] bits of largest magnitudes
  __shared__ Coding coding[Cut::GROUPS];            // [GROUPS]
  __shared__ float mean[HEAD_DIM];
  const Place at(p, block, Cut::ROWS);
  if (is_empty(p, at)) return;

  Rows<Cut> rows;
  rows.load(p, at);
#pragma unroll 1
  for (int g = thread_id(); g < Cut::GROUPS * SIDES; g += NUM_THREADS) absmax[g] = 0;
  rows.find_mean(mean, p, at);
  __syncthreads();  // the mean and the zeros are there before a row adds its maximum
  rows.begin(mean, p, at);
  rows.raise(absmax);
  __syncthreads();  // every row of a group has added its maximum before the scale is made of it
  const Place here = again(p, block, Cut::ROWS);
#pragma unroll 1
  for (int g = thread_id(); g < Cut::GROUPS; g += NUM_THREADS) {
    const float scale = coding[g].make(&absmax[g * SIDES]);  // R1
    if (g * Cut::GROUP >= here.rows) continue;
    const int64_t index = here.first_scale<Cut::GROUP>(p) + g;
    p.scale[index] = scale;
    if constexpr (ZERO_POINTS) p.zero[index] = coding[g].zero;
  }
  __syncthreads();  // the inverses are there before a row is coded with them
  rows.template store<false>(p, here, coding);
}

// The same for rows of the same tokens of several heads.
template <typename Cut>
__device__ __forceinline__ void quantize_heads(const QuantizeParams& p, uint32_t block) {
  __shared__ uint32_t absmax[Cut::GROUPS];  // [HEADS, groups of a head]
  __shared__ Coding coding[Cut::GROUPS];    // [HEADS, groups of a head]
  auto& shared = *reinterpret_cast<HeadRowsShared<Cut>*>(dynamic_space());
  using Heads = HeadRows<Cut>;
  const Place at(p, block, Heads::ROWS, false, Cut::HEADS);
  if (VARLEN && at.rows <= 0) {
#pragma unroll 1
    for (int head = 0; head < Cut::HEADS; ++head) is_empty(p, at.of_head(head));
    return;
  }

  Heads rows(p, at);
#pragma unroll 1
  for (int g = thread_id(); g < Cut::GROUPS; g += NUM_THREADS) absmax[g] = 0;
  rows.share(shared, p, at);
  __syncthreads();  // means and zeros are there before a row is made and adds its maximum
  rows.begin(shared, p, at, absmax);
  __syncthreads();  // every row of a group has added its maximum before the scale is made of it
  const Place here = again(p, block, Heads::ROWS, Cut::HEADS);
#pragma unroll 1
  for (int g = thread_id(); g < Cut::GROUPS; g += NUM_THREADS) {
    const float scale = coding[g].make(&absmax[g]);  // R1
    const int group = g % Heads::GROUPS;
    if (group * Cut::GROUP >= here.rows) continue;
    p.scale[here.of_head(g / Heads::GROUPS).template first_scale<Cut::GROUP>(p) + group] = scale;
  }
  __syncthreads();  // the inverses are there before a row is coded with them
  rows.store(shared, p, here, coding);
}

// The same where a warp finds the scales of its rows alone.
template <typename Cut>
__device__ __forceinline__ void quantize_own(const QuantizeParams& p, uint32_t block) {
  const Place at(p, block, OwnRows<Cut>::ROWS, false, Cut::HEADS);
  OwnRows<Cut>::quantize(p, at);
}

// Scales are given, or follow from maxima of groups or from the extrema of whole heads.
template <typename Cut>
__device__ __forceinline__ void encode_rows(const QuantizeParams& p, uint32_t block) {
  __shared__ Coding coding[Cut::GROUPS];  // [GROUPS]
  __shared__ uint32_t of_head[SIDES];
  __shared__ float mean[HEAD_DIM];
  const Place at(p, block, Cut::ROWS);
  if (is_empty(p, at)) return;

  Rows<Cut> rows;
  rows.load(p, at);
  if (thread_id() < SIDES) of_head[thread_id()] = 0;
  rows.find_mean(mean, p, at);
  __syncthreads();  // the mean and the zeros are there
  if (p.extrema != nullptr) {
    for (int col = thread_id(); col < HEAD_DIM; col += NUM_THREADS)
      channel_reach<ZERO_POINTS>(p, at, col, Cut::MEAN ? mean[col] : 0.0f).raise(of_head);
    __syncthreads();  // every channel has added its maximum
  }
#pragma unroll 1
  for (int g = thread_id(); g < Cut::GROUPS; g += NUM_THREADS) {
    if (g * Cut::GROUP >= at.rows) {
      coding[g] = {};
      continue;
    }
    const int64_t index = at.first_scale<Cut::GROUP>(p) + g;
    float scale;
    if (p.static_scale == nullptr) {
      scale = coding[g].make(p.extrema == nullptr ? &p.absmax[index * SIDES] : of_head);  // R1
    } else {
      const Scale given = scale_of_static(p.static_scale[index]);
      scale = given.scale, coding[g].inverse = given.inverse;
    }
    // NOTE: several blocks may share the scale. A scale from a maximum is the same in all of them.
    // A usable given scale is already in place, and only NaN is ever written over it.
    if (p.static_scale == nullptr || coding[g].inverse == 0.0f)
      st_relaxed_gpu(&p.scale[index], scale);
    if constexpr (ZERO_POINTS) st_relaxed_gpu(&p.zero[index], coding[g].zero);
  }
  __syncthreads();  // the inverses are there before a row is coded with them
  rows.begin(mean, p, at);
  if (p.static_scale != nullptr)
#pragma unroll
    for (int pass = 0; pass < Cut::PASSES; ++pass) {
      if (row_of(pass) < at.rows && !rows.reach(pass).is_finite())
        st_relaxed_gpu(
            &p.scale[at.first_scale<Cut::GROUP>(p) + row_of(pass) / Cut::GROUP], NOT_A_NUMBER);
    }
  rows.template store<true>(p, at, coding);
}

// ---- V ------------------------------------------------------------------------------------------

// Groups of V are whole tiles of attention, of 32 keys or more, or all of a head.
constexpr int VALUE_GROUP = GROUP_V < 32 ? 32 : GROUP_V;
constexpr int VALUE_GROUPS = ceil_div(VALUES_PAD, VALUE_GROUP);  // in the keys of a block
constexpr bool WHOLE_VALUE_GROUPS = VALUE_GROUP <= VALUES_PAD;

using ValueCoding = CodingWith<VALUE_ZEROS>;
// Codes of four neighbours, the first lowest.
__device__ __forceinline__ uint32_t value_codes(const float (&x)[4], const ValueCoding& coding) {
  if constexpr (VALUES_ARE_FLOATS || VALUE_ZEROS) {
    int c[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      c[i] = VALUES_ARE_FLOATS ? code_e4m3(x[i], coding.inverse) : coding.code(x[i]);
    return pack_s8x4(c[0], c[1], c[2], c[3]);
  } else {
    return pack_s8(
        coding.scaled(x[0]), coding.scaled(x[1]), coding.scaled(x[2]), coding.scaled(x[3]));
  }
}

// A lane takes four keys whose codes are neighbours in their channel: a word. Key 8 n + 2 t + j of
// 16 lies at 4 t + 2 n + j. So a word holds the keys whose scores one lane of attention has in two
// key tiles (mma.cuh).
constexpr int WORDS = VALUES_PAD / 4;  // of a channel: as many as a warp has lanes
__device__ __forceinline__ int key_of(uint32_t word, uint32_t i) {
  return word / 4 * 16 + word % 4 * 2 + i / 2 * 8 + i % 2;
}

// A block takes VALUES_PAD keys of BLOCK_COLS columns.
constexpr int VALUE_LANES = BLOCK_COLS / VEC;  // per row
constexpr int COL_PARTS = ceil_div(HEAD_DIM, BLOCK_COLS);
constexpr int WORDS_PER_PASS = NUM_THREADS / VALUE_LANES;
constexpr int WORD_PASSES = ceil_div(WORDS, WORDS_PER_PASS);
// Passes, and lanes of a warp, whose words belong to one group.
constexpr int GROUP_WORDS = VALUE_GROUP / 4;
constexpr int PASSES_TOGETHER = GROUP_WORDS > WORDS_PER_PASS ? GROUP_WORDS / WORDS_PER_PASS : 1;
constexpr int LANES_TOGETHER = WARP_SIZE / VALUE_LANES <= GROUP_WORDS ? WARP_SIZE : VALUE_LANES;
__device__ __forceinline__ uint32_t group_of(uint32_t word) {
  return VALUE_GROUPS == 1 ? 0 : word / GROUP_WORDS;
}
// Column j of the VEC of a lane. In shared memory, columns that are stored at the same time are
// adjacent.
__device__ __forceinline__ uint32_t slot_of(uint32_t lane, uint32_t j) {
  return j * VALUE_LANES + lane;
}
// Index of a word of its transposed codes: the lanes of a warp write to different banks.
__device__ __forceinline__ uint32_t tile_index(uint32_t lane, uint32_t j, uint32_t word) {
  return (lane * VEC + j) * WORDS + (word ^ lane * (WARP_SIZE / VALUE_LANES) % WORDS);
}
// Adjacent words there, which one access reads, and columns that the block reads at a time.
constexpr int WORDS_OUT = VALUE_LANES > 16 ? 1 : VALUE_LANES == 16 ? 2 : 4;
constexpr int COLS_OUT = NUM_THREADS / (WORDS / WORDS_OUT);
constexpr bool WHOLE_COLS = HEAD_DIM % BLOCK_COLS == 0 && BLOCK_COLS % COLS_OUT == 0;

__device__ __forceinline__ void quantize_values(const QuantizeParams& p, uint32_t block) {
  uint32_t* tile = shared_space();  // [BLOCK_COLS, WORDS] of four codes
  __shared__ uint32_t reach[VALUE_GROUPS][ValueReach::SIDES][BLOCK_COLS];
  __shared__ ValueCoding coding[VALUE_GROUPS][BLOCK_COLS];
  __shared__ float mean[BLOCK_COLS];
  const Place at(p, block / COL_PARTS, VALUES_PAD);
  const int col0 = block % COL_PARTS * BLOCK_COLS;
  const uint32_t cols = HEAD_DIM % BLOCK_COLS == 0 ? BLOCK_COLS : min(BLOCK_COLS, HEAD_DIM - col0);
  if (is_empty(p, at, col0, cols)) return;
  const elem_t* X = at.X(p);  // [rows, HEAD_DIM]
  const uint32_t lane = threadIdx.x % VALUE_LANES, word0 = threadIdx.x / VALUE_LANES;
  const bool in_row = lane * VEC < cols;

  Words<elem_t, VEC> x[WORD_PASSES][4];
#pragma unroll
  for (int pass = 0; pass < WORD_PASSES; ++pass)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Past the last key, the last key is repeated: it adds nothing to the reach of its group.
      const int key = min(key_of(word0 + pass * WORDS_PER_PASS, i), at.rows - 1);
      x[pass][i] = {};
      if (in_row)
        x[pass][i] = *reinterpret_cast<const Words<elem_t, VEC>*>(
            X + key * p.X_stride.len + col0 + lane * VEC);
    }
#pragma unroll 1
  for (uint32_t col = threadIdx.x; col < cols; col += NUM_THREADS) {
    const uint32_t slot = slot_of(col / VEC, col % VEC);
    mean[slot] = channel_mean(p, at, col0 + col);
    ValueReach found = {};
    if constexpr (!WHOLE_VALUE_GROUPS)
      found = p.absmax == nullptr ? channel_reach<VALUE_ZEROS>(p, at, col0 + col, mean[slot])
                                  : *values_reach(p, at);
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < ValueReach::SIDES; ++i) reach[g][i][slot] = found.bits[i];
  }
  __syncthreads();  // the mean and the initial maxima are visible
#pragma unroll
  for (int pass = 0; pass < WORD_PASSES; ++pass)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[pass][i].use_from_here();
  float shift[VEC];  // of this lane's columns
#pragma unroll
  for (int j = 0; j < VEC; ++j) shift[j] = in_row ? mean[slot_of(lane, j)] : 0.0f;

  if constexpr (WHOLE_VALUE_GROUPS) {
#pragma unroll
    for (int pass0 = 0; pass0 < WORD_PASSES; pass0 += PASSES_TOGETHER) {
      Ends<elem_t, VEC> ends(x[pass0][0]);  // a column reaches furthest from its mean there
#pragma unroll
      for (int pass = pass0; pass < min(WORD_PASSES, pass0 + PASSES_TOGETHER); ++pass)
#pragma unroll
        for (int i = pass == pass0; i < 4; ++i) ends.admit(x[pass][i]);
#pragma unroll
      for (int offset = VALUE_LANES; offset < LANES_TOGETHER; offset *= 2) ends.admit_lane(offset);
      const uint32_t word = word0 + pass0 * WORDS_PER_PASS;
      if (!in_row || word >= WORDS || lane_id() % LANES_TOGETHER >= VALUE_LANES) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        ValueReach found = {};
        found.admit(__fsub_rn(ends.least.element(j), shift[j]));  // R0
        found.admit(__fsub_rn(ends.most.element(j), shift[j]));
        found.raise(&reach[group_of(word)][0][slot_of(lane, j)], BLOCK_COLS);
      }
    }
    __syncthreads();  // every lane has added its maxima before scales are made of them
  }
  const int64_t scale0 = at.first_scale<VALUE_GROUP>(p) * HEAD_DIM + col0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < VALUE_GROUPS * cols; i += NUM_THREADS) {
    const uint32_t group = i / cols, col = i % cols, slot = slot_of(col / VEC, col % VEC);
    uint32_t sides[ValueReach::SIDES];
#pragma unroll
    for (int side = 0; side < ValueReach::SIDES; ++side) sides[side] = reach[group][side][slot];
    ValueCoding own;
    const float scale = own.make(sides, VALUES_ARE_FLOATS ? E4M3_MAX : INT8_MAX);  // R1
    coding[group][slot] = own;
    const int row = group * VALUE_GROUP;
    if (row >= at.rows || (!WHOLE_VALUE_GROUPS && at.row0 > 0)) continue;
    p.scale[scale0 + group * HEAD_DIM + col] = scale;
    if constexpr (VALUE_ZEROS) p.zero[scale0 + group * HEAD_DIM + col] = own.zero;
  }
  __syncthreads();  // the inverses are there before a value is coded with them

  const uint32_t first_word = uint32_t(thread_id_anew()) / VALUE_LANES;  // kept, word0 would spill
#pragma unroll
  for (int pass = 0; pass < WORD_PASSES; ++pass) {
    const uint32_t word = first_word + pass * WORDS_PER_PASS;
    if (!in_row || word >= WORDS) continue;
    uint32_t present = 0;  // past the last key are zeros
#pragma unroll
    for (int i = 0; i < 4; ++i) present |= key_of(word, i) < at.rows ? 0xffu << 8 * i : 0;
    ValueCoding own[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) own[j] = coding[group_of(word)][slot_of(lane, j)];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      float of_key[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) of_key[i] = __fsub_rn(x[pass][i].element(j), shift[j]);  // R0
      tile[tile_index(lane, j, word)] = value_codes(of_key, own[j]) & present;             // R1
    }
  }
  __syncthreads();  // the codes are there before they leave channel by channel
  const uint32_t word = threadIdx.x % (WORDS / WORDS_OUT) * WORDS_OUT,
                 col1 = threadIdx.x / (WORDS / WORDS_OUT);
  int8_t* codes =  // [HEAD_DIM, padded], from this lane's words of column col1 and key row0 on
      again(p, block / COL_PARTS, VALUES_PAD).value_codes(p) + int64_t(col0 + col1) * p.padded +
      word * 4;
#pragma unroll
  for (uint32_t col = 0; col < BLOCK_COLS; col += COLS_OUT, codes += COLS_OUT * int64_t(p.padded))
    if (WHOLE_COLS || col1 + col < cols)
      *reinterpret_cast<Vec<uint32_t, WORDS_OUT>*>(codes) =
          *reinterpret_cast<const Vec<uint32_t, WORDS_OUT>*>(
              &tile[tile_index((col1 + col) / VEC, (col1 + col) % VEC, word)]);
}

struct Encode {
  template <typename Own>
  __device__ __forceinline__ void operator()(Own, const QuantizeParams& p, uint32_t block) const {
    if constexpr (Own::STEP == Step::ROWS) {
      using Cut = typename Own::Cut;
      if constexpr (!BY_UNITS<Cut>)
        quantize_rows<Cut>(p, block);
      else if constexpr (OwnRows<Cut>::FIT)
        quantize_own<Cut>(p, block);
      else
        quantize_heads<Cut>(p, block);
    }
    if constexpr (Own::STEP == Step::CODES) encode_rows<typename Own::Cut>(p, block);
    if constexpr (Own::STEP == Step::VALUES) quantize_values(p, block);
  }
};

// Threads of a multiprocessor: rows that are prepared are floats for a while, and take registers.
template <Step STEP, typename Cut>
__host__ __device__ constexpr bool holds_more() {
  if constexpr (STEP == Step::ROWS || STEP == Step::CODES) return Cut::REGISTERS > 32;
  return false;
}
constexpr int THREADS_AT_ONCE =
    HEADS_TOGETHER ? (THREE_BLOCKS ? 768 : 512)
    : PREPARED || holds_more<STEP_Q, CutQ>() || holds_more<STEP_K, CutK>() ? 512
                                                                           : 768;

extern "C" __global__ __launch_bounds__(NUM_THREADS, THREADS_AT_ONCE / NUM_THREADS) void quantize(
    const __grid_constant__ QuantizeParams q, const __grid_constant__ QuantizeParams k,
    const __grid_constant__ QuantizeParams v, const __grid_constant__ TurnParams turn) {
  if constexpr (SUMS_FIRST) {
    in_turn(q, k, v, turn, Encode());
  } else {
    if constexpr (HEADS_TOGETHER) {
      share_weights(q, k);
      __syncthreads();  // the weights are there before a row is multiplied by them
    }
    on_its_operand(q, k, v, Encode());
  }
}
