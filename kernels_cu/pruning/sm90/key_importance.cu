// key_importance, Hopper form -- the mean of the probabilities that some query rows give to each
//                                key, from keys that are read once.
//
// Idea         A thread block cluster has all keys of a head at a time. A warp has 64 keys, whose
//              scores with a chunk of rows take 64 registers of a lane. Blocks exchange the maximum
//              and the sum of rows through distributed shared memory, so nothing is computed twice.
//              A cluster takes several heads in turn. Keys come in tiles of 16 through a separate
//              ring for each warp. Keys of the next head are in flight while blocks wait for each
//              other. Two blocks share an SM.
// KEY_SUMS     The keys of a block are also summed, for the mean that smoothing subtracts from keys
//              (quantize.cu). This is one more product of a tile that is in shared memory anyway.
// Differs from key_importance.cu, two kernels, which takes any number of keys, on any device.
// Kept simple  Rows of one query head at a time: a cluster reads the keys again for each chunk of
//              rows, from the L2 cache. Their sums are then computed again, and stored with the
//              first chunk.
// Rounding     as key_importance.cu, but that exponentials are taken at the maximum of a warp
// Bound        docs/MATH_REFERENCE.md [L52]
#include "prims/instructions/cluster.cuh"
#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/params.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct ClusterImportanceParams {
  const void* Q;       // [batch, heads_kv * group, len_q, HEAD_DIM]
  const void* K;       // [batch, heads_kv, len_kv, HEAD_DIM]
  float* importance;   // [batch, heads_kv, len_kv]
  float* partial_sum;  // [batch, heads_kv, CLUSTER, HEAD_DIM], of a block's keys; not read unless
                       // KEY_SUMS
  Strides Q_stride;
  Strides K_stride;
  int32_t heads;  // batch * heads_kv
  int32_t turns;  // heads that a cluster takes in turn, as far as there are
  int32_t heads_kv;
  int32_t group;      // query heads of a key head
  int32_t first_row;  // of Q; then every row_step-th
  int32_t row_step;
  int32_t rows;  // so many, of every query head
  int32_t len_kv;
  float scale_log2;  // softmax scale times log2(e)
  float share;       // 1 / (group * rows)
};

constexpr int HEAD_DIM_PAD = round_up(HEAD_DIM, 16);
constexpr int CHUNKS = HEAD_DIM_PAD / 8;                // 16-byte chunks per row
constexpr int MMA_ROWS = BLOCK_Q / 16;                  // row tiles of 16, all of them to each warp
constexpr int WARP_KV = BLOCK_KV / NUM_WARPS;           // keys per warp
constexpr int MMA_KEYS = WARP_KV / 8;                   // key tiles of 8 of a warp
constexpr int TILE_KV = 16;                             // keys of a stage, and of an ldmatrix
constexpr int TILES = WARP_KV / TILE_KV;                // of a warp and a head
constexpr int SM_WARPS = HEAD_DIM_PAD <= 128 ? 16 : 8;  // for which shared memory suffices
constexpr int SM_BLOCKS = NUM_WARPS < SM_WARPS ? SM_WARPS / NUM_WARPS : 1;  // at least
constexpr int SUM_TILES = ceil_div(HEAD_DIM_PAD / 16, 8);  // fragments of the sums of a warp's keys
using Scores = float[MMA_ROWS][MMA_KEYS][4];

struct SharedStorage {
  alignas(128) elem_t Q[BLOCK_Q * HEAD_DIM_PAD];
  alignas(128) elem_t K[NUM_WARPS][NUM_STAGES][TILE_KV * HEAD_DIM_PAD];
  float K_sum[NUM_WARPS][SUM_TILES * 4]
             [WARP_SIZE];                     // over the keys of a warp, as its lanes have it
  float of_warp[NUM_WARPS][BLOCK_Q][2];       // M and l of a row, over the keys of a warp
  alignas(16) float of_block[2][BLOCK_Q][2];  // over the keys of the block; other blocks read it
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage);

static_assert(ELEM_IS_16_BIT, "key_importance multiplies float16 or bfloat16");
static_assert(BLOCK_Q == WARP_SIZE, "BLOCK_Q must be 32: a lane to each row merges its states");
static_assert(WARP_KV == 64, "BLOCK_KV / NUM_WARPS must be 64: a key tile to each row of lanes");
static_assert(
    NUM_STAGES >= 2 && NUM_STAGES <= TILES,
    "NUM_STAGES must be 2 to 4, at most the tiles of a warp: the ring has keys of two heads");

