// Attention over one head of 64 channels per block row. One thread computes one query; keys and
// values pass through shared memory in tiles. Scores, weights and sums are float32.
#include <cuda_fp16.h>

constexpr int HEAD_DIM = 64;
constexpr int TILE = 32;  // keys

__global__ void attention(
    const __half* q, const __half* k, const __half* v, __half* o, int length, float scale) {
  __shared__ float K[TILE][HEAD_DIM], V[TILE][HEAD_DIM];
  const long long head = (long long)blockIdx.y * length * HEAD_DIM;
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  float query[HEAD_DIM], sum[HEAD_DIM];
  for (int d = 0; d < HEAD_DIM; ++d) {
    query[d] = row < length ? __half2float(q[head + row * HEAD_DIM + d]) : 0.0f;
    sum[d] = 0.0f;
  }
  float largest = -1e30f, weights = 0.0f;
  for (int start = 0; start < length; start += TILE) {
    const int keys = min(TILE, length - start);
    for (int i = threadIdx.x; i < keys * HEAD_DIM; i += blockDim.x) {
      K[0][i] = __half2float(k[head + start * HEAD_DIM + i]);
      V[0][i] = __half2float(v[head + start * HEAD_DIM + i]);
    }
    __syncthreads();  // the tile is complete before it is read
    for (int key = 0; key < keys; ++key) {
      float score = 0.0f;
      for (int d = 0; d < HEAD_DIM; ++d) score += query[d] * K[key][d];
      score *= scale;
      const float larger = fmaxf(largest, score);
      const float before = expf(largest - larger), p = expf(score - larger);
      weights = weights * before + p;
      for (int d = 0; d < HEAD_DIM; ++d) sum[d] = sum[d] * before + p * V[key][d];
      largest = larger;
    }
    __syncthreads();  // the tile has been read before the next one replaces it
  }
  if (row < length) {
    for (int d = 0; d < HEAD_DIM; ++d) {
      o[head + row * HEAD_DIM + d] = __float2half(sum[d] / weights);
    }
  }
}
