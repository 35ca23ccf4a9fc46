// gemm_int8_channel -- Hopper: INT8 product with one scale for each row of A and each row of B, by
//              pairs of blocks. The library's kernel of this name is a block by itself.
//
// Idea         C[m, n] = A_scale[m] B_scale[n] sum over k of A[m, k] B[n, k]. The sum stays in int32
//              to the end, so the loop holds nothing but wgmma: no conversion, no fma, no shuffle.
// Differs from kernels_cu's gemm_int8, which applies two scales after every 128 codes and is bound
//              by issue slots (1196 TOP/s at 8192^3 in the same race).
// Data flow    A warpgroup copies slices of 128 codes into a ring of stages, the others multiply:
//              TEAMS 1, all of them on one tile, each its rows; TEAMS 2, each on a tile of its own,
//              by turns, so that one stores while the other multiplies. Two blocks of a PAIR hold
//              neighbouring tiles and share the longer operand: each copies half of it to both.
//              Blocks stay and take one tile after the other; slices of the next tile arrive
//              during the store.
// Counts       For a tile of M x N and a slice of 128 codes, in clocks of an SM:
//              products M N / 32 (8192 operations a clock); shared memory, 128 bytes a clock, read
//              by wgmma (16 + N / 4) / (N / 2) of that time and written by copies for M + N clocks;
//              the L2 cache, about 40 bytes a clock and SM, (M + N) 128 bytes, less half of the
//              longer operand in a pair. As shares of the time of the products:
//                tile             read   written  shared memory   bytes a clock: alone   in a pair
//                128 x 128        0.750  0.500    1.250           64.0                   48.0
//                128 x 192        0.667  0.417    1.083           53.3                   37.3
//                128 x 256        0.625  0.375    1.000           48.0                   32.0
//                256 x 128        0.750  0.375    1.125           48.0                   32.0
//                192 x 192        0.667  0.333    1.000           42.7                   32.0
//                192 x 256        0.625  0.292    0.917           37.3                   26.7
//                256 x 192        0.667  0.292    0.958           37.3                   26.7
//              Accumulators: 64 x 256 in int32 are 128 registers of a thread, 128 x 192 are 192.
//              Store, by SASS (NVRTC 13.5): a warp issues 960 instructions for 16 x 256 from
//              registers, 64 of them shuffles, and 760 by way of slots. Eight warps of 128 x 256
//              take 1900 and 1500 clocks: 3 % of a tile at k = 8192 and 7 % at 3072, unless
//              another warpgroup multiplies in the meantime. The loop is 4 wgmma a slice and
//              about 50 other instructions; nothing is spilled without a bias.
// Measured     At 8192^3 on an H100, TOP/s in turn with the others; experiments/results/NOTES.md
//              says what was learnt. "Pair" is a pair of 128 x 256 if no tile is named.
//                128 x 256 alone         predicted 1250 to 1350, measured 1608: the library's
//                its L2 cache reads      predicted 33 to 36 bytes a clock and SM, measured 41
//                pair                    predicted 1450 to 1550, measured 1092
//                pair, slots or lead     predicted 1 to 2 % more, measured 1 % more
//                256 x 192, pair         predicted 1450 to 1550, measured 1177
//                192 x 192, pair         predicted 1350 to 1450, measured 1063
//                192 x 192 at n = 3072   predicted the fastest, measured 0.81 of 128 x 256 alone
//                128 x 192, two teams    predicted 1350 to 1450, measured 837
//                256 x 128, pair         predicted 1350 to 1450, measured 931
//                pair without copies     predicted 1750 to 1850, measured 1692
//                pair without stores     predicted 3 % more, measured 12 % less
// Lost         without a device: 192 x 256 on three warpgroups (ptxas: wgmma with n = 256 needs 154
//              registers where 512 threads have 128 at launch, C7602); 24 registers for a producer
//              whose loop is unrolled (28 bytes spilled); scales of columns per atom in place of
//              per column (256 x 192: 276 bytes spilled, the compiler keeps them all).
// Kept simple  Scales of columns are read from global memory in the store. No k is shared among
//              blocks. What the layers of a transformer add later (residual + gate y) goes where
//              `finished` is called. k must be a multiple of 16, as the copy engine has it.
// Rounding     K1 the product of both scales, K2 the sum to float32 (exact below 2^24), K3 their
//              product, not fused with what follows; then G3 bias, G4 activation, G5 store
#include "multicast.cuh"
#include "prims/config.cuh"
#include "prims/codes/gemm.cuh"
#include "prims/instructions/cluster.cuh"
#include "prims/instructions/named_barrier.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/instructions/wgmma.cuh"
#include "prims/io/output.cuh"

