// gemm.cuh -- shared by the INT8 matrix products: parameters, order of tiles, activations, the
// store of a row of C. The blocks of a cluster may share a tile.
#pragma once

#include "prims/instructions/cluster.cuh"
#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/io/joint_rows.cuh"

constexpr int SLICE = 128;                     // codes along k that share a scale; bytes of a
                                               // row that a step of the loop multiplies
constexpr int SCALE_ROWS = 128;                // rows of B that share a scale
constexpr int OUTLIERS_PER_SLICE = SLICE / 2;  // 16-bit columns of a step
constexpr float SQRT_HALF = 0.70710678118654752440f;
constexpr float SQRT_2_OVER_PI = 0.79788456080286535588f;
constexpr float GELU_CUBIC = 0.044715f;  // of tanh's argument, by definition of that form

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct GemmParams : JointRowsParams<JOINT_ROWS> {
  const int8_t* A;       // [m, k]
  const int8_t* B;       // [n, k]; with GLU [2 n, k], as all that follows of its rows
  const float* A_scale;  // [m, ceil(k / SLICE)]; of channels [m, 1]
  const float* B_scale;  // [ceil(n / SCALE_ROWS), ceil(k / SLICE)]; of channels [n, 1]
  void* C;               // [m, n] of elem_t
  const void* bias;      // [n] of bias_t; not read unless BIAS
  const int8_t* A_16;    // [m, outliers] of outlier_t, as bytes; not read unless OUTLIERS, nor is
  const int8_t* B_16;    // [n, outliers] of outlier_t, as bytes       what follows of them
  const void* residual;  // [m, n] of elem_t; not read unless RESIDUAL; JOINT_ROWS: the first
                         // `split` rows of each batch entry, the others lie in `below`
  const void* gate;      // [ceil(m / gate_rows), n] of gate_t; not read unless GATE
  int64_t A_stride;      // from one row to the next: bytes
  int64_t B_stride;
  int64_t A_scale_stride;  // elements
  int64_t B_scale_stride;
  int64_t C_stride;
  int64_t A_16_stride;  // bytes
  int64_t B_16_stride;
  int64_t residual_stride;  // elements
  int64_t gate_stride;
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t outliers;
  int32_t alone;      // tiles that have a separate block; not read unless TAIL_SPLITS > 1
  int32_t gate_rows;  // of C, that share a row of gate
};

// Slices of codes, then of outliers: the steps of the loop over k.
__device__ __forceinline__ int code_slices(const GemmParams& p) { return ceil_div(p.k, SLICE); }
__device__ __forceinline__ int outlier_slices(const GemmParams& p) {
  return OUTLIERS ? ceil_div(p.outliers, OUTLIERS_PER_SLICE) : 0;
}

// First row and column of a tile of C. Tiles run down some blocks of rows before they move to the
// next columns. Concurrent tiles, one on each of about 132 SMs, then form a square, which reads the
// fewest rows of A and B.
struct GemmTile {
  int m0, n0;
};
__device__ __forceinline__ int num_tiles(const GemmParams& p) {
  return ceil_div(p.m, BLOCK_M) * ceil_div(p.n, TILE_N);
}
__device__ __forceinline__ GemmTile gemm_tile(const GemmParams& p, int index) {
  constexpr int TOGETHER = BLOCK_N > BLOCK_M ? 16 : 12;  // blocks of rows
  const int m_blocks = ceil_div(p.m, BLOCK_M), n_blocks = ceil_div(p.n, TILE_N);
  const int first = index / (TOGETHER * n_blocks) * TOGETHER;  // block of rows of this group
  const int here = min(TOGETHER, m_blocks - first);            // blocks of rows in this group
  const int rest = index % (TOGETHER * n_blocks);
  return {(first + rest % here) * BLOCK_M, rest / here * TILE_N};
}

// The part of a tile that a block multiplies: all of it, or its share of the k that a cluster
// divides. Blocks of a cluster have about equally many slices of codes, in their order along k, and
// the last has the outliers. Parts are counted: first tiles of single blocks, then CLUSTER for each
// other tile.
struct Part {
  int tile;
  int rank;      // of CLUSTER
  int first;     // slice of codes
  int codes;     // slices of them
  int outliers;  // slices of outliers
};
__device__ __forceinline__ int tiles_alone(const GemmParams& p) {
  return SPLITS > 1 ? 0 : TAIL_SPLITS > 1 ? p.alone : num_tiles(p);
}
__device__ __forceinline__ int num_parts(const GemmParams& p) {
  return tiles_alone(p) + (num_tiles(p) - tiles_alone(p)) * CLUSTER;
}
__device__ __forceinline__ bool is_shared(const GemmParams& p, int part) {
  return SPLITS > 1 || (TAIL_SPLITS > 1 && part >= p.alone);
}
__device__ __forceinline__ Part part_of(const GemmParams& p, int part) {
  const int slices = code_slices(p);
  if (!is_shared(p, part)) return {part, 0, 0, slices, outlier_slices(p)};
  const int rank = (part - tiles_alone(p)) % CLUSTER;
  const int first = rank * slices / CLUSTER, end = (rank + 1) * slices / CLUSTER;
  return {
      tiles_alone(p) + (part - tiles_alone(p)) / CLUSTER, rank, first, end - first,
      rank == CLUSTER - 1 ? outlier_slices(p) : 0};
}

