// gradient_bias.cuh -- a bias added to scores in the layout of wgmma, whose rows are keys, or query
// rows. It comes from boxes in shared memory. For keys as rows they are transposed as they are
// loaded; of float32 each lane loads its own. If a bias is the same for all query rows, its boxes
// have one row. Up to HEAD_DIM 128 each lane then reads that of its two keys from memory.
#pragma once

#include "prims/instructions/mbarrier.cuh"
#include "prims/instructions/tma.cuh"
#include "prims/score/score.cuh"
#include "prims/score/score_bias.cuh"

constexpr bool BOXED_BIAS =
    BIAS_KIND == BiasKind::DENSE || (BIAS_KIND == BiasKind::KEYS && HEAD_DIM > 128);
constexpr int BIAS_BYTES = BOXED_BIAS ? BIAS_BOXES * BIAS_BOX_PITCH : 0;        // of a step
constexpr int COPIED_BIAS = BOXED_BIAS ? BIAS_BOXES * BIAS_BOX_ROWS * 128 : 0;  // bytes of these

// ---- the producer ----------------------------------------------------------------------------

// In front of shared memory, which leaves no gap: the bias of one step, in boxes of BLOCK_Q rows.
template <int BYTES>
struct BiasBoxes {
  alignas(1024) unsigned char bias[BYTES];
};
template <typename Base, int BYTES>
struct BiasedStorage : BiasBoxes<BYTES>, Base {
  Mbarrier bias_empty;
};
template <typename Base>
struct BiasedStorage<Base, 0> : Base {};

template <typename Smem>
__device__ __forceinline__ void init_bias(Smem& smem, int arrivals) {
  if constexpr (BOXED_BIAS) mbarrier_init(smem.bias_empty, arrivals);
}

// The bias of the step at kv0 and q0. Rows and keys past the end arrive as zeros.
__device__ __forceinline__ void copy_bias_boxes(
    unsigned char* boxes, const AttnParams& p, const TensorMap& bias_map, Mbarrier& full, int batch,
    int head, int kv0, int q0) {
  for (int b = 0; b < BIAS_BOXES; ++b)
    cp_async_bulk_tensor_4d(
        boxes + b * BIAS_BOX_PITCH, bias_map, full, kv0 + b * BIAS_BOX_COLS,
        BIAS_BOX_ROWS == 1 ? 0 : q0, p.bias_stride.head == 0 ? 0 : head,
        p.bias_stride.batch == 0 ? 0 : batch);
}

// The same, once the bias of the step before was read.
template <typename Smem>
__device__ __forceinline__ void copy_bias(
    Smem& smem, const AttnParams& p, const TensorMap& bias_map, uint32_t parity, Mbarrier& full,
    int batch, int head, int kv0, int q0) {
  if constexpr (BOXED_BIAS) {
    mbarrier_wait_parity(smem.bias_empty, parity ^ 1);
    copy_bias_boxes(smem.bias, p, bias_map, full, batch, head, kv0, q0);
  }
}

// ---- the consumers ---------------------------------------------------------------------------

// R3: the score of a product, or of a capped score with a factor of 1, in natural units, as
// Scores::of has it.
// NOTE: the factor is inside the condition. Outside, NVRTC 13.5 multiplies all scores first and
// spills up to 116 bytes.
__device__ __forceinline__ float biased_score(float S, float scale, float bias) {
  return bias == NEG_INF ? NEG_INF : __fadd_rn(S * scale, bias);
}

// The same of a capped score. One that is excluded stays so, also if its bias is NaN.
__device__ __forceinline__ float biased_capped(float S, float bias) {
  return S == NEG_INF ? NEG_INF : biased_score(S, 1.0f, bias);
}

// In packed sequences, rows and keys past the end of a sequence have biases of longer ones.
constexpr bool BIAS_OF_OTHERS = BIAS && VARLEN;
// Whether the row is one and may attend to the key.
__device__ __forceinline__ bool admitted_with_bias(const AttnParams& p, int row, int key) {
  return !(BIAS_OF_OTHERS && row >= p.len_q) && admitted(p, row, key);
}
__device__ __forceinline__ float biased_in_place(float S, float bias) {
  return BIAS_OF_OTHERS ? biased_capped(S, bias) : biased_score(S, 1.0f, bias);
}

