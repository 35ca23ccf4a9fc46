// varlen.cuh -- batch entries of different lengths: PACKED without padding, or PADDED to one
// length, each with its number of valid rows. A kernel without VARLEN compiles all of this to
// nothing: its batch entries have one length.
#pragma once

#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/instructions/warp.cuh"

// The rows [first, first + length) of a packed array that are one sequence. A sequence longer than
// the host's maximum is cut, because grid and workspace have `longest` rows. PADDED: the rows of a
// batch entry, whose lengths are in `cu_seqlens`; null if all have the largest length.
struct Sequence {
  int32_t first, length;
  Sequence() = default;
  __device__ __forceinline__ Sequence(const int32_t* cu_seqlens, int64_t batch, int longest) {
    if constexpr (PADDED) {
      first = 0;
      length = cu_seqlens == nullptr ? longest : max(0, min(cu_seqlens[batch], longest));
    } else {
      first = cu_seqlens[batch];
      device_assert(
          cu_seqlens[batch + 1] - first <= longest, "a sequence is longer than max_len says");
      length = min(cu_seqlens[batch + 1] - first, longest);
    }
  }
};

// The position of a batch entry's rows in its array. Empty without VARLEN.
template <bool LENGTHS>
struct Sequences {
  Sequences() = default;
  __device__ __forceinline__ Sequences(const AttnParams&, int64_t) {}
  __device__ __forceinline__ int first_row() const { return 0; }
  __device__ __forceinline__ int first_key() const { return 0; }
};
template <>
struct Sequences<true> {
  Sequence q, kv;
  Sequences() = default;
  __device__ __forceinline__ Sequences(const AttnParams& call, int64_t batch)
      : q(call.cu_seqlens_q, batch, call.len_q), kv(call.cu_seqlens_k, batch, call.len_kv) {}
  __device__ __forceinline__ int first_row() const { return PACKED ? q.first : 0; }
  __device__ __forceinline__ int first_key() const { return PACKED ? kv.first : 0; }
};

// The rows of an operand that a block of a pass over memory takes, BLOCK_Q of one head at most.
// Blocks of one head follow one another. Params are RopeParams or NormParams.
template <typename Params>
struct BlockRows {
  const Params& p;
  int64_t batch_head, batch, head;
  int row0, rows;  // position of the first row, and their number; VARLEN: none where not positive
  int first = 0;   // VARLEN: of the sequence, whose positions are its own

  __device__ __forceinline__ explicit BlockRows(const Params& p) : p(p) {
    const int chunks = ceil_div(p.length, BLOCK_Q);
    row0 = blockIdx.x % chunks * BLOCK_Q;
    batch_head = blockIdx.x / chunks;
    batch = batch_head / p.heads, head = batch_head % p.heads;
    int length = p.length;
    if constexpr (VARLEN) {
      const Sequence sequence(p.cu_seqlens, batch, p.length);
      first = sequence.first, length = sequence.length;
    }
    rows = min(BLOCK_Q, length - row0);
  }
  // The number of the first row among all tokens of the operand.
  __device__ __forceinline__ int64_t token0() const {
    return (VARLEN ? first : batch * p.length) + row0;
  }
  // The first row in the operand.
  __device__ __forceinline__ const elem_t* in_operand(const void* X) const {
    return static_cast<const elem_t*>(X) + batch * p.X_stride.batch + head * p.X_stride.head +
           (first + row0) * p.X_stride.len;
  }
  // The first row in a contiguous array [batch, heads, length, HEAD_DIM], packed [heads, total, ..]
  template <typename T>
  __device__ __forceinline__ T* in_contiguous(T* Y) const {
    return Y + ((VARLEN ? head * p.total + first : batch_head * p.length) + row0) * HEAD_DIM;
  }
};

// Tells the compiler that they are the same in every lane.
template <bool LENGTHS>
__device__ __forceinline__ Sequences<LENGTHS> uniform(Sequences<LENGTHS> x) {
  if constexpr (LENGTHS)
    for (Sequence* one : {&x.q, &x.kv}) {
      one->first = uniform(one->first);
      one->length = uniform(one->length);
    }
  return x;
}

// The parameters for one batch entry. VARLEN: they have its lengths, which also place the causal
// mask and the window. PACKED: its arrays begin with its sequence. Operand is the storage type of Q
// and K, Value that of V.
template <typename Operand = elem_t, typename Value = elem_t, typename Entry>
__device__ __forceinline__ decltype(auto) of_sequences(
    const AttnParams& call, const Entry& sequences) {
  if constexpr (VARLEN) {
    const Sequence q = sequences.q, kv = sequences.kv;
    AttnParams p = call;
    if constexpr (PACKED) {
      p.Q = static_cast<const Operand*>(call.Q) + q.first * call.Q_stride.len;
      p.K = static_cast<const Operand*>(call.K) + kv.first * call.K_stride.len;
      p.V = static_cast<const Value*>(call.V) + kv.first * call.V_stride.len;
      p.O = static_cast<elem_t*>(call.O) + q.first * call.O_stride.len;
      p.lse = call.lse + q.first;
    }
    p.len_q = q.length;
    p.len_kv = kv.length;
    const int shift = call.bottom_right ? kv.length - q.length : 0;
    p.causal_shift = min(shift + call.causal_shift, kv.length);
    p.window_shift = max(shift + call.window_shift, -q.length);
    return p;
  } else {
    return (call);
  }
}
template <typename Operand = elem_t, typename Value = elem_t>
__device__ __forceinline__ decltype(auto) of_batch(const AttnParams& call, int64_t batch) {
  return of_sequences<Operand, Value>(call, Sequences<VARLEN>(call, batch));
}

// The log-sum-exps of one head of one batch entry: [len_q].
__device__ __forceinline__ float* lse_of(const AttnParams& p, int64_t batch_head, int64_t head) {
  if constexpr (PACKED) return p.lse + head * p.total_q;
  return p.lse + batch_head * (PADDED ? p.total_q : p.len_q);
}

// The first scale of a sequence: its groups of rows begin with its first row. Of a packed array
// with GROUP rows to a scale, sequence i has the scales from first_row / GROUP + i on. Codes of V
// have the same layout along a channel, with VALUES_PAD of them in a group.
template <int GROUP>
__device__ __forceinline__ int64_t first_scale(const int32_t* cu_seqlens, int64_t batch) {
  if constexpr (PACKED) return cu_seqlens[batch] / GROUP + batch;
  return 0;
}

// The tiles from which persistent blocks take: the tiles [first, end) of all batch entries or, with
// VARLEN, of one entry. Entries follow one another, each with as many tiles as its rows fill.
struct TileRange {
  int first, end, sequence;
  __device__ __forceinline__ explicit TileRange(const AttnParams& call)
      : first(0), end(VARLEN ? 0 : tiles_of(call, call.len_q) * call.batch), sequence(-1) {}
  // Goes on to the sequence that a tile belongs to. Returns whether there is that tile.
  __device__ __forceinline__ bool reach(const AttnParams& call, int index) {
    if constexpr (VARLEN)
      while (index >= end && ++sequence < call.batch) {
        first = end;
        end += tiles_of(call, Sequence(call.cu_seqlens_q, sequence, call.len_q).length);
      }
    return index < end;
  }
  static __device__ __forceinline__ int tiles_of(const AttnParams& call, int rows) {
    return ceil_div(rows, BLOCK_Q) * call.heads;
  }
};