// 1 / (1 + 2^z) times x; z past 128 gives a zero of x's sign.
__device__ __forceinline__ float gated(float x, float z) {
  return __fdividef(x, 1.0f + ex2_approx_ftz(z));
}
// G4: the activation, within 8 u |x| + 2^-118 of its definition (docs/MATH_REFERENCE.md [L41]).
template <Activation KIND>
__device__ __forceinline__ float activated(float x) {
  if constexpr (KIND == Activation::GELU) return 0.5f * x * (1.0f + erff(x * SQRT_HALF));
  if constexpr (KIND == Activation::GELU_TANH) {
    constexpr float LINEAR = -2.0f * LOG2E * SQRT_2_OVER_PI;
    return gated(x, x * fmaf(x * x, LINEAR * GELU_CUBIC, LINEAR));
  }
  if constexpr (KIND == Activation::SILU) return gated(x, x * -LOG2E);
  return x;
}

// The operands of an element of C of a gated linear unit: sums of a row of A with both halves of B.
template <typename T>
struct Halves {
  T first, second;
};

// The first of this lane's two columns of C in tile i, 16 x 8, of a row of tiles. With NEIGHBOURS
// the columns of four tiles are adjacent.
__device__ __forceinline__ int pair_col(int i) {
  const int t = lane_id() % 4;
  return NEIGHBOURS ? (i / 4 * 4 + t) * 8 + i % 4 * 2 : i * 8 + t * 2;
}

// Numbers (a bias or scales) of a lane's columns in TILES tiles, of both halves in a gated linear
// unit.
template <int TILES>
using ColumnPairs = Vec<float, 2>[HALVES][TILES];

// Eight adjacent numbers, 16 bytes at a time, by __ldg: not for results of the previous launch.
template <class T>
__device__ __forceinline__ Vec<float, 8> read_eight(const T* x) {
  constexpr int VECS = sizeof(T) / 2;  // of 16 bytes
  Vec<float, 8> y;
#pragma unroll
  for (int i = 0; i < VECS; ++i) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(x) + i);
    const auto& part = reinterpret_cast<const T(&)[8 / VECS]>(words);
#pragma unroll
    for (int j = 0; j < 8 / VECS; ++j) y.v[8 / VECS * i + j] = to_float(part[j]);
  }
  return y;
}

// The numbers of this lane's columns of TILES tiles from `first` on, from rows[half] [n] that begin
// at column n0. Past the last column they are arbitrary. one(half, col) reads a single number.
template <int TILES, class T, typename One>
__device__ __forceinline__ void load_column_pairs(
    const GemmParams& p, const T* (&rows)[HALVES], int n0, int first, ColumnPairs<TILES>& pairs,
    One one) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    if constexpr (NEIGHBOURS && TILES % 4 == 0) {
#pragma unroll
      for (int i = 0; i < TILES; i += 4) {
        const int col = min(n0 + pair_col(first + i), p.n - 8);
        const Vec<float, 8> x = read_eight(rows[half] + col);
#pragma unroll
        for (int j = 0; j < 8; ++j) pairs[half][i + j / 2].v[j % 2] = x.v[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          pairs[half][i].v[j] = one(half, min(n0 + pair_col(first + i) + j, p.n - 1));
    }
  }
}