// The work of a cluster at a time: a chunk of the rows of one query head, and its keys.
struct Item {
  int head;       // of batch * heads_kv
  int chunk = 0;  // of the rows of its query heads
  static __device__ __forceinline__ int head_chunks(const ClusterImportanceParams& p) {
    return ceil_div(p.rows, BLOCK_Q);
  }
  static __device__ __forceinline__ int chunks(const ClusterImportanceParams& p) {
    return p.group * head_chunks(p);
  }
  __device__ __forceinline__ void advance(const ClusterImportanceParams& p) {
    if (++chunk == chunks(p)) chunk = 0, ++head;
  }
  __device__ __forceinline__ int first_row(const ClusterImportanceParams& p) const {
    return chunk % head_chunks(p) * BLOCK_Q;
  }
  __device__ __forceinline__ int rows(const ClusterImportanceParams& p) const {
    return min(BLOCK_Q, p.rows - first_row(p));
  }
  __device__ __forceinline__ const elem_t* Q(const ClusterImportanceParams& p) const {
    const int query_head = head % p.heads_kv * p.group + chunk / head_chunks(p);
    const int64_t row = p.first_row + int64_t(first_row(p)) * p.row_step;
    return static_cast<const elem_t*>(p.Q) + head / p.heads_kv * p.Q_stride.batch +
           query_head * p.Q_stride.head + row * p.Q_stride.len;
  }
  __device__ __forceinline__ const elem_t* K(const ClusterImportanceParams& p) const {
    return static_cast<const elem_t*>(p.K) + head / p.heads_kv * p.K_stride.batch +
           head % p.heads_kv * p.K_stride.head;
  }
};

// The sum of a warp's keys. Column 16 n + i of K is summed in row i, column n of a matrix. Products
// of transposed tiles of K with ones in column n alone add to it. So each lane has different sums,
// 4 for every 128 columns. A number that is not finite spoils its row, which is allowed. The mean
// is 0 if a sum is not finite, and any vector is valid.
struct KeySums {
  float x[SUM_TILES][4] = {};
  // The tile's columns from 16 n on; the address is this lane's, as for a fragment of K.
  __device__ __forceinline__ void add(uint32_t tile_columns, int n) {
    uint32_t K_frag[4];  // two halves of the columns, two key tiles
    ldmatrix_x4_trans(K_frag, tile_columns);
    const uint32_t ones = lane_id() / 4 == n % 8 ? pack_rn<elem_t>(1.0f, 1.0f) : 0;
    mma_m16n8k16<elem_t>(x[n / 8], K_frag, ones, ones);  // R0
  }
  __device__ __forceinline__ void store(float (&of_lanes)[SUM_TILES * 4][WARP_SIZE]) const {
#pragma unroll
    for (int i = 0; i < SUM_TILES * 4; ++i) of_lanes[i][lane_id()] = x[i / 4][i % 4];
  }
  // The column of this lane's register i, counted over all tiles.
  static __device__ __forceinline__ int column(int i) {
    return (i / 4 * 8 + lane_id() % 4 * 2 + i % 2) * 16 + i % 4 / 2 * 8 + lane_id() / 4;
  }
};

// The sums of a block's keys, [HEAD_DIM], added over its warps in rising order.
__device__ __forceinline__ void store_key_sums(
    float* of_block, const float (&of_warp)[NUM_WARPS][SUM_TILES * 4][WARP_SIZE]) {
  // The last warps first, because others wait for warp 0.
#pragma unroll 1
  for (int i = NUM_WARPS - 1 - warp_id(); i < SUM_TILES * 4; i += NUM_WARPS) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; ++warp) sum += of_warp[warp][i][lane_id()];  // R0
    if (const int col = KeySums::column(i); col < HEAD_DIM) of_block[col] = sum;
  }
}

