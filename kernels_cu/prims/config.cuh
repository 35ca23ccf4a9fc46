// config.cuh -- the only place where a CFG_* macro is read. cupyattn/kernels/tiles.py and
// cupyattn/kernels/features.py write them; every kernel sees typed constants.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "prims/base.cuh"

// Defaults let an editor parse a kernel without macros, and replace macros that a kernel does not
// use.
#ifndef CFG_NUM_WARPS
#define CFG_NUM_WARPS 4
#define CFG_NUM_STAGES 2
#define CFG_DTYPE 0
#define CFG_VEC 8
#define CFG_BIAS 0
#endif
#ifndef CFG_BLOCK_Q  // attention
#define CFG_BLOCK_Q 64
#define CFG_BLOCK_KV 64
#define CFG_HEAD_DIM 64
#define CFG_CAUSAL 0
#define CFG_LSE 1
#define CFG_GROUP_Q 1
#define CFG_GROUP_KV 1
#define CFG_GROUP_V 1073741824
#define CFG_P_TYPE 1
#define CFG_WINDOW 0
#define CFG_SOFTCAP 0
#define CFG_MASK 0
#define CFG_BLOCK_MASK_Q 0
#define CFG_BLOCK_MASK_KV 0
#define CFG_ROPE 0
#define CFG_VARLEN 0
#define CFG_ZERO_POINTS 0
#endif
#ifndef CFG_STACKED  // heads by themselves
#define CFG_STACKED 0
#endif
#ifndef CFG_SCORED  // the softmax takes products unchanged
#define CFG_SCORED 0
#define CFG_MASK_KIND 0
#endif
#ifndef CFG_BIAS_KIND  // of a Hopper form
#define CFG_BIAS_KIND 0
#endif
#ifndef CFG_QUANTIZE_Q  // codes of Q are there
#define CFG_QUANTIZE_Q 0
#endif
#ifndef CFG_DQ  // gradients
#define CFG_DQ 0
#endif
#ifndef CFG_D_LSE  // gradients with respect to O alone
#define CFG_D_LSE 0
#endif
#ifndef CFG_PART_SUMS  // gradients of rows that have all their keys here
#define CFG_PART_SUMS 0
#endif
#ifndef CFG_STEP_Q  // quantisation
#define CFG_STEP_Q 0
#define CFG_STEP_K 0
#define CFG_STEP_V 0
#define CFG_BLOCK_COLS 64
#endif
#ifndef CFG_FIRST_Q
#define CFG_FIRST_Q 0
#define CFG_FIRST_K 0
#define CFG_FIRST_V 0
#endif
#ifndef CFG_HEADS_Q  // blocks with rows of one head
#define CFG_HEADS_Q 1
#define CFG_HEADS_K 1
#endif
#ifndef CFG_QK_BITS  // quantisation to 8 bits
#define CFG_QK_BITS 8
#endif
#ifndef CFG_GATHERED  // keys that are quantised lie side by side
#define CFG_GATHERED 0
#endif
#ifndef CFG_KEY_SUMS  // keys are weighed alone
#define CFG_KEY_SUMS 0
#endif
#ifndef CFG_QK_NORM  // rows of Q and K as they are
#define CFG_QK_NORM 0
#endif
#ifndef CFG_QK_ROTATE  // and no matrix before their codes
#define CFG_QK_ROTATE 0
#endif
#ifndef CFG_BLOCK_M  // matrix products
#define CFG_BLOCK_M 128
#define CFG_BLOCK_N 128
#define CFG_ACCESS_BYTES 16
#define CFG_ACTIVATION 0
#define CFG_OUTLIERS 0
#endif
#ifndef CFG_RESIDUAL  // operand to which a product is added
#define CFG_RESIDUAL 0
#define CFG_GATE 0
#endif
#ifndef CFG_GLU  // a product whose columns are not gated in pairs
#define CFG_GLU 0
#endif
#ifndef CFG_GATE_LAST  // of the halves of B the first is the gate's
#define CFG_GATE_LAST 0
#endif
#ifndef CFG_NEIGHBOURS  // a product whose rows of B come as they lie
#define CFG_NEIGHBOURS 0
#endif
#ifndef CFG_LAYERS  // a product of one weight
#define CFG_LAYERS 0
#endif
#ifndef CFG_NORM  // rows that are normalised before they are quantised
#define CFG_NORM 0
#define CFG_WEIGHT 0
#define CFG_MODULATION 0
#define CFG_CHANNELS 1024
#define CFG_ROTATE 0
#define CFG_BY_ROW 1
#define CFG_BY_EIGHT 1
#define CFG_FACTORS_OF_ROW 0
#define CFG_BLOCKS_PER_SM 1
#define CFG_NEXT_IN_SHARED 0
#endif
#ifndef CFG_PAIRED  // rows that lie in one tensor
#define CFG_PAIRED 0
#endif
#ifndef CFG_JOINT_ROWS  // rows of one tensor
#define CFG_JOINT_ROWS 0
#endif
#ifndef CFG_BEFORE  // partial results of several devices
#define CFG_BEFORE 2
#define CFG_AFTER 2
#endif
#ifndef CFG_SPLITS  // clusters
#define CFG_SPLITS 1
#endif
#ifndef CFG_TAIL_SPLITS
#define CFG_TAIL_SPLITS 1
#endif
// An attribute that only the preprocessor can leave out if there are no clusters.
#if CFG_SPLITS * CFG_TAIL_SPLITS > 1
#define CLUSTER_OF_SPLITS __cluster_dims__(CFG_SPLITS* CFG_TAIL_SPLITS)
#else
#define CLUSTER_OF_SPLITS
#endif