// The bias of the scores of a warp, which has the keys [key0, key0 + 16) of a block. A lane's
// scores have its key, or key + 8. Score i has query row i / 4 * 8 + lane % 4 * 2 + i % 2, from
// `row0` on.
template <BiasKind>
struct KeysBias {
  template <typename Smem>
  __device__ __forceinline__ KeysBias(const Smem&, int, int, int = 0) {}
  __device__ __forceinline__ void load(const AttnParams&, int64_t, int64_t) {}
  template <typename Smem>
  __device__ __forceinline__ void load_boxed(const Smem&, int) {}
  template <int SCORES>
  __device__ __forceinline__ void add(float (&)[SCORES], float) const {}
  __device__ __forceinline__ Vec<float, 4> of_rows(int) const { return {}; }
  template <typename Smem>
  __device__ __forceinline__ void release(Smem&) const {}
};

// One number of shared memory.
__device__ __forceinline__ float load_shared(uint32_t address, float) {
  float x;
  asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}
template <typename T>
__device__ __forceinline__ float load_shared(uint32_t address, T) {
  uint16_t x;
  asm volatile("ld.volatile.shared.u16 %0, [%1];" : "=h"(x) : "r"(address));
  return to_floats(x, T()).v[0];
}

// The bias of a step, in boxes of 128 bytes a row.
template <typename T>
struct DenseBias {
  static constexpr int CHUNK = 16 / sizeof(T);  // keys that the swizzle keeps together
  uint32_t corner;                              // shared address of the warp's first key

  __device__ __forceinline__ DenseBias(const unsigned char* boxes, int key0) {
    const int byte = key0 / BIAS_BOX_COLS * BIAS_BOX_PITCH + key0 % BIAS_BOX_COLS * sizeof(T);
    corner = uniform(shared_address(boxes + byte));
  }
  // NOTE: volatile, or a register of every step keeps the address of a lane, and others spill.
  static __device__ __forceinline__ int volatile_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }
  // Shared address of a row, and of a key from the warp's first key on.
  __device__ __forceinline__ uint32_t address(int row, int key) const {
    return (corner ^ (key / CHUNK ^ row % 8) * 16) + row * 128 + key % CHUNK * sizeof(T);
  }
  // The bias of the scores 4 n to 4 n + 3. No two lanes of a load meet in a bank: the swizzle keeps
  // four rows apart.
  __device__ __forceinline__ Vec<float, 4> of_rows(int n) const {
    const int lane = volatile_lane();
    const uint32_t first = address(lane % 4 * 2, lane / 4);
    Vec<float, 4> b;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int odd = i % 2, eight = i / 2;  // the next row, eight keys further
      const uint32_t chunk = first ^ (odd ^ eight * (8 / CHUNK)) * 16;
      b.v[i] = load_shared(chunk + odd * 128 + n * 1024, T());
    }
    return b;
  }
  // R3: products to scores in natural units.
  template <int SCORES>
  __device__ __forceinline__ void add(float (&S_acc)[SCORES], float scale) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int n = 0; n < SCORES / 4; ++n) {
        const Vec<float, 4> b = of_rows(n);
        float* S = &S_acc[4 * n];  // [4]
#pragma unroll
        for (int i = 0; i < 4; ++i) S[i] = biased_score(S[i], scale, b.v[i]);
      }
    } else {
      const int lane = lane_id();
      const uint32_t matrix = address(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
#pragma unroll
      for (int n = 0; n < SCORES / 4; n += 2) {
        uint32_t pair[4];  // of key and key + 8: two rows, then those 8 rows further
        ldmatrix_x4_trans(pair, matrix + n * 1024);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Vec<float, 2> b = to_floats(pair[j], T());
          float* S = &S_acc[4 * n + 2 * j];  // [2]
          S[0] = biased_score(S[0], scale, b.v[0]), S[1] = biased_score(S[1], scale, b.v[1]);
        }
      }
    }
  }
};