#ifndef CFG_PAIR  // lets an editor parse the kernel on its own
#define CFG_PAIR 1
#define CFG_TEAMS 1
#define CFG_GROUP 16
#define CFG_LEAD 0
#define CFG_STORE_BOXES 0
#endif
// An attribute, which nothing but the preprocessor can leave out.
#if CFG_PAIR > 1
#define CLUSTER_OF_PAIR __cluster_dims__(CFG_PAIR)
#else
#define CLUSTER_OF_PAIR
#endif
constexpr int PAIR = CFG_PAIR;    // blocks of a cluster
constexpr int TEAMS = CFG_TEAMS;  // of consumers, each with a tile of its own
constexpr int GROUP = CFG_GROUP;  // units of rows that are worked on together
constexpr int LEAD = CFG_LEAD;    // slices that a warpgroup begins after the one before it
constexpr int STORE_SLOTS = CFG_STORE_BOXES;  // boxes of C of a warp; 0: stores from registers

constexpr int WARPGROUP = 128;                          // threads
constexpr int CONSUMERS = NUM_THREADS / WARPGROUP - 1;  // warpgroups that compute
constexpr int TEAM = CONSUMERS / TEAMS;                 // warpgroups that share a tile
constexpr int WARPGROUP_ROWS = BLOCK_M / TEAM;          // of a tile
constexpr int ATOMS = WARPGROUP_ROWS / 64;              // wgmma one below the other
constexpr int SUMS = BLOCK_N / 2;                       // of a thread, in one of them
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;

// A pair shares rows of B if the tile has more of these, otherwise rows of A.
constexpr int PAIR_M = BLOCK_N >= BLOCK_M ? PAIR : 1;  // tiles one below the other
constexpr int PAIR_N = PAIR / PAIR_M;                  // tiles side by side
constexpr int COPIED_M = BLOCK_M / PAIR_N;             // rows of A that a block copies
constexpr int COPIED_N = BLOCK_N / PAIR_M;             // rows of B

template <int SLOTS>
struct Staging {
  alignas(1024) elem_t C[CONSUMERS * 4][SLOTS][OWN_BOX];  // of each warp, swizzled
};
template <>
struct Staging<0> {};
struct SharedStorage : Staging<STORE_SLOTS> {
  alignas(1024) int8_t A[NUM_STAGES][BLOCK_M * SLICE];
  alignas(1024) int8_t B[NUM_STAGES][BLOCK_N * SLICE];
  Mbarrier full[NUM_STAGES], empty[NUM_STAGES];
};
extern "C" __device__ int smem_bytes = sizeof(SharedStorage) + 1024;  // room to align the base

static_assert(PAIR == 1 || PAIR == 2, "CFG_PAIR must be 1 or 2 blocks");
static_assert(
    TEAMS == 1 || (TEAMS == 2 && CONSUMERS == 2),
    "CFG_TEAMS must be 1, or 2 with two warpgroups that compute");
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "NUM_WARPS must be 12 or 16");
static_assert(
    ATOMS * 64 * TEAM == BLOCK_M && ATOMS * SUMS <= 192 && (CONSUMERS == 2 || ATOMS * SUMS <= 128),
    "BLOCK_M must be 64 or 128 rows for every warpgroup of a team: what the registers hold");
static_assert(
    LEAD * (CONSUMERS - 1) < NUM_STAGES,
    "CFG_LEAD of all warpgroups together must be less than NUM_STAGES, or nothing would arrive");
static_assert(LEAD == 0 || TEAMS == 1, "CFG_LEAD is of warpgroups that share a tile");
static_assert(STORE_SLOTS == 0 || VEC == 8, "the copy engine stores 16 bytes whole");

