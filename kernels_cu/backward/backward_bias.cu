// backward_bias -- the gradient of an additive bias, summed over the axes that it broadcasts along.
//
// Idea         A block owns a tile of dBias. In one order it visits all tiles of scores that share
//              it, and adds P (dP - Delta) to sums in registers. No other block adds to the tile,
//              so no atomics are needed, and every run has the same bits.
// Differs from backward_queries: dS stops before the slope of the softcap, and no product follows.
// Kept simple  One stage: a step loads its four tiles, waits, and multiplies. Rows or keys that
//              broadcast are added up last, one thread to an element. Few elements mean few blocks.
// Rounding     R9 P from the log-sum-exp, R10 dP, R11 P (dP - Delta), R12 float32 sums, store
// Mirror       cupyattn.gradients.backward_mirror    Bound  cupyattn.gradients.backward_bound
#include "prims/config.cuh"
#include "prims/score/gradient.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/io/varlen.cuh"
#include "prims/instructions/warp.cuh"

constexpr int HEAD_DIM_PAD = round_up(HEAD_DIM, 16);
constexpr int CHUNKS = HEAD_DIM_PAD / 8;  // 16-byte chunks per row
constexpr int MMA_KEYS = BLOCK_KV / 8;    // key tiles of 8 per step
constexpr int SUM_PAD = BLOCK_KV + 8;     // floats of a row of sums: no bank conflict of pairs

