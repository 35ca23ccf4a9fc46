// backward_delta -- first pass of the gradients: three numbers of every query row.
//
// Idea         The gradient of a softmax needs the mean of dP under P. This is Delta, the sum of dO
//              times O, one number per row without any key. The pass also stores M. Exponentials of
//              scores less M are P, without division by a sum.
// Coarse rows  A float32 log-sum-exp of large magnitude has lost the logarithm of the sum: such a
//              row gets M and its factor from backward_coarse. Every other factor is 1.
// D_LSE        The derivative of lse by a score is P, so the gradient of lse is subtracted from
//              Delta. Rows whose lse is -inf ignore it.
// PART_SUMS    The keys of a row are on several ranks: M and the factor of a coarse row are given.
// ORDERED      The last block of keys at a row stores its dQ: here a row that has none gets zeros.
// Kept simple  A pass over memory: LANES lanes read a row of dO and of O and add up their products.
// Rounding     R8 Delta, R9 the log-sum-exp to log2 units
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/score/gradient.cuh"
#include "prims/instructions/warp.cuh"

constexpr int ACCESSES = HEAD_DIM / VEC;  // of a row
// Lanes that share a row: at most the accesses of a row, but enough that every thread has a row.
constexpr int WANTED = ACCESSES > NUM_THREADS / BLOCK_Q ? ACCESSES : NUM_THREADS / BLOCK_Q;
constexpr int LANES = power_of_two_from(WANTED < WARP_SIZE ? WANTED : WARP_SIZE);
constexpr int PASS_ROWS = NUM_THREADS / LANES;                             // rows at a time
constexpr int PASSES = BLOCK_Q / PASS_ROWS < 4 ? BLOCK_Q / PASS_ROWS : 4;  // on their way together

static_assert(BLOCK_Q % PASS_ROWS == 0, "BLOCK_Q must be a multiple of the rows of a pass");
static_assert(ROW_PAD % BLOCK_Q == 0, "BLOCK_Q must divide ROW_PAD: a block pads whole");

// Whether no kept block of keys has a key that the row may attend to.
__device__ __forceinline__ bool has_no_keys(
    const AttnParams& p, int64_t batch, int64_t head, int row) {
  const KeptKeys keys(p, batch, head, row, kv_begin(p, row), kv_end(p, row, 1));
  return keys.end <= keys.begin;
}

// Delta of a row, whose index in lse and in d_lse is `at`.
template <typename Params>
__device__ __forceinline__ float less_d_lse(float sum, const Params& grad, float lse, int64_t at) {
  if constexpr (D_LSE) return lse == NEG_INF ? sum : sum - grad.d_lse[at];  // R8
  return sum;
}

// M and the factor of a coarse row that has keys elsewhere, too. Returns whether they are set.
template <typename Params>
__device__ __forceinline__ bool set_coarse(
    const Params& grad, float lse, int64_t at, int64_t padded) {
  if constexpr (PART_SUMS) {
    if (padded % COARSE_ROWS == 0) grad.coarse[padded / COARSE_ROWS] = 1;  // 1: other factors
    if (!is_coarse(grad, lse)) return false;
    grad.row_M[padded] = grad.given_M[at];
    grad.row_factor[padded] = grad.given_factor[at];
    return true;
  }
  return is_coarse(grad, lse);  // backward_coarse has that row
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_delta(
    const __grid_constant__ AttnParams call,
    const __grid_constant__ SummedDeltaParams<PART_SUMS> grad) {
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
      const int64_t at = lse - call.lse + q0 + i;
      grad.delta[padded + i] = less_d_lse(sum, grad, row_lse, at);
      if (set_coarse(grad, row_lse, at, padded + i)) continue;
      grad.row_M[padded + i] = row_maximum_from(row_lse);
      grad.row_factor[padded + i] = 1.0f;
    }
  }
}
