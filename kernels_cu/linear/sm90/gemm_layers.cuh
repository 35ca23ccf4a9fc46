// gemm_layers.cuh -- layers that multiply the same A in one launch of gemm_int8_channel. Each has
// its own weight, scales, bias and C. Their tiles are counted as if their columns were adjacent,
// each layer's from a multiple of TILE_N on. So no tile belongs to two layers.
#pragma once

#include "linear/sm90/gemm_block.cuh"
#include "prims/codes/gemm.cuh"
#include "prims/instructions/tma.cuh"

// Of up to four layers, beside GemmParams, whose n counts the columns of all tiles.
struct LayersParams {
  const float* B_scale[4];  // [n, 1] of the layer
  void* C[4];               // [m, n]
  const void* bias[4];      // [n]; null: none
  int64_t B_scale_stride[4];
  int64_t C_stride[4];
  int32_t n[4];
  int32_t first[4];  // column, a multiple of TILE_N; past the last layer p.n, which no tile has
};

// The weights of a launch: `const Weights<LAYERS> weights WEIGHT_ARGUMENTS;`. A tile begins at
// column n0 of all layers. Member copy_B copies a slice of the tile's rows of B. Member params
// returns the parameters of the tile's layer, as a separate launch has them, and replaces n0 by the
// column within the layer.
template <bool SEVERAL>
struct Weights;
template <>
struct Weights<false> {
  const TensorMap& map;

  __device__ __forceinline__ void copy_B(
      const GemmParams& p, int8_t* shared, Mbarrier& barrier, int col, int n0) const {
    ::copy_B(p, shared, map, barrier, col, n0);
  }
  __device__ __forceinline__ const GemmParams& params(const GemmParams& p, int&) const { return p; }
};
template <>
struct Weights<true> {
  const LayersParams& layers;
  const TensorMap &map0, &map1, &map2, &map3;

  __device__ __forceinline__ int layer_of(int n0) const {
    return (n0 >= layers.first[1]) + (n0 >= layers.first[2]) + (n0 >= layers.first[3]);
  }
  __device__ __forceinline__ void copy_B(
      const GemmParams& p, int8_t* shared, Mbarrier& barrier, int col, int n0) const {
    const int layer = layer_of(n0);
    const TensorMap& map = layer == 0 ? map0 : layer == 1 ? map1 : layer == 2 ? map2 : map3;
    ::copy_B(p, shared, map, barrier, col, n0 - layers.first[layer]);
  }
  __device__ __forceinline__ GemmParams params(const GemmParams& p, int& n0) const {
    const int layer = layer_of(n0);
    n0 -= layers.first[layer];
    GemmParams own = p;
    own.B_scale = layers.B_scale[layer];
    own.C = layers.C[layer];
    own.bias = layers.bias[layer];
    own.B_scale_stride = layers.B_scale_stride[layer];
    own.C_stride = layers.C_stride[layer];
    own.n = layers.n[layer];
    return own;
  }
};
