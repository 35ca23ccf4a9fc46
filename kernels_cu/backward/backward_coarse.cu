// backward_coarse -- second pass of the gradients: rows whose log-sum-exp is too coarse for P.
//
// Idea         A float32 log-sum-exp of large magnitude has lost the logarithm of the sum. A warp
//              with such a row computes its scores again, in the arithmetic of the later kernels.
//              It finds their maximum M, then the sum of 2^(score - M), whose inverse is the row's
//              factor. With two passes over the keys, no sum is rescaled.
// Kept simple  Coarse rows are rare: fragments come from global memory, with no barrier. Without
//              them a warp reads 16 numbers, writes one flag and ends. A separate launch costs less
//              than the registers of these scores would cost in backward_delta.
// PART_SUMS    The keys of a row are on several ranks: M and the sum over those here are returned.
// Rounding     R9 M, the sum and its inverse
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/score/gradient.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/warp.cuh"

static_assert(ROW_PAD % BLOCK_Q == 0, "BLOCK_Q must divide ROW_PAD: a block writes flags of whole");
static_assert(WARP_Q == COARSE_ROWS, "BLOCK_Q must be 16 rows for each warp, those of an mma");

// Two neighbouring elements of a row from column `col` on; zeros past the last column.
__device__ __forceinline__ uint32_t load_pair(const elem_t* row, int col, bool exists) {
  Vec<elem_t, 2> x = {};
  if (exists && col < HEAD_DIM) {
    if constexpr (VEC >= 2) return *reinterpret_cast<const uint32_t*>(row + col);
    x.v[0] = row[col];
    if (col + 1 < HEAD_DIM) x.v[1] = row[col + 1];
  }
  return *reinterpret_cast<const uint32_t*>(&x);
}

// Writes M and the factor of the coarse rows among the 16 query rows from row0 on.
// `at` is the index of row row0 in lse.
template <typename Params>
__device__ __forceinline__ void normalise_rows(
    const AttnParams& p, const Params& grad, int64_t batch, int64_t head, int row0,
    const bool (&coarse)[2], int64_t padded, int64_t at) {
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [len_q, HEAD_DIM], from row row0 + g
                    + batch * p.Q_stride.batch + head * p.Q_stride.head +
                    (row0 + g) * p.Q_stride.len;
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM]
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const Scores scores(p, batch, head);
  const KeptKeys keys(p, batch, head, row0, kv_begin(p, row0), kv_end(p, row0, 16));
  float m[2] = {NEG_INF, NEG_INF}, M[2], l[2] = {};  // rows g and g + 8
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {  // the maximum, then the sum
#pragma unroll 1
    for (int number = round_down(keys.begin, 16); number < keys.end; number += 16) {
      const int kv0 = keys.key(number);
      float S_acc[2][4] = {};
#pragma unroll 1
      for (int col = t * 2; col < round_up(HEAD_DIM, 16) + t * 2; col += 16) {
        uint32_t Q_frag[4];  // rows g, g + 8, g, g + 8
#pragma unroll
        for (int i = 0; i < 4; ++i)
          Q_frag[i] = load_pair(
              Q + i % 2 * 8 * p.Q_stride.len, col + i / 2 * 8, row0 + g + i % 2 * 8 < p.len_q);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int key = kv0 + n * 8 + g;
          const elem_t* row = K + key * p.K_stride.len;  // [HEAD_DIM]
          mma_m16n8k16<elem_t>(
              S_acc[n], Q_frag, load_pair(row, col, key < p.len_kv),
              load_pair(row, col + 8, key < p.len_kv));  // R9
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = row0 + g + i / 2 * 8, key = kv0 + n * 8 + t * 2 + i % 2;
          float S = S_acc[n][i];
          if constexpr (NATURAL_SCORES) S = scores.of(S * p.scale, row, key);  // R9
          if (!scores.admit(row, key)) continue;
          if (pass == 0)
            m[i / 2] = fmaxf(m[i / 2], S);
          else
            l[i / 2] += capped(ex2_approx_ftz(exponent(S, p.scale_log2, -M[i / 2])));  // R9
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (pass == 0) {
        m[h] = shfl_max<4>(m[h]);
        M[h] = m[h] == NEG_INF ? -NEG_INF : row_maximum_of_any_size(m[h], p.scale_log2);  // R9
      } else {
        l[h] = shfl_sum<4>(l[h]);  // R9
        if (t != 0 || !coarse[h]) continue;
        if constexpr (PART_SUMS) {
          grad.part_M[at + g + h * 8] = m[h] == NEG_INF ? NEG_INF : M[h];
          grad.part_l[at + g + h * 8] = l[h];
          continue;
        }
        grad.row_M[padded + g + h * 8] = M[h];
        grad.row_factor[padded + g + h * 8] = l[h] == 0.0f ? 0.0f : 1.0f / l[h];  // R9
      }
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_coarse(
    const __grid_constant__ AttnParams call, const __grid_constant__ CoarseParams<PART_SUMS> grad) {
  const int q_blocks = round_up(call.len_q, ROW_PAD) / BLOCK_Q;
  const int row0 = blockIdx.x % q_blocks * BLOCK_Q + warp_id() * WARP_Q;  // of this warp
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && row0 >= round_up(p.len_q, ROW_PAD)) return;
  const float* lse = lse_of(p, batch_head, head);                     // [len_q]
  const int64_t padded = padded_row(call, grad, batch, head) + row0;  // of row row0
  bool coarse[2];                                                     // rows g and g + 8
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + lane_id() / 4 + h * 8;
    coarse[h] = row < p.len_q && is_coarse(grad, lse[row]);
  }
  const bool any = __any_sync(FULL_WARP, coarse[0] || coarse[1]);
  if (!PART_SUMS && lane_id() == 0) grad.coarse[padded / COARSE_ROWS] = any;
  if (any) normalise_rows(p, grad, batch, head, row0, coarse, padded, lse - call.lse + row0);
}
