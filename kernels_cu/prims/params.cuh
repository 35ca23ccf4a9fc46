// params.cuh -- the struct that the host passes to every attention kernel, by value. From one table
// of (name, type), cupyattn/plans/structs.py packs it; a test compares the two.
#pragma once

#include "prims/base.cuh"

// Elements from one batch entry, head or row to the next; the last axis is contiguous.
struct Strides {
  int64_t batch, head, len;
};

// The same of scores; 0 along an axis that mask or bias is broadcast over.
struct ScoreStrides {
  int64_t batch, head, row, key;
};

struct AttnParams {
  const void* Q;  // [batch, heads,    len_q,  HEAD_DIM]
  const void* K;  // [batch, heads_kv, len_kv, HEAD_DIM]
  const void* V;  // [batch, heads_kv, len_kv, HEAD_DIM]
  void* O;        // [batch, heads,    len_q,  HEAD_DIM]
  float* lse;     // [batch, heads,    len_q], natural log; not read unless LSE
  float* S;       // [batch, heads,    len_q, len_kv], then P: attn_unfused alone
  Strides Q_stride;
  Strides K_stride;
  Strides V_stride;
  Strides O_stride;
  int32_t batch;
  int32_t heads;
  int32_t heads_kv;  // divides heads: query head h reads key head h / (heads / heads_kv)
  int32_t len_q;
  int32_t len_kv;
  int32_t causal_shift;  // query row i may attend key j where j <= i + causal_shift
  float scale;           // softmax scale, natural units
  float scale_log2;      // softmax scale times log2(e)
  const bool* mask;      // [batch, heads, len_q, len_kv], true: attend; not read unless MASK
  const void* bias;      // [batch, heads, len_q, len_kv] of bias_t; not read unless BIAS
  ScoreStrides mask_stride;
  ScoreStrides bias_stride;
  int32_t window_shift;  // WINDOW: query row i may attend key j where j >= i + window_shift
  float softcap;         // SOFTCAP: s becomes softcap * tanh(s / softcap)
  float softcap_inverse;
  const int32_t* kept_blocks;   // [batch, heads, q_blocks, 1 + kv_blocks]: how many blocks of keys
                                // are kept, then which, rising; not read unless BLOCK_MASK
  Strides kept_stride;          // len: from one block of query rows to the next
  const float* rope_cos;        // [positions, ROPE_TABLE], key j at j; not read unless ROPE
  const float* rope_sin;        // [positions, ROPE_TABLE]
  int32_t rope_offset_q;        // query row i has the position i + rope_offset_q
  const int32_t* cu_seqlens_q;  // [batch + 1], not read unless VARLEN: sequence i is the rows from
  const int32_t* cu_seqlens_k;  // [batch + 1], element i up to i + 1; len_q, len_kv: the longest.
                                // PADDED: both [batch], lengths of the entries; null: the longest
  int32_t total_q;              // PACKED: query rows of all sequences; PADDED: len_q
  int32_t bottom_right;         // VARLEN: shifts are further by len_kv - len_q of the sequence
  int32_t stack;                // STACKED: rows of each of the heads that are stacked as one
};

// Elements from O to a row of it, rows of batch, heads and len_q being in one count.
__device__ __forceinline__ int64_t output_row(const AttnParams& p, int64_t row) {
  const int64_t head = row / p.len_q;
  return head / p.heads * p.O_stride.batch + head % p.heads * p.O_stride.head +
         row % p.len_q * p.O_stride.len;
}

// A persistent kernel whose tiles differ in work appends the counter of its next tile.
struct ScheduleParams {
  int32_t* next_tile;  // [1], zero beforehand
};

// A persistent kernel whose tiles are alike appends the cut tiles, and the results of their pieces.
struct PieceParams {
  float* O;       // [slots, BLOCK_Q, HEAD_DIM], not divided by l
  float* rows;    // [slots, BLOCK_Q, 3], a PieceRow each
  int32_t whole;  // the first so many tiles are not cut
  int32_t cut;    // and so many are
  int32_t steps;  // over the keys of a tile
  int32_t share;  // steps that a block takes of cut tiles
};