// Parameters of a scored kernel alone, and how they reach its code (prims/score/score_hook.cuh).
#if CFG_SCORED
#define SCORE_PARAMETERS \
  , const __grid_constant__ ScoreParams score_params, const __grid_constant__ TensorMap bias_map
#define SCORE_ARGUMENTS {score_params, bias_map}
#else
#define SCORE_PARAMETERS
#define SCORE_ARGUMENTS \
  {                     \
  }
#endif

// Parameters of a product of several layers alone, and how they reach its code
// (linear/sm90/gemm_layers.cuh).
#if CFG_LAYERS
#define WEIGHT_PARAMETERS                                                                  \
  , const __grid_constant__ LayersParams layers, const __grid_constant__ TensorMap B1_map, \
      const __grid_constant__ TensorMap B2_map, const __grid_constant__ TensorMap B3_map
#define WEIGHT_ARGUMENTS {layers, B_map, B1_map, B2_map, B3_map}
#else
#define WEIGHT_PARAMETERS
#define WEIGHT_ARGUMENTS {B_map}
#endif

// A parameter of a kernel of gradients whose bias the copy engine brings.
#if (CFG_BIAS_KIND == 1 || (CFG_BIAS_KIND == 2 && CFG_HEAD_DIM > 128)) && !CFG_SCORED
#define BIAS_PARAMETER , const __grid_constant__ TensorMap bias_map
#define BIAS_MAP bias_map
#else
#define BIAS_PARAMETER
#define BIAS_MAP Q_map
#endif

// tiles
constexpr int BLOCK_Q = CFG_BLOCK_Q;    // query rows per thread block
constexpr int BLOCK_KV = CFG_BLOCK_KV;  // key rows per step of the loop
constexpr int NUM_WARPS = CFG_NUM_WARPS;
constexpr int NUM_STAGES = CFG_NUM_STAGES;  // K, V tiles in flight
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_Q = BLOCK_Q / NUM_WARPS;  // query rows per warp