template <int TILES>
__device__ __forceinline__ void load_bias(
    const GemmParams& p, int n0, int first, ColumnPairs<TILES>& bias) {
  if constexpr (BIAS) {
    if (LAYERS && p.bias == nullptr) {  // this layer has none, and x + -0 is x
#pragma unroll
      for (int i = 0; i < TILES; ++i) bias[0][i] = {{-0.0f, -0.0f}};
      return;
    }
    const bias_t* rows[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      rows[half] = static_cast<const bias_t*>(p.bias) + half * p.n;
    load_column_pairs<TILES>(p, rows, n0, first, bias, [&](int half, int col) {
      return to_float(__ldg(rows[half] + col));
    });
  }
}

// G3, G4: element j of a lane's tile i, whose product is x.
template <int TILES>
__device__ __forceinline__ float finished(float x, const ColumnPairs<TILES>& bias, int i, int j) {
  if constexpr (BIAS) x += bias[0][i].v[j];  // G3
  return activated<ACTIVATION>(x);           // G4
}

// G3, G4, G7: the same for a gated linear unit.
template <int TILES>
__device__ __forceinline__ float finished(
    Halves<float> x, const ColumnPairs<TILES>& bias, int i, int j) {
  if constexpr (BIAS) x.first += bias[0][i].v[j], x.second += bias[1][i].v[j];  // G3
  const float gate = GATE_LAST ? x.second : x.first, up = GATE_LAST ? x.first : x.second;
  return __fmul_rn(activated<ACTIVATION>(gate), up);  // G4, G7
}

// Numbers of COLS columns from col on, a multiple of COLS, of a row [n]; arbitrary past the last
// column.
template <int COLS, class T>
__device__ __forceinline__ Vec<float, COLS> columns_of(const GemmParams& p, const T* row, int col) {
  Vec<float, COLS> y;
  if constexpr (COLS == 8) {
    y = read_eight(row + min(col, p.n - 8));
  } else if constexpr (VEC >= 2) {
    const auto x = *reinterpret_cast<const Vec<T, 2>*>(row + min(col, p.n - 2));
    y = {{to_float(x.v[0]), to_float(x.v[1])}};
  } else {
    y = {{to_float(row[min(col, p.n - 1)]), to_float(row[min(col + 1, p.n - 1)])}};
  }
  return y;
}

// G6: adds COLS columns of the residual from col on to the same columns of a row of C.
template <int COLS>
__device__ __forceinline__ void add_residual(
    const GemmParams& p, int row, int col, Vec<float, COLS>& y) {
  if constexpr (RESIDUAL) {
    const int own = min(row, p.m - 1);  // past the last row that of the last
    const elem_t* addend = row_of(p, p.residual, own, p.residual_stride);  // [n]
    const auto residual = columns_of<COLS>(p, addend, col);
    Vec<float, COLS> gate;
#pragma unroll
    for (int j = 0; j < COLS; ++j) gate.v[j] = 1.0f;
    if constexpr (GATE)
      gate = columns_of<COLS>(
          p, static_cast<const gate_t*>(p.gate) + own / p.gate_rows * p.gate_stride, col);
#pragma unroll
    for (int j = 0; j < COLS; ++j) y.v[j] = fmaf(gate.v[j], y.v[j], residual.v[j]);  // G6
  }
}

// G3 to G7: COLS numbers of a row of C, from a lane's tile i and the next tiles.
template <int COLS, int TILES, typename X>
__device__ __forceinline__ Vec<float, COLS> of_tiles(
    const GemmParams& p, int row, int n0, int first, int i, const ColumnPairs<TILES>& bias, X x) {
  Vec<float, COLS> y;
#pragma unroll
  for (int j = 0; j < COLS; ++j)
    y.v[j] = finished<TILES>(x(i + j / 2, j % 2), bias, i + j / 2, j % 2);
  add_residual<COLS>(p, row, n0 + pair_col(first + i), y);
  return y;
}

// G3 to G7: stores TILES tiles of a row of C, from tile `first` on; tile 0 begins at column n0.
// This lane of a quad has x(i, j), column pair_col(first + i) + j: float, or of a gated linear unit
// Halves of it. All lanes of a warp come here.
template <int TILES, typename X>
__device__ __forceinline__ void store_row(
    const GemmParams& p, int row, int n0, int first, const ColumnPairs<TILES>& bias, X x) {
  constexpr bool BY_FOUR_TILES = ELEM_IS_16_BIT && VEC == 8 && TILES % 4 == 0;
  elem_t* C = static_cast<elem_t*>(p.C) + row * p.C_stride;  // [n]
  if constexpr (BY_FOUR_TILES) {
#pragma unroll
    for (int i = 0; i < TILES; i += 4) {  // 32 columns, a quarter of them to each lane
      uint32_t packed[4];
      if constexpr (NEIGHBOURS) {
        const auto y = of_tiles<8, TILES>(p, row, n0, first, i, bias, x);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          packed[j] = pack_rn<elem16_t>(y.v[2 * j], y.v[2 * j + 1]);  // G5
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const auto y = of_tiles<2, TILES>(p, row, n0, first, i + j, bias, x);
          packed[j] = pack_rn<elem16_t>(y.v[0], y.v[1]);  // G5
        }
        shfl_transpose(packed);
      }
      const int col = n0 + (first + i + lane_id() % 4) * 8;
      if (row < p.m && col < p.n)
        *reinterpret_cast<Vec<uint32_t, 4>*>(C + col) = {
            {packed[0], packed[1], packed[2], packed[3]}};
    }
  } else {
    if (row >= p.m) return;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int col = n0 + pair_col(first + i);
      if (col >= p.n) continue;
      const auto y = of_tiles<2, TILES>(p, row, n0, first, i, bias, x);
      if constexpr (VEC >= 2) {
        *reinterpret_cast<Vec<elem_t, 2>*>(C + col) = {
            {from_float<elem_t>(y.v[0]), from_float<elem_t>(y.v[1])}};  // G5
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (col + j < p.n) C[col + j] = from_float<elem_t>(y.v[j]);  // G5
      }
    }
  }
}