// A scored kernel appends, and so do the passes that pack its mask (prims/score/mask_bits.cuh). A
// mask tile is one of query rows, BLOCK_Q of them or all, of one batch entry and head of the mask.
// A list of steps is of the same, or of each tile where a block mask tells them apart.
struct ScoreParams {
  uint32_t* mask_bits;    // [mask tiles, key_tiles, MASK_TILE_WORDS]
  uint8_t* tile_classes;  // [mask tiles, key_tiles] of TileClass
  int32_t* tile_steps;    // [lists, 2 + key_tiles]: how many tiles of keys are not empty, and how
                          // many of the first ones are whole (pack_mask.cu), then
                          // 2 * tile + (is it mixed?) of each, rising
  int64_t mask_batch;  // mask tiles from one batch entry, head or tile of query rows to the next:
  int64_t mask_head;   // 0 where the mask is the same
  int64_t list_batch;  // the same of lists
  int64_t list_head;
  int32_t mask_q;
  int32_t list_q;
  int32_t mask_heads;  // that the mask has, and tiles of query rows
  int32_t mask_rows;
  int32_t list_heads;  // that have lists of their own, and tiles of query rows
  int32_t list_rows;
  int32_t key_tiles;
  int32_t mask_aligned;  // rows of the mask can be read 8 keys at a time
  int32_t bias_batch;    // 1, or 0 where the bias is the same for all batch entries
  int32_t bias_head;
  int32_t bias_once;     // 1 where no two heads share a bias: it is read once
  float bias_factor;     // converts natural units to units of the scores
  float tanh_factor[5];  // of S^(2 k + 1): the polynomial's coefficient / unit^(2 k)
  float largest_square;  // of an S for which the polynomial holds
  float tanh_exponent;   // 2 log2(e) / unit
  float softcap_unit;    // S becomes tanh(S / unit) * unit: the softcap in the units of S
};

// A form that splits the keys appends slices of [first_key, end_key), and the results of a block's
// slices. A single part is the result itself.
struct SplitParams {
  float* O;           // [parts, batch, heads, len_q, HEAD_DIM], not divided by l
  float* M;           // [parts, batch, heads, len_q], log2 units
  float* l;           // [parts, batch, heads, len_q]
  int32_t first_key;  // slice s: slice_keys keys from first_key + s * slice_keys on
  int32_t end_key;
  int32_t slice_keys;
  int32_t parts;
  int32_t rows;       // of the query heads that share a key head
  int32_t row_warps;  // that bring one row together
};

// fa_int8 appends: Q and K of AttnParams are then INT8 codes; with QUANTIZE_Q, K alone.
struct QuantParams {
  const float* Q_scale;          // [batch, heads,    ceil(len_q  / GROUP_Q)]; null: QUANTIZE_Q
  const float* K_scale;          // [batch, heads_kv, ceil(len_kv / GROUP_KV)]
  const float* K_mean;           // [batch, heads_kv, HEAD_DIM], subtracted from K; null: none
  int64_t Q_scale_stride_batch;  // a stride of 0 shares one scale
  int64_t Q_scale_stride_head;
  int64_t K_scale_stride_batch;
  int64_t K_scale_stride_head;
  const int32_t* Q_zero;      // [..] as Q_scale, the code of 0; not read unless ZERO_POINTS, nor is
  const int32_t* K_zero;      // [..] as K_scale                              what follows
  const int32_t* Q_code_sum;  // [batch, heads,    len_q], of the codes of a row; PACKED: it lies
  const int32_t* K_code_sum;  // [batch, heads_kv, len_kv]  where the scale of one row would
  int64_t Q_sum_stride_batch;
  int64_t Q_sum_stride_head;
  int64_t K_sum_stride_batch;
  int64_t K_sum_stride_head;
};