// features
constexpr int HEAD_DIM = CFG_HEAD_DIM;               // true head size
constexpr int CODES_PITCH = round_up(HEAD_DIM, 16);  // bytes from row to row of codes of Q or K
constexpr bool CAUSAL = CFG_CAUSAL;
constexpr bool LSE = CFG_LSE;           // store the log-sum-exp
constexpr int VEC = CFG_VEC;            // elements per global access
constexpr int GROUP_Q = CFG_GROUP_Q;    // query rows per scale, 0: not quantised
constexpr int GROUP_KV = CFG_GROUP_KV;  // key rows per scale, 0: not quantised
constexpr int GROUP_V = CFG_GROUP_V;    // value rows per scale of a channel, 0: not quantised
constexpr bool WINDOW = CFG_WINDOW;     // keys begin near the row; CAUSAL: they end near it
constexpr bool SOFTCAP = CFG_SOFTCAP;
constexpr bool MASK = CFG_MASK;
constexpr bool BIAS = CFG_BIAS != 0;
constexpr int BLOCK_MASK_Q = CFG_BLOCK_MASK_Q;    // query rows per block of the block mask; 0: none
constexpr int BLOCK_MASK_KV = CFG_BLOCK_MASK_KV;  // key rows per block of it; 0: none
constexpr bool BLOCK_MASK = BLOCK_MASK_KV != 0;
constexpr bool ROPE = CFG_ROPE != 0;  // Q and K are turned by their positions:
constexpr bool ROPE_INTERLEAVED = ROPE && CFG_ROPE % 2 == 0;  // pairs of neighbours, not of halves,
constexpr bool ROPE_BY_COLUMN = CFG_ROPE > 2;                 // by a number for each column
constexpr bool QK_NORM = CFG_QK_NORM != 0;        // rows of Q and K are divided by their RMS,
constexpr bool NORM_BY_TOKEN = CFG_QK_NORM == 2;  // the heads of a token by one that they share,
constexpr bool NORM_BY_PART = CFG_QK_NORM == 3;   // with weights of two parts of the rows,
constexpr bool QK_ROTATE = CFG_QK_ROTATE;         // and multiplied by a Hadamard matrix
constexpr bool VARLEN = CFG_VARLEN != 0;          // batch entries have lengths of their own:
constexpr bool PACKED = CFG_VARLEN == 1;          // sequences packed without padding,
constexpr bool PADDED = CFG_VARLEN == 2;          // or entries as long as the longest may be
constexpr bool STACKED = CFG_STACKED;             // heads that share a key head are one
constexpr bool ZERO_POINTS = CFG_ZERO_POINTS;     // code z stands for 0; each group has its z
constexpr bool QUANTIZE_Q = CFG_QUANTIZE_Q;       // Q comes as numbers: the kernel makes its codes
// Softcap, bias or mask change the scores between both products of a Hopper form, in the units in
// which its softmax takes them.
constexpr bool SCORED = CFG_SCORED;
enum class MaskKind { NONE, ROWS, KEYS };  // KEYS: the same for every query row
constexpr MaskKind MASK_KIND = MaskKind(CFG_MASK_KIND);
enum class BiasKind { NONE, DENSE, KEYS, ROWS };  // ROWS: the same for every key
constexpr BiasKind BIAS_KIND = BiasKind(CFG_BIAS_KIND);
// Otherwise softcap and bias, and hence the softmax, work on scores in natural units.
constexpr bool NATURAL_SCORES = (SOFTCAP || BIAS) && !SCORED;

// Type of P as an operand of P V if V is codes: codes, or numbers of 16 bits. NONE: V is not codes.
enum class PType { NONE, U8, S8, E4M3, BITS_16 };
constexpr PType P_TYPE = PType(CFG_P_TYPE);
constexpr int VALUES_PAD = 128;  // codes of a channel of V are padded with 0 to a multiple of this