struct Operands {
  alignas(128) elem_t Q[BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t dO[BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t K[BLOCK_KV * HEAD_DIM_PAD];
  alignas(128) elem_t V[BLOCK_KV * HEAD_DIM_PAD];
};
union SharedStorage {
  Operands tiles;
  alignas(8) float sums[BLOCK_Q * SUM_PAD];  // [BLOCK_Q, BLOCK_KV], after the last step
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);
// dO lies behind Q, and V behind K: a lane adds these offsets to one address for both.
constexpr uint32_t dO_FROM_Q = sizeof(Operands::Q);
constexpr uint32_t V_FROM_K = sizeof(Operands::K);

static_assert(ELEM_IS_16_BIT, "gradients are of float16 or bfloat16");
static_assert(BLOCK_Q == 16 * NUM_WARPS, "BLOCK_Q must be 16 rows for each warp, those of an mma");
static_assert(BLOCK_KV % 16 == 0, "BLOCK_KV must be a multiple of 16, two key tiles of an mma");
static_assert(ROW_PAD % BLOCK_Q == 0, "BLOCK_Q must divide ROW_PAD, to which rows are padded");

// The indices of an axis that a tile of dBias sums: its indices, or all if the axis broadcasts.
struct Shared {
  int begin, end;
  __device__ __forceinline__ Shared(int of_bias, int own, int step, int length)
      : begin(of_bias == 1 ? 0 : own), end(of_bias == 1 ? length : min(own + step, length)) {}
};

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void backward_bias(
    const __grid_constant__ AttnParams call, const __grid_constant__ BackwardParams grad,
    const __grid_constant__ BiasGradientParams bias) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  // S0 locate: the tile of dBias, and all score tiles that share it
  const int key_tiles = ceil_div(bias.keys, BLOCK_KV), row_tiles = ceil_div(bias.rows, BLOCK_Q);
  int64_t tile = blockIdx.x;
  const int key0 = tile % key_tiles * BLOCK_KV;
  tile /= key_tiles;
  const int row0 = tile % row_tiles * BLOCK_Q;
  tile /= row_tiles;
  const Shared heads(bias.heads, tile % bias.heads, 1, call.heads);
  const Shared batches(bias.batches, tile / bias.heads, 1, call.batch);
  const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh
  const int warp_row = warp_id() * WARP_Q;         // first row of this warp in a tile
  // Where this lane points the first ldmatrix of each operand, as in attn_fa_tc.cu.
  const uint32_t Q_lane =
      shared_address(swizzled<CHUNKS>(smem.tiles.Q, warp_row + lane_id() % 16, lane_id() / 16));
  const uint32_t K_lane = shared_address(
      swizzled<CHUNKS>(smem.tiles.K, lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2));

  float sum[MMA_KEYS][4] = {};
#pragma unroll 1
  for (int64_t batch = batches.begin; batch < batches.end; ++batch) {
    const auto& p = of_batch(call, batch);
    const int first_row = Sequences<VARLEN>(call, batch).first_row();
    const Shared rows(bias.rows, row0, BLOCK_Q, p.len_q);
    const Shared columns(bias.keys, key0, BLOCK_KV, p.len_kv);
#pragma unroll 1
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      // NOTE: the compiler divides heads / heads_kv before the loop, also without heads.
      const int64_t head_kv = head * p.heads_kv / p.heads;
      const elem_t* Q = static_cast<const elem_t*>(p.Q)  // [len_q, HEAD_DIM]
                        + batch * p.Q_stride.batch + head * p.Q_stride.head;
      const elem_t* dO = static_cast<const elem_t*>(grad.dO)  // [len_q, HEAD_DIM]
                         + batch * grad.dO_stride.batch + head * grad.dO_stride.head +
                         first_row * grad.dO_stride.len;
      const elem_t* K = static_cast<const elem_t*>(p.K)  // [len_kv, HEAD_DIM]
                        + batch * p.K_stride.batch + head_kv * p.K_stride.head;
      const elem_t* V = static_cast<const elem_t*>(p.V)  // [len_kv, HEAD_DIM]
                        + batch * p.V_stride.batch + head_kv * p.V_stride.head;
      const Scores scores(p, batch, head);
#pragma unroll 1
      for (int q0 = rows.begin; q0 < rows.end; q0 += BLOCK_Q) {
        const int first_key = kv_begin(p, q0), end_key = kv_end(p, q0, BLOCK_Q);
        const KeptKeys kept(p, batch, head, q0, first_key, end_key);
        const int64_t padded = padded_row(call, grad, batch, head) + q0 + warp_row;
#pragma unroll 1
        for (int kv0 = columns.begin; kv0 < columns.end; kv0 += BLOCK_KV) {
          if (kv0 >= end_key || kv0 + BLOCK_KV <= first_key || !kept.include(kv0)) continue;
          // S1 load
          __syncthreads();  // the tiles of the step before are no longer read
          load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
              smem.tiles.Q, Q + q0 * p.Q_stride.len, p.Q_stride.len, p.len_q - q0, thread_id());
          load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
              smem.tiles.dO, dO + q0 * grad.dO_stride.len, grad.dO_stride.len, p.len_q - q0,
              thread_id());
          load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
              smem.tiles.K, K + kv0 * p.K_stride.len, p.K_stride.len, p.len_kv - kv0, thread_id());
          load_tile_async<BLOCK_KV, HEAD_DIM, HEAD_DIM_PAD, VEC>(
              smem.tiles.V, V + kv0 * p.V_stride.len, p.V_stride.len, p.len_kv - kv0, thread_id());
          cp_async_commit_group();
          cp_async_wait_group<0>();
          __syncthreads();  // this step's tiles are visible

          // S2 scores, and dP
          float S_acc[MMA_KEYS][4] = {}, dP_acc[MMA_KEYS][4] = {};
#pragma unroll
          for (int k = 0; k < HEAD_DIM_PAD / 16; ++k) {
            uint32_t Q_frag[4], dO_frag[4];
            ldmatrix_x4(Q_frag, swizzled_from<CHUNKS>(Q_lane, 0, 2 * k));
            ldmatrix_x4(dO_frag, swizzled_from<CHUNKS>(Q_lane + dO_FROM_Q, 0, 2 * k));
#pragma unroll
            for (int n = 0; n < MMA_KEYS; n += 2) {
              uint32_t K_frag[4], V_frag[4];  // two key tiles, two halves of k
              ldmatrix_x4(K_frag, swizzled_from<CHUNKS>(K_lane, n * 8, 2 * k));
              ldmatrix_x4(V_frag, swizzled_from<CHUNKS>(K_lane + V_FROM_K, n * 8, 2 * k));
              mma_m16n8k16<elem_t>(S_acc[n], Q_frag, K_frag[0], K_frag[1]);        // R9
              mma_m16n8k16<elem_t>(S_acc[n + 1], Q_frag, K_frag[2], K_frag[3]);    // R9
              mma_m16n8k16<elem_t>(dP_acc[n], dO_frag, V_frag[0], V_frag[1]);      // R10
              mma_m16n8k16<elem_t>(dP_acc[n + 1], dO_frag, V_frag[2], V_frag[3]);  // R10
            }
          }

          // S3 sums
          const bool coarse = any_coarse<WARP_Q>(grad.coarse + padded / COARSE_ROWS);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int own = g + i / 2 * 8, row = q0 + warp_row + own;
            const float M = grad.row_M[padded + own], delta = grad.delta[padded + own];
#pragma unroll
            for (int n = 0; n < MMA_KEYS; ++n) {
              const int key = kv0 + n * 8 + t * 2 + i % 2;
              // A key or row that is masked or past the end adds nothing, even if it holds NaN.
              if (row >= p.len_q || !scores.admit(row, key)) continue;
              const float S = scores.of(S_acc[n][i] * p.scale, row, key);  // R9
              float P = probability(S, p.scale_log2, M);
              if (coarse) P = normalised(P, grad.row_factor[padded + own]);
              sum[n][i] += P * (dP_acc[n][i] - delta);  // R11, R12
            }
          }
        }
      }
    }
  }

  // S4 add up the axes that broadcast within the tile, and store
  __syncthreads();  // the last tiles are no longer read
#pragma unroll
  for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* pair =  // [2]
          smem.sums + (warp_row + g + h * 8) * SUM_PAD + n * 8 + t * 2;
      *reinterpret_cast<float2*>(pair) = make_float2(sum[n][2 * h], sum[n][2 * h + 1]);
    }
  __syncthreads();  // sums are visible
  const int rows = min(BLOCK_Q, bias.rows - row0), keys = min(BLOCK_KV, bias.keys - key0);
  const int summed_rows = bias.rows == 1 ? BLOCK_Q : 1, summed_keys = bias.keys == 1 ? BLOCK_KV : 1;
  bias_t* dBias = static_cast<bias_t*>(bias.dBias)  // [rows, keys], from row row0 and key key0
                  + (tile * bias.rows + row0) * bias.keys + key0;
  for (int i = thread_id(); i < rows * keys; i += NUM_THREADS) {
    const int row = i / keys, key = i % keys;
    float total = 0.0f;
#pragma unroll 1
    for (int r = row; r < row + summed_rows; ++r)
#pragma unroll 1
      for (int k = key; k < key + summed_keys; ++k) total += smem.sums[r * SUM_PAD + k];  // R12
    dBias[int64_t(row) * bias.keys + key] = from_float<bias_t>(total);                    // R12
  }
}