// fa_int8 with 8-bit P and V appends, too. V of AttnParams is then [batch, heads_kv, HEAD_DIM,
// V_stride.len] codes, with len_kv rounded up to VALUES_PAD as its last axis. PACKED: every
// sequence begins at a multiple of VALUES_PAD, at the place of the scale of a group of so many
// keys.
struct ValueParams {
  const float* V_scale;  // [batch, heads_kv, ceil(len_kv / GROUP_V), HEAD_DIM]
  const float* V_mean;   // [batch, heads_kv, HEAD_DIM], subtracted from V; null: none
  int64_t V_scale_stride_batch;
  int64_t V_scale_stride_head;
  const int32_t* V_zero;  // [..] as V_scale, the code of 0; not read unless ZERO_POINTS
};

// Kernels of the backward pass append; Q, K, V, O and lse of AttnParams are the forward's.
struct BackwardParams {
  const void* dO;  // [batch, heads,    len_q,  HEAD_DIM]
  void* dQ;        // [batch, heads,    len_q,  HEAD_DIM]
  void* dK;        // [batch, heads_kv, len_kv, HEAD_DIM]
  void* dV;        // [batch, heads_kv, len_kv, HEAD_DIM]
  Strides dO_stride;
  Strides dQ_stride;
  Strides dK_stride;
  Strides dV_stride;
  float* row_M;       // [batch, heads, rows], number subtracted from the scores of a row
  float* row_factor;  // [batch, heads, rows], then multiplies their exponentials; 1: not coarse
  int32_t* coarse;    // [batch, heads, rows / COARSE_ROWS], nonzero: a row of these is coarse
  float* delta;       // [batch, heads, rows], sums of dO times O; D_LSE: minus d_lse
  float* dQ_sum;      // [batch, heads, len_q, HEAD_DIM], zero beforehand unless ORDERED; not read
                      // unless SUMS_DQ
  int64_t rows;       // len_q rounded up to ROW_PAD; VARLEN: of all sequences, each rounded up
  const int32_t* kept_rows;  // [batch, heads, kv_blocks, 1 + q_blocks]: as kept_blocks, rows of a
                             // block of keys; not read unless BLOCK_MASK
  Strides kept_rows_stride;  // len: from one block of keys to the next
  int32_t* turns;  // [batch, heads, rows / 64], zero beforehand: blocks of keys that have added
                   // to dQ_sum; not read unless ORDERED
  int32_t* next_block;  // [1], zero beforehand: blocks of keys that have begun; not read unless
                        // ORDERED or PERSISTENT
  int32_t all_keys;     // 0: a row may have keys elsewhere, and lse is taken as it is
};

// backward_bias.cu appends. Gradients are summed over an axis of length 1, which broadcasts.
struct BiasGradientParams {
  void* dBias;  // [batches, heads, rows, keys] of bias_t, contiguous
  int32_t batches;
  int32_t heads;
  int32_t rows;
  int32_t keys;
};

// Hopper forms of the backward pass take it. pack_mask.cu packs the transposed mask, with keys as
// rows. For sm90/backward_queries_wide.cu it packs the mask itself, in query rows and key steps.
template <bool>
struct KeysParams : BackwardParams {};
template <>
struct KeysParams<true> : BackwardParams {
  const uint32_t* mask_bits;  // [mask tiles, row_tiles, BLOCK_KV / 16, 2 * WARP_SIZE]
  int64_t mask_batch;  // mask tiles from one batch entry, or head, to the next: 0 where the mask is
  int64_t mask_head;   // the same; from one block of keys to the next 1
  int32_t row_tiles;   // steps over query rows, or of that kernel over keys
};

// backward_delta.cu takes it.
template <bool>
struct DeltaParams : BackwardParams {};
template <>
struct DeltaParams<true> : BackwardParams {
  const float* d_lse;  // [batch, heads, rows], the gradient with respect to lse
};

// backward_coarse.cu takes it.
template <bool>
struct CoarseParams : BackwardParams {};
template <>
struct CoarseParams<true> : BackwardParams {
  float* part_M;  // [batch, heads, rows], of coarse rows, over the keys here; -inf without any
  float* part_l;  // [batch, heads, rows], the sum of their exponentials
};