// Tiles are taken in units of a pair, GROUP units of rows down before the next columns: those that
// are worked on at the same time form a square and read the fewest rows of A and B between them.
__device__ __forceinline__ int num_units(const GemmParams& p) {
  return ceil_div(p.m, BLOCK_M * PAIR_M) * ceil_div(p.n, BLOCK_N * PAIR_N);
}
__device__ __forceinline__ GemmTile tile_of(const GemmParams& p, int unit, int rank) {
  const int m_units = ceil_div(p.m, BLOCK_M * PAIR_M), n_units = ceil_div(p.n, BLOCK_N * PAIR_N);
  const int first = unit / (GROUP * n_units) * GROUP;
  const int here = min(GROUP, m_units - first);
  const int rest = unit % (GROUP * n_units);
  return {
      ((first + rest % here) * PAIR_M + rank / PAIR_N) * BLOCK_M,
      (rest / here * PAIR_N + rank % PAIR_N) * BLOCK_N};
}

// Passes over `slices` stages, which belong to the other team.
__device__ __forceinline__ void skip(RingPosition<NUM_STAGES>& at, int slices) {
  const int to = at.stage + slices;
  at.parity ^= to / NUM_STAGES & 1;
  at.stage = to % NUM_STAGES;
}

// The warp has read a stage: it may be overwritten, by copies of both blocks.
__device__ __forceinline__ void release(Mbarrier& empty) {
  if constexpr (PAIR > 1) {
    if (lane_id() < PAIR) mbarrier_arrive_cluster(empty, lane_id());
  } else {
    if (lane_id() == 0) mbarrier_arrive(empty);
  }
}

// K1 to K3: an element of C before bias and activation.
__device__ __forceinline__ float scaled(int32_t sum, float A_scale, float B_scale) {
  return __fmul_rn(float(sum), __fmul_rn(A_scale, B_scale));
}

// Scales of columns col and col + 1; past the last column those of others, which multiply zeros.
__device__ __forceinline__ Vec<float, 2> column_scales(const GemmParams& p, int col) {
  if constexpr (VEC >= 2) {
    const float2 x = __ldg(reinterpret_cast<const float2*>(p.B_scale + min(col, p.n - 2)));
    return {{x.x, x.y}};
  } else {
    return {{__ldg(p.B_scale + min(col, p.n - 1)), __ldg(p.B_scale + min(col + 1, p.n - 1))}};
  }
}

