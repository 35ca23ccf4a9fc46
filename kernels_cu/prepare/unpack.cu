// unpack -- the rows of 4-bit codes of Q or K as INT8, before the attention kernel.
//
// Idea         A pass over memory: half a byte read and a byte stored for each code. Copies by
//              cp.async and the copy engine do not change bytes, and products need 8 bits in shared
//              memory. Without this pass, every block of query rows would unpack all keys again.
// Kept simple  The operand plays Q's part in config.cuh: BLOCK_Q rows to a block. Rows that are no
//              whole words go byte by byte.
// Rounding     none
// Mirror       cupyattn.quant.nibbles.unpacked, to the bit
#include "prims/config.cuh"
#include "prims/codes/nibbles.cuh"
#include "prims/instructions/warp.cuh"

constexpr int BYTES = VEC == 8 ? 4 : 1;                  // per access
constexpr int ACCESSES = ceil_div(HEAD_DIM, 2 * BYTES);  // per row

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void unpack(
    const __grid_constant__ UnpackParams p) {
  const int chunks = ceil_div(p.length, BLOCK_Q);
  const int row0 = blockIdx.x % chunks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / chunks;
  const uint8_t* X = p.X  // [rows, ceil(HEAD_DIM / 2)]
                     + batch_head / p.heads * p.X_stride_batch +
                     batch_head % p.heads * p.X_stride_head + row0 * p.X_stride_len;
  int8_t* Y = p.Y + (batch_head * p.length + row0) * CODES_PITCH;  // [rows, CODES_PITCH]
  const int rows = min(BLOCK_Q, p.length - row0);
  for (int i = thread_id(); i < rows * ACCESSES; i += NUM_THREADS) {
    const int row = i / ACCESSES, byte = i % ACCESSES * BYTES;
    const uint8_t* from = X + row * p.X_stride_len + byte;  // [BYTES]
    int8_t* to = Y + row * CODES_PITCH + 2 * byte;          // [2 * BYTES]
    if constexpr (BYTES == 4) {
      const Nibbles codes(*reinterpret_cast<const uint32_t*>(from));
      *reinterpret_cast<Vec<uint32_t, 2>*>(to) = {{codes.low, codes.high}};
    } else {  // the second may be behind the last: rows are padded to whole pairs
      const Nibbles codes(*from);
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(codes.low);
    }
  }
}
