// output.cuh -- stores O of the 16 rows of a warp from fragments of wgmma to global memory. Either
// the copy engine writes it from shared memory while the warp continues, or the warp from
// registers.
#pragma once

#include "prims/io/tile_io.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/wgmma.cuh"

constexpr int STORE_ROWS = 16;  // of a warp, which the copy engine stores at a time
constexpr int STORE_COLS = 64;  // of 16 bits, in a box: one swizzle of 128 bytes
constexpr int STORE_BOXES = ceil_div(HEAD_DIM, STORE_COLS);
constexpr int CHUNK_COLS = 8;  // of 16 bits, in 16 bytes
// The copy engine stores 16 bytes as a whole, past the last column too.
constexpr bool WHOLE_CHUNKS = HEAD_DIM % CHUNK_COLS == 0;

// Columns 8 n + 2 (lane % 4) and the next, in rows g = lane / 4 and g + 8 of a fragment.
template <int COLS>
using OutputFragment = uint32_t[COLS / 8][2];

// A fragment to boxes [16, STORE_COLS] in shared memory, swizzled, BOX elements from one another.
template <int BOX, int COL_TILES>
__device__ __forceinline__ void stage_output(
    elem_t* O_rows, const uint32_t (&O_frag)[COL_TILES][2]) {
  const uint32_t corner = shared_address(O_rows) + lane_id() % 16 * 128 +
                          (lane_id() / 16 ^ lane_id() % 8) * 16;  // swizzled as a box is
#pragma unroll
  for (int n = 0; n < COL_TILES; n += 2)
    stmatrix_x4(
        (corner + n / 8 * BOX * sizeof(elem_t)) ^ n % 8 * 16,
        {O_frag[n][0], O_frag[n][1], O_frag[n + 1][0], O_frag[n + 1][1]});
  fence_proxy_async();
  __syncwarp();  // the warp's rows are complete
}

// The warp itself stores the rows of stage_output, if the copy engine would also store rows of the
// next packed sequence, or columns past O.
template <int BOX>
__device__ __forceinline__ void store_rows(
    elem_t* O, int64_t stride, const elem_t* O_rows, int rows) {
  constexpr int CHUNKS = STORE_BOXES * STORE_COLS / CHUNK_COLS;  // in a row
#pragma unroll 1
  for (int i = lane_id(); i < min(rows, STORE_ROWS) * CHUNKS; i += WARP_SIZE) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const elem_t* box = O_rows + chunk / 8 * BOX;  // [16, STORE_COLS], swizzled
    store_columns(
        O + row * stride, chunk * CHUNK_COLS,
        *reinterpret_cast<const Vec<uint32_t, 4>*>(
            box + row * STORE_COLS + (chunk % 8 ^ row % 8) * CHUNK_COLS));
  }
}

// Stores the rows of stage_output to the first `rows` of 16 rows of O, at `row` of the tensor map.
template <int BOX>
__device__ __forceinline__ void send_output(
    elem_t* O, int64_t stride, const elem_t* O_rows, int rows, const TensorMap& O_map, int row,
    int head, int batch) {
  if (!WHOLE_CHUNKS || (VARLEN && rows < STORE_ROWS)) {
    store_rows<BOX>(O, stride, O_rows, rows);
  } else if (lane_id() == 0) {
    if (rows > 0)
      for (int b = 0; b < STORE_BOXES; ++b)
        cp_async_bulk_tensor_4d_store(O_map, O_rows + b * BOX, b * STORE_COLS, row, head, batch);
    cp_async_bulk_commit_group();
  }
}

// A fragment to the first `rows` of 16 rows, from the registers: 32 columns at a time, a
// quarter of them to each lane.
template <int COL_TILES>
__device__ __forceinline__ void store_fragment(
    elem_t* O, int64_t stride, int rows, const uint32_t (&O_frag)[COL_TILES][2]) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < COL_TILES; n += 4) {
      uint32_t x[4] = {O_frag[n][h], O_frag[n + 1][h], O_frag[n + 2][h], O_frag[n + 3][h]};
      shfl_transpose(x);
      if (g + h * 8 < rows)
        store_columns(O + (g + h * 8) * stride, (n + t) * 8, {{x[0], x[1], x[2], x[3]}});
    }
}

constexpr int OWN_BOX = STORE_ROWS * STORE_COLS;  // elements of a box of a single warp
constexpr int OWN_BOXES = STORE_BOXES * OWN_BOX;

// Rounds and stores the first `rows` of 16 rows of O, through boxes of the warp if there is room
// for them. The copy engine may still read the boxes when the next call begins.
template <bool STAGED, int COUNT>
__device__ __forceinline__ void store_output(
    elem_t* O, int64_t stride, int rows, const float (&x)[COUNT], elem_t* O_rows,
    const TensorMap& O_map, int row, int head, int batch) {
  if constexpr (ELEM_IS_16_BIT) {
    uint32_t O_frag[STORE_BOXES * STORE_COLS / 8][2] = {};  // zeros past the last of COUNT
    pack_sums<elem_t>(O_frag, x);                           // R7
    if constexpr (STAGED) {
      if (lane_id() == 0) cp_async_bulk_wait_group_read();
      __syncwarp();  // the copy engine has read the boxes that are overwritten now
      stage_output<OWN_BOX>(O_rows, O_frag);
      send_output<OWN_BOX>(O, stride, O_rows, rows, O_map, row, head, batch);
    } else {
      store_fragment(O, stride, rows, O_frag);
    }
  } else {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i)
      if (const int r = g + i % 2 * 8; r < rows)
        store_pair(O + r * stride, i / 2 * 8 + t * 2, x[2 * i], x[2 * i + 1]);  // R7
  }
}
