// row_quant -- rows to INT8 codes with a float scale for each. A row is a token of activations, or
//              an output channel of a weight.
//
// Idea         Memory decides, as in act_quant.cu: a row is read once, and BLOCK_N numbers of it
//              stay in registers until its largest magnitude is known. Warps share a row so that a
//              lane has a few accesses, all in flight before it reads the first.
// Differs from act_quant.cu, whose groups of 128 numbers fit into a few neighbouring lanes. A row
//              has any length, so warps combine results in shared memory.
// PAIRED       A row's last channels lie in a second tensor: codes of a concatenation that is never
//              stored. `split` and both widths are multiples of VEC, so an access has one source.
// Kept simple  Numbers past BLOCK_N are read twice, the second time from the L2 cache.
// Rounding     R1 scale, inverse, code: each operation rounded once (quant.cuh)
// Mirror       cupyattn.reference.act_quant.quantize_rows with strategy="channel", to the bit
// Bound        docs/MATH_REFERENCE.md [L14]: half a scale
#include "prims/config.cuh"
#include "prims/codes/quant.cuh"
#include "prims/instructions/griddepcontrol.cuh"
#include "prims/instructions/warp.cuh"

// cupyattn/plans/structs.py packs it from one table of (name, type); a test compares the two.
struct RowQuantParams {
  const void* X;  // [rows, channels] of elem_t
  int8_t* codes;  // [rows, channels], contiguous
  float* scales;  // [rows], contiguous
  int64_t X_stride;
  int32_t rows;
  int32_t channels;
};
template <bool>
struct RowPairParams : RowQuantParams {};
template <>
struct RowPairParams<true> : RowQuantParams {
  const void* right;  // [rows, channels - split] of elem_t; X is [rows, split]
  int64_t right_stride;
  int32_t split;
};

constexpr int ROW_WARPS = NUM_WARPS / BLOCK_M;  // that share a row
constexpr int LANES = ROW_WARPS * WARP_SIZE;    // the same
constexpr int HELD = BLOCK_N / (LANES * VEC);   // accesses to a row that a lane keeps

static_assert(
    ROW_WARPS >= 1 && ROW_WARPS * BLOCK_M == NUM_WARPS,
    "NUM_WARPS must be a multiple of BLOCK_M: as many warps for every row");
static_assert(
    HELD >= 1 && HELD * LANES * VEC == BLOCK_N,
    "BLOCK_N must be a multiple of VEC numbers for every lane of a row");

using Access = Words<elem_t, VEC>;

// A row, read an access at a time, each from a channel on.
template <bool>
struct Row {
  const elem_t* X;  // [channels]
  __device__ __forceinline__ Row(const RowQuantParams& p, int64_t row)
      : X(static_cast<const elem_t*>(p.X) + row * p.X_stride) {}
  __device__ __forceinline__ const Access* at(int channel) const {
    return reinterpret_cast<const Access*>(X + channel);
  }
};
template <>
struct Row<true> {
  const Row<false> left;  // [split]
  const elem_t* right;    // [channels], of which the first `split` do not exist
  const int split;
  __device__ __forceinline__ Row(const RowPairParams<true>& p, int64_t row)
      : left(p, row),
        right(static_cast<const elem_t*>(p.right) + row * p.right_stride - p.split),
        split(p.split) {}
  __device__ __forceinline__ const Access* at(int channel) const {
    return reinterpret_cast<const Access*>((channel < split ? left.X : right) + channel);
  }
};

// R1: codes of an access to a row, from a channel on.
__device__ __forceinline__ void store_codes(int8_t* codes, const Access& x, float inverse) {
  int c[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) c[j] = code_s8(x.element(j), inverse);
  store_s8(codes, c);
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void row_quant(
    const __grid_constant__ RowPairParams<PAIRED> p) {
  griddepcontrol_launch_dependents();      // a product may begin
  __shared__ uint32_t of_warp[NUM_WARPS];  // bits of largest magnitudes
  const int lane = thread_id() % LANES;
  const int64_t row = int64_t(blockIdx.x) * BLOCK_M + warp_id() / ROW_WARPS;
  const int channels = row < p.rows ? p.channels : 0;  // of a row past the last nothing is read
  const Row<PAIRED> X(p, row);

  Access x[HELD];
#pragma unroll
  for (int a = 0; a < HELD; ++a) {
    x[a] = {};
    const int channel = (a * LANES + lane) * VEC;
    if (channel < channels) x[a] = *X.at(channel);
  }
#pragma unroll
  for (int a = 0; a < HELD; ++a) x[a].use_from_here();
  Reach reach = reach_of(x);
  for (int channel = BLOCK_N + lane * VEC; channel < channels; channel += LANES * VEC) {
    const Access rest[1] = {*X.at(channel)};
    reach.admit(reach_of(rest));
  }

  uint32_t absmax = shfl_max<WARP_SIZE>(reach.bits[0]);
  if constexpr (ROW_WARPS > 1) {
    if (lane_id() == 0) of_warp[warp_id()] = absmax;
    __syncthreads();  // the largest magnitudes of all warps are visible
    const int first = warp_id() / ROW_WARPS * ROW_WARPS;
#pragma unroll
    for (int warp = 0; warp < ROW_WARPS; ++warp) absmax = max(absmax, of_warp[first + warp]);
  }
  if (row >= p.rows) return;
  const Scale scale = scale_of_absmax(absmax);  // R1
  if (lane == 0) p.scales[row] = scale.scale;

  int8_t* codes = p.codes + row * p.channels;  // [channels]
#pragma unroll
  for (int a = 0; a < HELD; ++a) {
    const int channel = (a * LANES + lane) * VEC;
    if (channel < channels) store_codes(codes + channel, x[a], scale.inverse);
  }
  for (int channel = BLOCK_N + lane * VEC; channel < channels; channel += LANES * VEC)
    store_codes(codes + channel, *X.at(channel), scale.inverse);
}