template <>
struct KeysBias<BiasKind::DENSE> : DenseBias<bias_t> {
  template <typename Smem>
  __device__ __forceinline__ KeysBias(const Smem& smem, int key0, int, int row0 = 0)
      : DenseBias<bias_t>(smem.bias + row0 * 128, key0) {}
  __device__ __forceinline__ void load(const AttnParams&, int64_t, int64_t) {}
  template <typename Smem>
  __device__ __forceinline__ void load_boxed(const Smem&, int) {}
  // One lane, once all lanes have added.
  template <typename Smem>
  __device__ __forceinline__ void release(Smem& smem) const {
    mbarrier_arrive(smem.bias_empty);
  }
};

// The bias of a key in the first row of boxes, which the swizzle does not change.
__device__ __forceinline__ float boxed_key(const unsigned char* boxes, int key) {
  const unsigned char* box = boxes + key / BIAS_BOX_COLS * BIAS_BOX_PITCH;
  return to_float(reinterpret_cast<const bias_t*>(box)[key % BIAS_BOX_COLS]);
}

template <>
struct KeysBias<BiasKind::KEYS> {
  int key;
  float bias[2];  // of key, key + 8

  template <typename Smem>
  __device__ __forceinline__ KeysBias(const Smem&, int, int key, int = 0) : key(key) {}
  __device__ __forceinline__ void load(const AttnParams& p, int64_t batch, int64_t head) {
    const BiasInMemory of_head(p, batch, head);
    bias[0] = of_head.at(0, key), bias[1] = of_head.at(0, key + 8);
  }
  // The same from the first row of boxes.
  template <typename Smem>
  __device__ __forceinline__ void load_boxed(const Smem& smem, int key0) {
    for (int h = 0; h < 2; ++h) bias[h] = boxed_key(smem.bias, key0 + lane_id() / 4 + h * 8);
  }
  template <int SCORES>
  __device__ __forceinline__ void add(float (&S_acc)[SCORES], float scale) const {
#pragma unroll
    for (int i = 0; i < SCORES; ++i)
      S_acc[i] = biased_score(S_acc[i], scale, bias[i / 2 % 2]);  // R3
  }
  __device__ __forceinline__ Vec<float, 4> of_rows(int) const {
    return {{bias[0], bias[0], bias[1], bias[1]}};
  }
  template <typename Smem>
  __device__ __forceinline__ void release(Smem& smem) const {
    if constexpr (BOXED_BIAS) mbarrier_arrive(smem.bias_empty);
  }
};

// ---- scores whose rows are query rows --------------------------------------------------------

// Two neighbours of a row in shared memory.
__device__ __forceinline__ Vec<float, 2> load_shared_pair(uint32_t address, float) {
  Vec<float, 2> x;
  asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.v[0]), "=f"(x.v[1])
               : "r"(address));
  return x;
}
template <typename T>
__device__ __forceinline__ Vec<float, 2> load_shared_pair(uint32_t address, T) {
  uint32_t pair;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
  return to_floats(pair, T());
}

// The bias of the scores of a warp, whose first row is row0 of a tile. Pair i of a lane has query
// row lane / 4, or that + 8 if i is odd. Its keys are i / 2 * 8 + lane % 4 * 2 and the next.
template <BiasKind KIND>
struct RowsBias {
  static constexpr bool ONE_ROW = KIND == BiasKind::KEYS;
  uint32_t corner;  // shared address of the lane's first pair

  __device__ __forceinline__ RowsBias(const unsigned char* boxes, int row0) {
    const int row = lane_id() / 4, byte = lane_id() % 4 * 2 * sizeof(bias_t);
    corner = shared_address(boxes) + (ONE_ROW ? byte : (row0 + row) * 128 + (byte ^ row * 16));
  }
  // No two lanes of a load meet in a bank. Of float32, lanes of neighbouring rows do.
  __device__ __forceinline__ Vec<float, 2> pair(int i) const {
    const int byte = i / 2 * 8 * sizeof(bias_t), eight = ONE_ROW ? 0 : i % 2 * 1024;
    const uint32_t first = ONE_ROW ? corner + byte % 128 : corner ^ byte % 128;
    return load_shared_pair(first + byte / 128 * BIAS_BOX_PITCH + eight, bias_t());
  }
};
template <>
struct RowsBias<BiasKind::NONE> {
  __device__ __forceinline__ RowsBias(const unsigned char*, int) {}
  __device__ __forceinline__ Vec<float, 2> pair(int) const { return {}; }
};