// The work of a launch of quantize*.cu for an operand; cupyattn/plans/quantize.py chooses it. It
// computes sums of slices, with or without minima and maxima. In quantize_reduce.cu it computes
// maxima of groups of rows, or of all of V. In quantize.cu it makes codes of whole groups, codes
// with scales from elsewhere, or codes of V.
enum class Step { NONE, SUMS, EXTREMA, REACH, ROWS, CODES, VALUES, VALUE_REACH };
constexpr Step STEP_Q = Step(CFG_STEP_Q);
constexpr Step STEP_K = Step(CFG_STEP_K);
constexpr Step STEP_V = Step(CFG_STEP_V);
// The first step of quantize.cu for an operand, head by head: SUMS or EXTREMA.
constexpr Step FIRST_Q = Step(CFG_FIRST_Q);
constexpr Step FIRST_K = Step(CFG_FIRST_K);
constexpr Step FIRST_V = Step(CFG_FIRST_V);
constexpr bool SUMS_FIRST = FIRST_Q != Step::NONE || FIRST_K != Step::NONE || FIRST_V != Step::NONE;
constexpr int BLOCK_COLS = CFG_BLOCK_COLS;  // columns of V that a block transposes
constexpr int HEADS_Q = CFG_HEADS_Q;        // heads whose rows of the same tokens a block quantises
constexpr int HEADS_K = CFG_HEADS_K;
constexpr bool GATHERED = CFG_GATHERED;  // rows of K are some of those there are, by their places
constexpr bool KEY_SUMS = CFG_KEY_SUMS;  // keys that are weighed are summed for their mean, too
constexpr int QK_BITS = CFG_QK_BITS;     // of a code of Q or K, which takes a byte all the same

// gradients
constexpr bool SUMS_DQ = CFG_DQ != 0;     // blocks of keys add up dQ in memory
constexpr bool ORDERED = CFG_DQ == 2;     // in one order on every run
constexpr bool PERSISTENT = CFG_DQ == 3;  // in any order; a thread block takes many of them
constexpr bool D_LSE = CFG_D_LSE;         // lse has a gradient, too
// Rows have keys on other ranks. backward_coarse.cu returns M and sums over the keys here.
// backward_delta.cu receives M and factors over all keys.
constexpr bool PART_SUMS = CFG_PART_SUMS;

// matrix products
constexpr int BLOCK_M = CFG_BLOCK_M;            // rows of C per thread block
constexpr int BLOCK_N = CFG_BLOCK_N;            // rows of B: columns of C, or of both halves
constexpr int ACCESS_BYTES = CFG_ACCESS_BYTES;  // of A and B per global access
constexpr int SPLITS = CFG_SPLITS;              // blocks that share the k of every tile, or keys
constexpr int TAIL_SPLITS = CFG_TAIL_SPLITS;    // that share the k of a tile of the last wave
constexpr int CLUSTER = SPLITS * TAIL_SPLITS;   // thread blocks of a cluster
constexpr bool RESIDUAL = CFG_RESIDUAL;         // a product is added to another matrix
constexpr bool GATE = CFG_GATE != 0;            // times a factor for each column, beforehand
enum class Activation { NONE, GELU, GELU_TANH, SILU };
constexpr Activation ACTIVATION = Activation(CFG_ACTIVATION);
constexpr bool GLU = CFG_GLU != 0;         // B has two halves of rows: activation(A G^T) * A U^T
constexpr bool GATE_LAST = CFG_GATE_LAST;  // G is the second
constexpr bool STRADDLES = CFG_GLU == 2;   // and a tile of the second may meet two blocks of scales
constexpr bool NEIGHBOURS = CFG_NEIGHBOURS;  // rows of B come so that a lane has 8 columns of C
constexpr bool LAYERS = CFG_LAYERS;          // several weights, of layers that multiply the same A
constexpr int HALVES = GLU ? 2 : 1;
constexpr int TILE_N = BLOCK_N / HALVES;  // columns of C per thread block, where B has BLOCK_N rows

