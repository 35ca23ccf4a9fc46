// attn_fa_int8_fused -- fa_int8 that quantises itself: one kernel, codes never leave the block.
//
// Idea         No pass before the kernel. The block quantises its rows of Q when it begins, and
//              each tile of K when it arrives. A group of rows is within a tile, so its scale is
//              known. Codes and scales stay in shared memory; only O and lse are written.
// Differs from attn_fa_int8: S1 and S2 quantise the rows that they load; every block repeats S2,
//              which a pass would avoid. The next tile does not arrive during this one. S3 to S6
//              are the same, without a mean of the keys, which would need all of them.
//              (diff attn_fa_int8.cu forms/attn_fa_int8_fused.cu)
// Kept simple  the same bits as quantize.cu and attn_fa_int8 with the same tiles.
// Rounding     R1 by quantize_tile.cuh, then as in attn_fa_int8: R3 the factor of both scales,
//              within R4's fma; R4 exp2, R5 P to 16 bits, R6 alpha, l and the tensor core over
//              keys, R7 times 1/l and store (cupyattn/kernels/numerics.py)
// Mirror       cupyattn.reference.attention_mirror     Bound  cupyattn.bounds.attention
#include "prims/config.cuh"
#include "prims/codes/key_parts.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/mma_tiles.cuh"
#include "prims/score/fragment_rows.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/codes/quantize_tile.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/codes/zero_points.cuh"

constexpr int CHUNKS = HEAD_DIM_PAD / 8;  // 16-byte chunks per row of V
constexpr float LARGEST_SUM = 256.0f;     // 2^LARGEST_EXPONENT, of a lane's weights, or M rises

struct SharedStorage {
  alignas(128) int8_t Q[BLOCK_Q * CODES_PAD];
  alignas(128) int8_t K[BLOCK_KV * CODES_PAD];
  alignas(128) elem16_t V[BLOCK_KV * HEAD_DIM_PAD];
  float Q_scale[BLOCK_Q];
  float K_scale[BLOCK_KV];
  TileGroups<BLOCK_Q, GROUP_Q> Q_groups;
  TileGroups<BLOCK_KV, GROUP_KV> K_groups;
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + ZERO_TILES_BYTES;

static_assert(NUM_STAGES == 1, "NUM_STAGES must be 1: a tile is quantised when it is needed");
static_assert(
    BLOCK_Q % GROUP_Q == 0 && BLOCK_KV % GROUP_KV == 0,
    "BLOCK_Q and BLOCK_KV must hold whole groups of GROUP_Q and GROUP_KV rows");

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void attn_fa_int8_fused(
    const __grid_constant__ AttnParams call) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate
  const int q_blocks = ceil_div(call.len_q, BLOCK_Q);
  const int q0 = (q_blocks - 1 - blockIdx.x % q_blocks) * BLOCK_Q;  // longest causal rows first
  const int64_t batch_head = blockIdx.x / q_blocks;
  const int64_t batch = batch_head / call.heads, head = batch_head % call.heads;
  const auto& p = of_batch(call, batch);
  if (VARLEN && q0 >= p.len_q) return;
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [len_q, HEAD_DIM], from row q0
                    + batch * p.Q_stride.batch + head * p.Q_stride.head + q0 * p.Q_stride.len;
  const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM]
                    + batch * p.K_stride.batch + head_kv * p.K_stride.head;
  const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM]
                    + batch * p.V_stride.batch + head_kv * p.V_stride.head;
  elem_t* O = static_cast<elem_t*>(p.O)  // [len_q, HEAD_DIM], from row q0
              + batch * p.O_stride.batch + head * p.O_stride.head + q0 * p.O_stride.len;
  const int row0 = warp_id() * WARP_Q;             // first row of this warp in the block
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  // Where this lane points the first ldmatrix of each operand; swizzled_from() goes on from there.
  const uint32_t Q_lane = chunk_address<CODE_CHUNKS>(smem.Q, row0 + lane_id() % 16, lane_id() / 16);
  const uint32_t K_lane = key_address<CODE_CHUNKS>(smem.K);
  const uint32_t V_lane = chunk_address<CHUNKS>(smem.V, lane_id() % 16, lane_id() / 16);
  const Scores scores(p, batch, head);
  auto& zeros = *reinterpret_cast<ZeroTiles*>(shared_bytes + sizeof(SharedStorage));

  // S1 load Q
  quantize_tile<CODES_PAD>(
      smem.Q, smem.Q_scale, zeros.Q, smem.Q_groups, Q, p.Q_stride.len, p.len_q - q0);
  __syncthreads();  // scales and zero points are there before they are read
  if constexpr (ZERO_POINTS)
    for (int i = thread_id(); i < BLOCK_Q; i += NUM_THREADS)
      zeros.Q[i].y -= HEAD_DIM * zeros.Q[i].x;
  float Q_factor[MMA_ROWS][2];  // Q scale and softmax scale of rows g and g + 8 of each row tile
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      Q_factor[r][h] = factor_of_Q_row(p, smem.Q_scale[row0 + r * 16 + g + h * 8]);  // R3
  const KeptKeys keys(p, batch, head, q0, kv_begin(p, q0), kv_end(p, q0, BLOCK_Q));
  const int first_step = keys.begin / BLOCK_KV;
  const int num_steps = ceil_div(keys.end, BLOCK_KV);

  RowState state[MMA_ROWS][2];  // rows g and g + 8 of each row tile
  float O_acc[MMA_ROWS][MMA_COLS][4] = {};
  for (int step = first_step; step < num_steps; ++step) {
    const int kv0 = keys.key(step * BLOCK_KV);
    __syncthreads();  // the tiles of the step before are no longer read
    // S2 load K, V
    load_tile_16<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
        smem.V, V + kv0 * p.V_stride.len, p.V_stride.len, p.len_kv - kv0, thread_id());
    cp_async_commit_group();
    quantize_tile<CODES_PAD>(
        smem.K, smem.K_scale, zeros.K[0], smem.K_groups, K + kv0 * p.K_stride.len, p.K_stride.len,
        p.len_kv - kv0);
    cp_async_wait_group<0>();
    __syncthreads();  // the tiles of this step are visible

    // S3 scores
    int32_t dot[MMA_ROWS][MMA_KEYS][4] = {};
