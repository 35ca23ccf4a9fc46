// backward_delta -- first pass of the gradients: three numbers of every query row.
//
// Idea         The gradient of a softmax needs the mean of dP under P, which is the sum of dO times
//              O: Delta, one number of a row, and no key. Beside it goes M, what is subtracted from
//              the row's scores so that their exponentials are P, no sum following.
// Coarse rows  A float32 log-sum-exp of large magnitude has lost the logarithm of the sum. A warp
//              that finds such a row computes the scores again, in the arithmetic of the other
//              kernels: first their maximum M, then the sum of 2^(score - M), whose inverse is the
//              row's factor. Two passes, so that no sum is rescaled.
// ORDERED      The last block of keys at a row stores its dQ: here a row that has none gets zeros.
// Kept simple  A pass over memory: LANES lanes read a row of dO and of O and add up their products.
//              Coarse rows are rare: their fragments come from global memory, with no barrier.
// Rounding     R8 Delta, R9 the log-sum-exp to log2 units; coarse rows: M, the sum, its inverse
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/gradient.cuh"
#include "prims/mma.cuh"
#include "prims/warp.cuh"

constexpr int ACCESSES = HEAD_DIM / VEC;  // of a row
// Lanes that share a row: no more than have something to read, and no fewer than leave a row to
// every thread.
constexpr int WANTED = ACCESSES > NUM_THREADS / BLOCK_Q ? ACCESSES : NUM_THREADS / BLOCK_Q;
constexpr int LANES = power_of_two_from(WANTED < WARP_SIZE ? WANTED : WARP_SIZE);
constexpr int PASS_ROWS = NUM_THREADS / LANES;                             // rows at a time
constexpr int PASSES = BLOCK_Q / PASS_ROWS < 4 ? BLOCK_Q / PASS_ROWS : 4;  // on their way together

static_assert(BLOCK_Q % PASS_ROWS == 0, "BLOCK_Q must be a multiple of the rows of a pass");
static_assert(ROW_PAD % BLOCK_Q == 0, "BLOCK_Q must divide ROW_PAD: a block pads whole");
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

// Writes M and the factor of the coarse ones among the 16 query rows from row0 on.
__device__ __forceinline__ void normalise_rows(
    const AttnParams& p, const BackwardParams& grad, int64_t batch, int64_t head, int row0,
    const bool (&coarse)[2], int64_t padded) {
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see prims/mma.cuh
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
        grad.row_M[padded + g + h * 8] = M[h];
        grad.row_factor[padded + g + h * 8] = l[h] == 0.0f ? 0.0f : 1.0f / l[h];  // R9
      }
  }
}

// Is no key of a block that is kept in a place that the row may attend to?
__device__ __forceinline__ bool has_no_keys(
    const AttnParams& p, int64_t batch, int64_t head, int row) {
  const KeptKeys keys(p, batch, head, row, kv_begin(p, row), kv_end(p, row, 1));
  return keys.end <= keys.begin;
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_delta(
    const __grid_constant__ AttnParams call, const __grid_constant__ BackwardParams grad) {
  const int q_blocks = round_up(call.len_q, ROW_PAD) / BLOCK_Q;
  const int q0 = blockIdx.x % q_blocks * BLOCK_Q;
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && q0 >= round_up(p.len_q, ROW_PAD)) return;
  const int first_row = Sequences<VARLEN>(call, batch).first_row();
  const elem_t* O = static_cast<const elem_t*>(p.O)  // [len_q, HEAD_DIM]
                    + batch * p.O_stride.batch + head * p.O_stride.head;
  const elem_t* dO = static_cast<const elem_t*>(grad.dO)  // [len_q, HEAD_DIM]
                     + batch * grad.dO_stride.batch + head * grad.dO_stride.head +
                     first_row * grad.dO_stride.len;
  elem_t* dQ = static_cast<elem_t*>(grad.dQ)  // [len_q, HEAD_DIM]
               + batch * grad.dQ_stride.batch + head * grad.dQ_stride.head +
               first_row * grad.dQ_stride.len;
  const float* lse = lse_of(p, batch_head, head);                   // [len_q]
  const int64_t padded = padded_row(call, grad, batch, head) + q0;  // of row q0
  const int lane = thread_id() % LANES;
#pragma unroll 1
  for (int first = thread_id() / LANES; first < BLOCK_Q; first += PASSES * PASS_ROWS) {
    const int64_t row0 = q0 + first;
    float sums[PASSES] = {};
    for (int access = lane; access < ACCESSES; access += LANES) {
      using Access = Vec<elem_t, VEC>;
      Access x[PASSES] = {}, y[PASSES] = {};
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const int64_t row = row0 + pass * PASS_ROWS, col = access * VEC;
        if (row >= p.len_q) continue;
        x[pass] = *reinterpret_cast<const Access*>(dO + row * grad.dO_stride.len + col);
        y[pass] = *reinterpret_cast<const Access*>(O + row * p.O_stride.len + col);
      }
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int j = 0; j < VEC; ++j)
          sums[pass] = fmaf(to_float(x[pass].v[j]), to_float(y[pass].v[j]), sums[pass]);  // R8
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int i = first + pass * PASS_ROWS;
      if (ORDERED && q0 + i < p.len_q && has_no_keys(p, batch, head, q0 + i))
        for (int access = lane; access < ACCESSES; access += LANES)
          reinterpret_cast<Vec<elem_t, VEC>*>(dQ + (q0 + i) * grad.dQ_stride.len)[access] = {};
      const float sum = shfl_sum<LANES>(sums[pass]);  // R8
      if (lane != 0) continue;
      const float row_lse = q0 + i < p.len_q ? lse[q0 + i] : NEG_INF;
      grad.delta[padded + i] = sum;
      if (is_coarse(grad, row_lse)) continue;  // a warp, below, has that row
      grad.row_M[padded + i] = row_maximum_from(row_lse);
      grad.row_factor[padded + i] = 1.0f;
    }
  }
  const int row0 = warp_id() * WARP_Q;  // of this warp in the block
  bool coarse[2];                       // rows g and g + 8 of these
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = q0 + row0 + lane_id() / 4 + h * 8;
    coarse[h] = row < p.len_q && is_coarse(grad, lse[row]);
  }
  const bool any = __any_sync(FULL_WARP, coarse[0] || coarse[1]);
  if (lane_id() == 0) grad.coarse[(padded + row0) / COARSE_ROWS] = any;
  if (any) normalise_rows(p, grad, batch, head, q0 + row0, coarse, padded + row0);
}