// Number of neighbouring tiles of 16 x 8 of a warp that merge_parts adds together, if a row has
// `columns` of them. It is a power of two that divides a block's share, so as many loads are in
// flight.
__device__ constexpr int merged_at_once(int columns, int fragments) {
  const int share = fragments / CLUSTER;
  return columns % 4 == 0 && share % 4 == 0 ? 4 : columns % 2 == 0 && share % 2 == 0 ? 2 : 1;
}

// G2, from block to block: adds the partial sums of a tile's blocks in their order, in float32 or
// int32. A thread has FRAGMENTS tiles of 16 x 8 of a warp, of(f, i) as mma holds them. It gets the
// sums of a share of these, AT_ONCE at a time: store(f, sums of f, f + 1, ...). All THREADS threads
// of all blocks must call it.
template <int AT_ONCE, int FRAGMENTS, int THREADS, typename Sum, typename Of, typename Store>
__device__ __forceinline__ void merge_parts(
    Sum (&partial)[FRAGMENTS][THREADS][4], int rank, int thread, Of of, Store store) {
  static_assert(
      FRAGMENTS % CLUSTER == 0,
      "SPLITS and TAIL_SPLITS must divide the tiles of 16 x 8 of a warp: blocks add up as many");
  constexpr int SHARE = FRAGMENTS / CLUSTER;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f)
    *reinterpret_cast<Vec<Sum, 4>*>(partial[f][thread]) = {of(f, 0), of(f, 1), of(f, 2), of(f, 3)};
  cluster_sync();  // the partial sums of all blocks are visible
#pragma unroll
  for (int f0 = 0; f0 < SHARE; f0 += AT_ONCE) {
    const int f = rank * SHARE + f0;
    Vec<Sum, 4> sums[AT_ONCE], x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sums[i] = load_from_block(partial[f + i][thread], 0);
#pragma unroll
    for (int other = 1; other < CLUSTER; ++other) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) x[i] = load_from_block(partial[f + i][thread], other);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i].v[j] += x[i].v[j];  // G2
    }
    store(f, sums);
  }
  cluster_sync();  // all reads of this block's partial sums have ended
}

// A row of B that has scale number i of a tile. With GLU scale 0 is the first half's, 1 that of the
// second half's first row and 2 that of its last row. If STRADDLES, 2 begins at straddled_from.
__device__ __forceinline__ int scale_row(const GemmParams& p, int n0, int i) {
  if constexpr (GLU) return i == 0 ? n0 : min(p.n + n0 + (i - 1) * (TILE_N - 1), 2 * p.n - 1);
  return min(n0 + i * SCALE_ROWS, p.n - 1);
}
__device__ __forceinline__ int straddled_from(const GemmParams& p, int n0) {
  return round_up(p.n + n0 + 1, SCALE_ROWS) - p.n;
}

// Order of a warp's tiles of 16 x 8 in merge_parts. In a gated linear unit both halves must reach
// one block. So two fragments are two tiles, one of each half. The first fragment has their rows g,
// the second their rows g + 8. An element of a tile is of(tile, half, i).
template <typename Of>
__device__ __forceinline__ auto fragment_element(int f, int i, Of of) {
  if constexpr (GLU) {
    return of(f / 2, i / 2, f % 2 * 2 + i % 2);
  } else {
    return of(f, 0, i);
  }
}
// The columns of C that AT_ONCE fragments have, in tiles of 8.
__device__ constexpr int merged_tiles(int at_once) { return ceil_div(at_once, HALVES); }
// Whether fragments from f on have rows g + 8 h. Also a lane's element of tile n of C in column j
// of its two.
template <int AT_ONCE>
__device__ __forceinline__ bool has_rows(int f, int h) {
  return !GLU || AT_ONCE > 1 || f % 2 == h;
}
template <int AT_ONCE, typename Sum>
__device__ __forceinline__ auto merged_sum(
    const Vec<Sum, 4> (&sums)[AT_ONCE], int h, int n, int j) {
  if constexpr (GLU) {
    const auto& x = sums[AT_ONCE > 1 ? 2 * n + h : 0].v;
    return Halves<Sum>{x[j], x[2 + j]};
  } else {
    return sums[n].v[2 * h + j];
  }
}
