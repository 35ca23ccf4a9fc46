// prims_tile_io -- tiles from global to shared memory and back, ROWS_VALID of ROWS rows, HEAD_DIM
// columns padded to COLS_PAD; what lies beyond is NaN in global memory and must be 0 in the tile.
#include "prims/io/tile_io.cuh"
#include "prims/instructions/warp.cuh"

constexpr int ROWS = 16, ROWS_VALID = 11, COLS_PAD = round_up(HEAD_DIM, 16), LD = HEAD_DIM + 1;

extern "C" __global__ void tile_f32(const elem_t* X,      // [ROWS, HEAD_DIM], rows `stride` apart
                                    const int64_t* stride,
                                    float* tile) {        // [ROWS, LD]
  __shared__ float shared[ROWS * LD];
  for (int i = thread_id(); i < ROWS * LD; i += NUM_THREADS) shared[i] = -1.0f;
  __syncthreads();  // the background is there before the tile covers it
  load_tile_f32<ROWS, HEAD_DIM, LD, VEC>(shared, X, *stride, ROWS_VALID, thread_id());
  __syncthreads();  // the tile is complete
  for (int i = thread_id(); i < ROWS * LD; i += NUM_THREADS) tile[i] = shared[i];
}

extern "C" __global__ void tile_async(const elem_t* X,  // [ROWS, HEAD_DIM], rows `stride` apart
                                      const int64_t* stride,
                                      elem_t* tile) {   // [ROWS, COLS_PAD], not swizzled any more
  __shared__ alignas(128) elem_t shared[ROWS * COLS_PAD];
  constexpr int CHUNK = 16 / sizeof(elem_t);
  load_tile_async<ROWS, HEAD_DIM, COLS_PAD, VEC>(shared, X, *stride, ROWS_VALID, thread_id());
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();  // every thread's copies are there
  for (int i = thread_id(); i < ROWS * COLS_PAD; i += NUM_THREADS) {
    const int row = i / COLS_PAD, col = i % COLS_PAD;
    tile[i] = swizzled<COLS_PAD / CHUNK>(shared, row, col / CHUNK)[col % CHUNK];
  }
}

extern "C" __global__ void pairs(const float* x,  // [COLS_PAD]
                                 elem_t* row) {   // [HEAD_DIM + 8], only HEAD_DIM are written
  for (int col = 2 * thread_id(); col < COLS_PAD; col += 2 * NUM_THREADS)
    store_pair(row, col, x[col], x[col + 1]);
}

// One copy of each width, then one of each width that is not valid: [2, 4 + 8 + 16 bytes].
extern "C" __global__ void copies(const uint32_t* x,  // [7]
                                  uint32_t* y) {      // [2, 8]
  __shared__ alignas(16) uint32_t shared[16];
  if (thread_id() < 16) shared[thread_id()] = 0xffffffffu;
  __syncthreads();  // the background is there before the copies cover it
  if (thread_id() < 2) {
    uint32_t* target = shared + 8 * thread_id();  // [8]
    const bool valid = thread_id() == 0;
    cp_async<16>(target, x, valid);
    cp_async<8>(target + 4, x + 4, valid);
    cp_async<4>(target + 6, x + 6, valid);
    cp_async_commit_group();
    cp_async_wait_group<0>();
  }
  __syncthreads();  // the copies are there
  if (thread_id() < 16) y[thread_id()] = shared[thread_id()];
}