// Stores a tile's rows of a warp, 16 from row0 on and 16 for each atom further down, by way of the
// warp's slots, which the copy engine may still be reading when the next call begins. A lane has
// A_scale of its rows g and g + 8 of each atom.
template <int SLOTS>
__device__ __forceinline__ void store_tile(
    const GemmParams& p, const TensorMap& C_map, Staging<SLOTS>& staging, int warp, int row0,
    int n0, const float (&A_scale)[ATOMS][2], const int32_t (&dot)[ATOMS][SUMS]) {
  constexpr int TILES = STORE_COLS / 8;  // of 16 x 8, in a box
  const int t = lane_id() % 4;
  Vec<float, 2> B_scale[TILES];  // of this box's columns; those of the next are on their way early
#pragma unroll
  for (int i = 0; i < TILES; ++i) B_scale[i] = column_scales(p, n0 + i * 8 + t * 2);
#pragma unroll
  for (int n = 0; n < BLOCK_N / 8; n += TILES) {
#pragma unroll
    for (int a = 0; a < ATOMS; ++a) {
      uint32_t C_frag[TILES][2];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int32_t* sums = &dot[a][(n + i) * 4 + h * 2];
          const int col = n0 + (n + i) * 8 + t * 2;
          C_frag[i][h] = pack_rn<elem16_t>(
              finished(p, scaled(sums[0], A_scale[a][h], B_scale[i].v[0]), col),
              finished(p, scaled(sums[1], A_scale[a][h], B_scale[i].v[1]), col + 1));  // G5
        }
      if (a == ATOMS - 1 && n + TILES < BLOCK_N / 8)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
          B_scale[i] = column_scales(p, n0 + (n + TILES + i) * 8 + t * 2);
      elem_t* slot = staging.C[warp][(n / TILES * ATOMS + a) % SLOTS];
      if (lane_id() == 0) cp_async_bulk_wait_group_read_but<SLOTS - 1>();
      __syncwarp();  // the copy engine has read what is overwritten now
      stage_output<OWN_BOX>(slot, C_frag);
      if (lane_id() == 0) {
        if (row0 + a * 64 < p.m && n0 + n * 8 < p.n)
          cp_async_bulk_tensor_4d_store(C_map, slot, n0 + n * 8, row0 + a * 64, 0, 0);
        cp_async_bulk_commit_group();
      }
    }
  }
}
// The same from registers, without slots.
__device__ __forceinline__ void store_tile(
    const GemmParams& p, const TensorMap&, Staging<0>&, int, int row0, int n0,
    const float (&A_scale)[ATOMS][2], const int32_t (&dot)[ATOMS][SUMS]) {
  constexpr int TILES = 4;  // of 16 x 8, that store_row stores at once
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int n = 0; n < BLOCK_N / 8; n += TILES) {
    Vec<float, 2> B_scale[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) B_scale[i] = column_scales(p, n0 + (n + i) * 8 + t * 2);
    ColumnPairs<TILES> bias;
    load_bias<TILES>(p, n0, n, bias);
#pragma unroll
    for (int a = 0; a < ATOMS; ++a)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_row<TILES>(p, row0 + a * 64 + g + h * 8, n0, n, bias, [&](int i, int j) {
          return scaled(dot[a][(n + i) * 4 + h * 2 + j], A_scale[a][h], B_scale[i].v[j]);
        });
  }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) CLUSTER_OF_PAIR void gemm_int8_channel(
    const __grid_constant__ GemmParams p, const __grid_constant__ TensorMap A_map,
    const __grid_constant__ TensorMap B_map, const __grid_constant__ TensorMap C_map) {
  extern __shared__ unsigned char shared_bytes[];
  // NOTE: both blocks of a pair have to round to the same address: dynamic shared memory begins at
  // the same one in all blocks of a kernel.
  auto& smem = *reinterpret_cast<SharedStorage*>(
      (reinterpret_cast<uint64_t>(shared_bytes) + 1023) & ~uint64_t(1023));
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const int rank = blockIdx.x % PAIR, first_unit = blockIdx.x / PAIR, step_units = gridDim.x / PAIR;
  const int slices = code_slices(p), units = num_units(p);

  if (threadIdx.x == 0) {
    for (int s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(smem.full[s], 1);
      mbarrier_init(smem.empty[s], PAIR * TEAM * 4);  // a lane of every warp that reads a tile
    }
    fence_mbarrier_init();
  }
  // The barriers are initialised before anyone waits or arrives, in the other block too.
  if constexpr (PAIR > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  RingPosition<NUM_STAGES> at;
  if (warpgroup == 0) {  // ---- the producer, one thread
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < WARP_SIZE && elect_sync()) {
      constexpr uint16_t BOTH = (1 << PAIR) - 1;
      for (int unit = first_unit; unit < units; unit += step_units) {
        const GemmTile tile = tile_of(p, unit, rank);
#pragma unroll 1
        for (int step = 0; step < slices; ++step, at.advance()) {
          mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);  // both blocks have read these
          Mbarrier& full = smem.full[at.stage];
          mbarrier_arrive_expect_tx(full, sizeof(smem.A[0]) + sizeof(smem.B[0]));
          const int col = step * SLICE;
          int8_t *A = smem.A[at.stage], *B = smem.B[at.stage];
          if constexpr (PAIR_N > 1) {
            cp_async_bulk_tensor_4d_multicast(
                A + rank * COPIED_M * SLICE, A_map, full, col, tile.m0 + rank * COPIED_M, 0, 0,
                BOTH);
          } else {
            cp_async_bulk_tensor_4d(A, A_map, full, col, tile.m0, 0, 0);
          }
          if constexpr (PAIR_M > 1) {
            cp_async_bulk_tensor_4d_multicast(
                B + rank * COPIED_N * SLICE, B_map, full, col, tile.n0 + rank * COPIED_N, 0, 0,
                BOTH);
          } else {
            cp_async_bulk_tensor_4d(B, B_map, full, col, tile.n0, 0, 0);
          }
        }
      }
    }
    __syncwarp();
  } else {  // ---- the consumers
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int number = uniform(thread_id_anew() / WARPGROUP) - 1;
    const int warpgroup_row = number % TEAM * WARPGROUP_ROWS;
    const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates
    const Descriptor A_ring = uniform(descriptor_k_major(&smem.A[0][warpgroup_row * SLICE]));
    const Descriptor B_ring = uniform(descriptor_k_major(smem.B[0]));
    const int team = number / TEAM;
    // NOTE: a parity tells one phase from the next alone. A team waits for its first slice once the
    // other one has waited for its last, so that it is never two phases ahead.
    const Turn<TEAMS> turn{team};
    if constexpr (TEAMS > 1) {
      skip(at, team * slices);
      if (team == TEAMS - 1) turn.pass();  // the first turn
    }
    // A warpgroup stays LEAD slices behind the one before, and multiplies while that one stores.
    if constexpr (LEAD > 0)
      if (number > 0) named_barrier_sync(number, 2 * WARPGROUP);
    bool leads = LEAD > 0 && number + 1 < CONSUMERS;

    for (int unit = first_unit + team * step_units; unit < units; unit += TEAMS * step_units) {
      const GemmTile tile = tile_of(p, unit, rank);
      const int warp_row = tile.m0 + warpgroup_row + warp_id() % 4 * 16;
      if constexpr (TEAMS > 1) turn.take();  // the other team has waited for all of its slices
      int32_t dot[ATOMS][SUMS];              // [ATOMS][BLOCK_N / 8][4]
      RingPosition<NUM_STAGES> last;
#pragma unroll 1
      for (int step = 0; step < slices; ++step, at.advance()) {
        const Descriptor A_rows = A_ring.stage(at.stage, sizeof(smem.A[0]));
        const Descriptor B_rows = B_ring.stage(at.stage, sizeof(smem.B[0]));
        mbarrier_wait_parity(smem.full[at.stage], at.parity);  // both slices have arrived
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < SLICE; k += 32)
#pragma unroll
          for (int a = 0; a < ATOMS; ++a)
            WgmmaS8<BLOCK_N>::ss(
                dot[a], A_rows + (a * 64 * SLICE + k), B_rows + k, k > 0 || step > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();  // the products of the slice before have read their stage
        if (step > 0) release(smem.empty[last.stage]);
        last = at;
        if (leads && step + 1 == min(LEAD, slices)) {
          leads = false;
          named_barrier_arrive(number + 1, 2 * WARPGROUP);
        }
      }
      if constexpr (TEAMS > 1) turn.pass();
      float A_scale[ATOMS][2];  // of rows g and g + 8; past the last row they multiply zeros
#pragma unroll
      for (int a = 0; a < ATOMS; ++a)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          A_scale[a][h] = p.A_scale[min(warp_row + a * 64 + g + h * 8, p.m - 1)];
      wgmma_wait_group<0>();
#pragma unroll
      for (int a = 0; a < ATOMS; ++a) wgmma_use(dot[a]);
      release(smem.empty[last.stage]);
      if constexpr (TEAMS > 1) skip(at, slices);

      store_tile(p, C_map, smem, number * 4 + warp_id() % 4, warp_row, tile.n0, A_scale, dot);
    }
    if constexpr (TEAMS > 1)  // consume the last signal
      if (ceil_div(units - first_unit, step_units) % TEAMS == team) turn.take();
    if constexpr (LEAD > 0)  // a block without tiles lets the next warpgroup through as well
      if (leads) named_barrier_arrive(number + 1, 2 * WARPGROUP);
    if constexpr (STORE_SLOTS > 0)
      if (lane_id() == 0) cp_async_bulk_wait_group_read();  // shared memory ends with the block
    __syncwarp();
  }
  // The other block may still copy to this one's shared memory, and arrive at its barriers.
  if constexpr (PAIR > 1) cluster_sync();
}