#pragma unroll
    for (int k = 0; k < CODES_PAD / 32; ++k) {
      uint32_t Q_frag[MMA_ROWS][4];
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
        ldmatrix_x4(Q_frag[r], swizzled_from<CODE_CHUNKS>(Q_lane, r * 16, 2 * k));
#pragma unroll
      for (int n = 0; n < MMA_KEYS; n += 2) {
        uint32_t K_frag[4];  // two key tiles, two halves of k
        ldmatrix_x4(K_frag, swizzled_from<CODE_CHUNKS>(K_lane, n * 8, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_m16n8k32_s8(dot[r][n], Q_frag[r], K_frag[0], K_frag[1]);
          mma_m16n8k32_s8(dot[r][n + 1], Q_frag[r], K_frag[2], K_frag[3]);
        }
      }
    }
    float part_scale[PARTS];  // of the keys of each part
#pragma unroll
    for (int i = 0; i < PARTS; ++i) part_scale[i] = BY_KEY ? 1.0f : smem.K_scale[i * SCALE_KEYS];
    float S_acc[MMA_ROWS][MMA_KEYS][4];  // the factor is still to come
#pragma unroll
    for (int n = 0; n < MMA_KEYS; ++n) {
      float2 k_scale = {1.0f, 1.0f};
      if (BY_KEY) k_scale = *reinterpret_cast<const float2*>(smem.K_scale + n * 8 + t * 2);
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          S_acc[r][n][i] = float(zeros.without(
                               dot[r][n][i], row0 + r * 16 + g + i / 2 * 8, 0,
                               n * 8 + t * 2 + i % 2)) *
                           (i % 2 ? k_scale.y : k_scale.x);  // R3
    }

    // S4 softmax
    if (!scores.are_products(q0 + row0, WARP_Q, kv0, BLOCK_KV)) {
      scores.settle(S_acc, q0 + row0, kv0, [&](int r, int n, int i) {
        const float scale = part_scale[part_of(n * 8)], x = S_acc[r][n][i];
        if constexpr (NATURAL_SCORES) return x * row_factor(Q_factor[r][i / 2], scale);  // R3
        return x + 0.0f * scale;                                                         // exact
      });
      spare_masked(part_scale);
    }
    uint32_t P_frag[BLOCK_KV / 16][MMA_ROWS][4];  // two key tiles of S are one k step of P
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r) {
      auto factor = [&](int h, int n) {  // to log2 units
        return row_factor(Q_factor[r][h], part_scale[part_of(n * 8)]);
      };
      float sum[2];  // of the weights that this lane holds of row g, then of row g + 8
      auto weigh = [&](const float (&M)[2], bool anew) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          sum[h] = 0.0f;
#pragma unroll
          for (int n = 0; n < MMA_KEYS; ++n) {
            const float* pair = S_acc[r][n] + 2 * h;                                       // [2]
            const float x = ex2_approx_ftz(exponent(pair[0], factor(h, n), -M[h], anew));  // R4
            const float y = ex2_approx_ftz(exponent(pair[1], factor(h, n), -M[h], anew));  // R4
            sum[h] += x, sum[h] += y;                                                      // R6
            P_frag[n / 2][r][n % 2 * 2 + h] = pack_rn<elem16_t>(x, y);                     // R5
          }
        }
      };
      float M[2] = {state[r][0].M, state[r][1].M};  // -inf: no key yet, and weights are infinite
      if (!NATURAL_SCORES) weigh(M, false);
      // NOTE: most steps find no weight too large, hence no maximum: M lags, l and O stay.
      bool small[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) small[h] = !NATURAL_SCORES && sum[h] <= LARGEST_SUM;
      if (NATURAL_SCORES || !__all_sync(FULL_WARP, small[0] && small[1])) {
        float m[2];  // the largest score that this lane holds of a row, where M has to rise
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          find_largest(m[h], S_acc[r], h, factor);
          if (small[h]) m[h] = NEG_INF;  // so no row's M depends on its neighbours
        }
        if (__any_sync(FULL_WARP, m[0] > state[r][0].M || m[1] > state[r][1].M)) {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            scale_row(O_acc[r], h, state[r][h].advance(shfl_max<4>(m[h])));  // R6
        }
        M[0] = state[r][0].M_finite(), M[1] = state[r][1].M_finite();
        weigh(M, true);
      }
      state[r][0].l += sum[0], state[r][1].l += sum[1];  // R6: this lane's part of l
    }

    // S5 output
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; ++k) {
#pragma unroll
      for (int c = 0; c < MMA_COLS; c += 2) {
        uint32_t V_frag[4];  // two column tiles, two halves of k
        ldmatrix_x4_trans(V_frag, swizzled_from<CHUNKS>(V_lane, k * 16, c));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          mma_m16n8k16<elem16_t>(O_acc[r][c], P_frag[k][r], V_frag[0], V_frag[1]);      // R6
          mma_m16n8k16<elem16_t>(O_acc[r][c + 1], P_frag[k][r], V_frag[2], V_frag[3]);  // R6
        }
      }
    }
  }

  // S6 store
#pragma unroll
  for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state[r][h].l = shfl_sum<4>(state[r][h].l);  // R6
      state[r][h].l = l_of_Q_row(state[r][h], Q_factor[r][h]);
      const float inverse_l = state[r][h].inverse_l();
      const int row = row0 + r * 16 + g + h * 8;
      if (q0 + row >= p.len_q) continue;
      if constexpr (LSE)
        if (t == 0) lse_of(p, batch_head, head)[q0 + row] = state[r][h].lse();
#pragma unroll
      for (int c = 0; c < MMA_COLS; ++c)
        store_sums(
            O + row * p.O_stride.len, c * 8 + t * 2, O_acc[r][c][2 * h] * inverse_l,
            O_acc[r][c][2 * h + 1] * inverse_l);  // R7
    }
}