// rows in front of a product
enum class Norm { NONE, LAYER, RMS };
constexpr Norm NORM = Norm(CFG_NORM);
constexpr bool WEIGHTED = CFG_WEIGHT != 0;       // weight, bias or both follow the norm
constexpr bool MODULATED = CFG_MODULATION != 0;  // and scale, shift or both follow these
constexpr int CHANNELS = CFG_CHANNELS;           // of a row
constexpr int ROTATE = CFG_ROTATE;               // channels of a group that is rotated; 0: none is
constexpr bool BY_ROW = CFG_BY_ROW;              // a row has one scale; otherwise a slice of it has
constexpr bool BY_EIGHT = CFG_BY_EIGHT;          // eight numbers of these vectors lie aligned
constexpr bool FACTORS_OF_ROW = CFG_FACTORS_OF_ROW;  // rows of a block have separate factors
constexpr int BLOCKS_PER_SM = CFG_BLOCKS_PER_SM;     // thread blocks at a time
constexpr bool NEXT_IN_SHARED = CFG_NEXT_IN_SHARED;  // a team's next row is copied to shared memory
constexpr bool PAIRED = CFG_PAIRED;                  // a row continues in a second tensor
constexpr bool JOINT_ROWS = CFG_JOINT_ROWS;          // further rows lie in a second tensor

// storage types
template <int CODE>
struct DType;
template <>
struct DType<0> {
  using type = __half;
};
template <>
struct DType<1> {
  using type = __nv_bfloat16;
};
template <>
struct DType<2> {
  using type = float;
};
using elem_t = DType<CFG_DTYPE>::type;                         // the caller's Q, K, V and O
using elem16_t = DType<CFG_DTYPE == 2 ? 0 : CFG_DTYPE>::type;  // 16-bit operand: float takes half
constexpr float ELEM16_STEP = CFG_DTYPE == 1 ? 0x1p-7f : 0x1p-10f;  // from 1 to the next of them
constexpr bool ELEM_IS_16_BIT = CFG_DTYPE != 2;
constexpr bool ELEM_IS_HALF = CFG_DTYPE == 0;         // whose squares are exact in float32
using bias_t = DType<BIAS ? CFG_BIAS - 1 : 0>::type;  // CFG_BIAS 1 to 3: half, bfloat16, float
using gate_t = DType<GATE ? CFG_GATE - 1 : 0>::type;  // CFG_GATE 1 to 3, as CFG_BIAS
using weight_t = DType<WEIGHTED ? CFG_WEIGHT - 1 : 0>::type;           // CFG_WEIGHT 1 to 3, too
using modulation_t = DType<MODULATED ? CFG_MODULATION - 1 : 0>::type;  // and CFG_MODULATION
using before_t = DType<CFG_BEFORE>::type;                              // a partial result so far
using after_t = DType<CFG_AFTER>::type;                                // and with what comes in
constexpr bool OUTLIERS = CFG_OUTLIERS != 0;  // some columns of a product have 16 bits
using outlier_t = DType<OUTLIERS ? CFG_OUTLIERS - 1 : 0>::type;  // CFG_OUTLIERS 1, 2

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);  // round to nearest even
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

static_assert(HEAD_DIM >= 1 && HEAD_DIM <= 256, "HEAD_DIM must be 1 to 256");
static_assert(NUM_WARPS >= 1 && NUM_WARPS <= 32, "NUM_WARPS must be 1 to 32");
static_assert(
    HEAD_DIM % VEC == 0, "HEAD_DIM must be a multiple of VEC, or a load would cross a row");
static_assert(VEC * sizeof(elem_t) <= 16, "VEC elements must fit in one 16-byte access");
static_assert(
    BLOCK_MASK_Q % BLOCK_Q == 0 && BLOCK_MASK_KV % BLOCK_KV == 0,
    "BLOCK_Q and BLOCK_KV must divide the blocks of the block mask: a step is kept whole or not");