// Maximum and sum of a row from the results for parts of its keys.
template <int PARTS>
__device__ __forceinline__ RowState merged(const Vec<float, 2> (&part)[PARTS]) {
  RowState all;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) all.M = fmaxf(all.M, part[i].v[0]);
  const float M = all.M_finite();
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    all.l = fmaf(part[i].v[1], ex2_approx_ftz(part[i].v[0] - M), all.l);  // R4
  return all;
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, SM_BLOCKS)
CLUSTER_OF_SPLITS
void key_importance(const __grid_constant__ ClusterImportanceParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  Item item = {int(blockIdx.x / CLUSTER * p.turns)}, loading = item;
  const int end_head = item.head + min(p.turns, p.heads - item.head);
  const int own_key = (blockIdx.x % CLUSTER * NUM_WARPS + warp_id()) * WARP_KV;
  const int g = lane_id() / 4, t = lane_id() % 4;
  auto& K_ring = smem.K[warp_id()];
  const uint32_t Q_lane = shared_address(swizzled<CHUNKS>(smem.Q, lane_id() % 16, lane_id() / 16));
  const uint32_t K_lane = shared_address(
      swizzled<CHUNKS>(K_ring[0], lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2));

  // Loads, one group for each tile or chunk of rows, empty past the end.
  const elem_t* K = loading.K(p) + own_key * p.K_stride.len;  // [WARP_KV, HEAD_DIM]
  auto load_tile = [&](int tile, int stage) {
    if (loading.head < end_head)
      load_tile_async<TILE_KV, HEAD_DIM, HEAD_DIM_PAD, VEC, WARP_SIZE>(
          K_ring[stage], K + tile * TILE_KV * p.K_stride.len, p.K_stride.len,
          p.len_kv - own_key - tile * TILE_KV, lane_id());
    cp_async_commit_group();
  };
  auto load_rows = [&] {
    if (loading.head < end_head)
      load_tile_async<BLOCK_Q, HEAD_DIM, HEAD_DIM_PAD, VEC>(
          smem.Q, loading.Q(p), p.row_step * p.Q_stride.len, loading.rows(p), thread_id());
    cp_async_commit_group();
  };
  load_rows();
#pragma unroll
  for (int tile = 0; tile < NUM_STAGES; ++tile) load_tile(tile, tile);

  int first_stage = 0;  // of the item's tiles, which go round the ring
#pragma unroll 1
  for (int turn = 0; item.head < end_head; item.advance(p), turn ^= 1) {
    // Scores: this lane has rows g, g + 8 of each row tile, keys 8 n + 2 t, + 1 of key tile n.
    Scores S = {};
    KeySums K_sum = {};
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      int stage = first_stage + tile % NUM_STAGES;
      if (stage >= NUM_STAGES) stage -= NUM_STAGES;
      const uint32_t K_tile = K_lane + stage * sizeof(K_ring[0]);
      if (tile == 0) {  // the rows were asked for after these tiles
        cp_async_wait_group<0>();
        __syncthreads();  // the rows that all warps loaded are visible
      } else {
        cp_async_wait_group<NUM_STAGES - 1>();
        __syncwarp();  // the keys that all lanes loaded are visible
      }
#pragma unroll
      for (int k = 0; k < HEAD_DIM_PAD / 16; ++k) {
        uint32_t K_frag[4];  // two key tiles, two halves of k
        ldmatrix_x4(K_frag, swizzled_from<CHUNKS>(K_tile, 0, 2 * k));
#pragma unroll
        for (int r = 0; r < MMA_ROWS; ++r) {
          uint32_t Q_frag[4];
          ldmatrix_x4(Q_frag, swizzled_from<CHUNKS>(Q_lane, r * 16, 2 * k));
          mma_m16n8k16<elem_t>(S[r][2 * tile], Q_frag, K_frag[0], K_frag[1]);      // R2
          mma_m16n8k16<elem_t>(S[r][2 * tile + 1], Q_frag, K_frag[2], K_frag[3]);  // R2
        }
      }
      if constexpr (KEY_SUMS)
#pragma unroll
        for (int k = 0; k < HEAD_DIM_PAD / 16; ++k)
          K_sum.add(swizzled_from<CHUNKS>(K_tile, 0, 2 * k), k);
      __syncwarp();  // no lane reads the stage any more
      const int next = (tile + NUM_STAGES) % TILES;
      if (next == 0) {
        loading.advance(p);
        K = loading.K(p) + own_key * p.K_stride.len;
      }
      load_tile(next, stage);
    }
    if constexpr (TILES % NUM_STAGES != 0)
      first_stage = (first_stage + TILES % NUM_STAGES) % NUM_STAGES;

    if (KEY_SUMS && item.chunk == 0) K_sum.store(smem.K_sum[warp_id()]);

    // NOTE: with a separate rounding, or some scores would exceed their maximum.
#pragma unroll
    for (auto& row : S)
#pragma unroll
      for (auto& tile : row)
#pragma unroll
        for (float& s : tile) s = __fmul_rn(s, p.scale_log2);
    if (own_key + WARP_KV > p.len_kv)
#pragma unroll
      for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (own_key + n * 8 + t * 2 + i % 2 >= p.len_kv)
#pragma unroll
            for (int r = 0; r < MMA_ROWS; ++r) S[r][n][i] = NEG_INF;

    // Row states over the keys of this warp; scores become exponentials at its maxima.
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        RowState state;
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& s = S[r][n][2 * h + j];
            state.M = fmaxf(state.M, s);
          }
        state.M = shfl_max<4>(state.M);
        const float M = state.M_finite();
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& s = S[r][n][2 * h + j];
            s = ex2_approx_ftz(s - M);  // R4
            state.l += s;
          }
        state.l = shfl_sum<4>(state.l);
        if (t == 0) {
          smem.of_warp[warp_id()][r * 16 + h * 8 + g][0] = state.M;
          smem.of_warp[warp_id()][r * 16 + h * 8 + g][1] = state.l;
        }
      }

    // Over the keys of the block, then of the cluster: one lane for each row.
    const int row = lane_id();
    float (&of_block)[2] = smem.of_block[turn][row];
    __syncthreads();  // the states of all warps are visible
    if (warp_id() == 0) {
      Vec<float, 2> part[NUM_WARPS];
#pragma unroll
      for (int warp = 0; warp < NUM_WARPS; ++warp)
        part[warp] = {smem.of_warp[warp][row][0], smem.of_warp[warp][row][1]};
      const RowState of_all = merged(part);
      of_block[0] = of_all.M, of_block[1] = of_all.l;
      cluster_arrive();
    } else {
      cluster_arrive_relaxed();
    }
    load_rows();                      // no thread reads rows of this item any more
    if (KEY_SUMS && item.chunk == 0)  // while blocks wait for each other
      store_key_sums(
          p.partial_sum + (int64_t(item.head) * CLUSTER + blockIdx.x % CLUSTER) * HEAD_DIM,
          smem.K_sum);
    // The states of all blocks are visible, and no block reads the states that the next item but
    // one overwrites.
    // NOTE: warp 0 alone publishes. It wrote all data that other blocks read, and each lane arrives
    // after its own writes. Its block's reads of other blocks come before the __syncthreads, hence
    // before its arrival and before any write of theirs that follows their wait. A release by all
    // warps would make each wait until its sums and its importance are in memory.
    cluster_wait();
    Vec<float, 2> part[CLUSTER];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) part[rank] = load_from_block(of_block, rank);
    const RowState all = merged(part);
    const float M_warp = smem.of_warp[warp_id()][row][0];
    const float own_factor = row < item.rows(p)  // from exponentials to shares of the mean
                                 ? p.share / all.l * ex2_approx_ftz(M_warp - all.M_finite())  // R4
                                 : 0.0f;

    // Sums over this lane's rows, then over g. Each lane passes half of its key tiles to another
    // lane and continues with the other half, until it has tile g alone.
    float sum[MMA_KEYS][2] = {};
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = __shfl_sync(FULL_WARP, own_factor, r * 16 + h * 8 + g);
#pragma unroll
        for (int n = 0; n < MMA_KEYS; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) sum[n][j] = fmaf(factor, S[r][n][2 * h + j], sum[n][j]);
      }
#pragma unroll
    for (int half = MMA_KEYS / 2; half > 0; half /= 2)
#pragma unroll
      for (int n = 0; n < half; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float low = sum[n][j], high = sum[n + half][j];
          const float other = __shfl_xor_sync(FULL_WARP, g & half ? low : high, 4 * half);
          sum[n][j] = (g & half ? high : low) + other;
        }
    float* importance = p.importance + int64_t(item.head) * p.len_kv;  // [len_kv]
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (const int key = own_key + g * 8 + t * 2 + j; key < p.len_kv)
        importance[key] = (item.chunk == 0 ? 0.0f : importance[key]) + sum[0][j];
  }
  cluster_sync();  // no block reads this block's states any more
}
