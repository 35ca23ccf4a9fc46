// prims_score -- which keys a row may attend to, one by one and in ranges; what scores become.
#include "prims/score/score.cuh"

extern "C" __global__ void places(
    const __grid_constant__ AttnParams p,
    int* may,       // [len_q, len_kv + 8]
    int* begin,     // [len_q], of the rows [row, row + 4)
    int* end,       // [len_q], likewise
    int* unmasked,  // [len_q, len_kv], likewise
    int* q_first,   // [len_q], of the keys [row, row + 4)
    int* q_last) {  // [len_q], likewise
  const int row = threadIdx.x, width = p.len_kv + 8;
  for (int key = 0; key < width; ++key) may[row * width + key] = admitted(p, row, key);
  begin[row] = kv_begin(p, row);
  end[row] = kv_end(p, row, 4);
  q_first[row] = q_begin(p, row);
  q_last[row] = q_end(p, row, 4);
  for (int key = 0; key < p.len_kv; ++key)
    unmasked[row * p.len_kv + key] =
        key >= kv_unmasked_begin(p, row, 4) && key < kv_unmasked_end(p, row);
}

// Of batch entry 1 and head 2. Rows and keys past the end must be masked, and read nothing.
extern "C" __global__ void scores(
    const __grid_constant__ AttnParams given,
    const bool* mask,    // [2, 3, len_q, len_kv]
    const bias_t* bias,  // [2, 3, len_q, len_kv], strided
    const float* x,      // [len_kv + 8], scaled products
    float* S,            // [len_q + 4, len_kv + 8]
    int* whole,          // [len_q + 4], of 4 rows and 4 keys
    float* slope) {      // [len_q + 4], of x
  AttnParams p = given;
  p.mask = mask, p.bias = bias;
  const Scores scores(p, 1, 2);
  const int row = threadIdx.x, width = p.len_kv + 8;
  for (int key = 0; key < width; ++key) {
    const float score = scores.of(x[key], row, key);
    S[row * width + key] = scores.admit(row, key) ? score : NEG_INF;
  }
  whole[row] = scores.are_products(row, 4, 0, 4);
  slope[row] = scores.slope(x[row]);
}
