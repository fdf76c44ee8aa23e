// Products with quantised weights for many rows: prompts. The same numbers in the same order as linear.cu, see record.cuh and product.cuh.
//
// A block has a tile of 128 x 128 or 64 x 64 outputs, eight warps by 2 x 4. Records of the weights (already the mma's A operand, 16 bytes a lane) and int8 rows
// of the activations come through a ring of three slots in shared memory, filled by cp.async two steps of 64 columns ahead of use; scales of the activations,
// which lie in no multiple of 16 bytes, come through registers, a step apart. One barrier a step. A row of activations takes 80 bytes of a slot, an odd number of
// 16-byte words: ldmatrix has no bank conflicts.
//
// Each int8 product of 16 x 8 x 32 costs three float operations an output on the other pipe: that, not the tensor core, is the bound on paper.
//
// Not handled: columns that are not a multiple of 32.
// Not run on hardware so far: proved on the emulator of tests/cuda. No time has been measured.
#include "record.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kSlots = 3, kAhead = kSlots - 1, kPitch = kPairCols + 16;

template <class W, int M, int N>
struct Slot {
  static constexpr int weight_tiles = kWeightWarps * M, rows = kRowWarps * N * kMmaCols;
  static constexpr int weight_bytes = W::header_bytes + W::record_bytes;  // header and record of one tile
  static constexpr int inputs_at = weight_tiles * weight_bytes, scales_at = inputs_at + rows * kPitch;
  static constexpr int sums_at = scales_at + 2 * rows * 4, num_bytes = sums_at + (W::has_min ? 2 * rows * 4 : 0);  // both [2 blocks][rows] f32
  static_assert(num_bytes % 16 == 0, "slots follow one another");
  static constexpr int shared_bytes = kSlots * num_bytes + TileSums<M, N>::total_bytes;
};

struct Sizes {
  int rows, cols, num_rows;  // of weights, of both, of activations
};

// Queues what a step reads of the weights and of the int8 activations; zeros beyond the edges.
template <class W, int M, int N>
__device__ __forceinline__ void fill(uint8_t* slot, const uint8_t* weights, const Activations& x, const Sizes& sizes, int record) {
  using S = Slot<W, M, N>;
  constexpr int words = S::weight_bytes / 16, header_words = W::header_bytes / 16;
  const int num_tiles = (sizes.rows + kTileRows - 1) / kTileRows, first_tile = blockIdx.y * S::weight_tiles;
  for (int i = threadIdx.x; i < S::weight_tiles * words; i += kTiledThreads) {
    const int tile = first_tile + i / words, word = i % words;
    const bool is_wanted = tile < num_tiles;
    const uint8_t* from = weights + (is_wanted ? tile * tile_bytes<W>(sizes.cols) : 0);
    from += word < header_words ? header_at<W>(record) + word * 16 : record_at<W>(record) + (word - header_words) * 16;
    cp_async16(slot + i * 16, from, is_wanted);
  }
  for (int i = threadIdx.x; i < S::rows * (kPairCols / 16); i += kTiledThreads) {
    const int m = i / (kPairCols / 16), word = i % (kPairCols / 16), row = blockIdx.x * S::rows + m, column = record * kPairCols + word * 16;
    const bool is_wanted = row < sizes.num_rows && column < sizes.cols;
    cp_async16(slot + S::inputs_at + m * kPitch + word * 16, is_wanted ? x.q8 + row * x.width + column : x.q8, is_wanted);
  }
}

// This thread's share of a step's activation scales: between loading and storing them there is a step's work.
template <class W, int M, int N>
struct ScaleLoad {
  using S = Slot<W, M, N>;
  static constexpr int count = (2 * S::rows + kTiledThreads - 1) / kTiledThreads;
  float scale[count], sum[count];

  __device__ __forceinline__ void load(const Activations& x, const Sizes& sizes, int record) {
    const int num_blocks = sizes.cols / kBlockLen;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int item = threadIdx.x + i * kTiledThreads, row = blockIdx.x * S::rows + item / 2, block = 2 * record + item % 2;
      const bool is_wanted = row < sizes.num_rows && block < num_blocks && item < 2 * S::rows;
      scale[i] = is_wanted ? x.q8_scale[static_cast<int64_t>(row) * num_blocks + block] : 0.f;
      if (W::has_min) sum[i] = is_wanted ? __int2float_rn(x.q8_sum[static_cast<int64_t>(row) * num_blocks + block]) : 0.f;
    }
  }
  __device__ __forceinline__ void store(uint8_t* slot) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int item = threadIdx.x + i * kTiledThreads, place = item % 2 * S::rows + item / 2;
      if (item >= 2 * S::rows) continue;
      reinterpret_cast<float*>(slot + S::scales_at)[place] = scale[i];
      if (W::has_min) reinterpret_cast<float*>(slot + S::sums_at)[place] = sum[i];
    }
  }
};

template <class W, int M, int N>
__device__ __forceinline__ void load_inputs(Inputs (&inputs)[N], const uint8_t* slot, int row_warp, int block, int lane) {
  using S = Slot<W, M, N>;
  const int first = row_warp * N * kMmaCols;
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t b[4];
    ldmatrix_x4(b, slot + S::inputs_at + (first + n * kMmaCols + (lane & 7) + (lane >> 4) * 8) * kPitch + block * kBlockLen + (lane >> 3 & 1) * 16);
    inputs[n].q8[0] = b[0], inputs[n].q8[1] = b[1], inputs[n + 1].q8[0] = b[2], inputs[n + 1].q8[1] = b[3];
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int place = block * S::rows + first + n * kMmaCols + (lane & 3) * 2;
    const float2 scale = *reinterpret_cast<const float2*>(slot + S::scales_at + place * 4);
    inputs[n].scale[0] = scale.x, inputs[n].scale[1] = scale.y;
    if constexpr (W::has_min) {
      const float2 sum = *reinterpret_cast<const float2*>(slot + S::sums_at + place * 4);
      inputs[n].sum[0] = sum.x, inputs[n].sum[1] = sum.y;
    }
  }
}

template <class W, int M, int N>
__device__ __forceinline__ void add_step(TileSums<M, N>& sums, const uint8_t* slot, int weight_warp, int row_warp, int lane) {
  using S = Slot<W, M, N>;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    Inputs inputs[N];
    load_inputs<W, M, N>(inputs, slot, row_warp, block, lane);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if (W::bits < 8 && static_cast<int>(blockDim.x) <= m) break;  // never: a branch keeps the compiler from overlapping more than the registers hold
      const uint8_t* tile = slot + (weight_warp * M + m) * S::weight_bytes;
      Record<W> record;
      record.template load<false>(tile, tile + W::header_bytes, lane);
      uint32_t a[4];
      record.operand(a, block);
#pragma unroll
      for (int n = 0; n < N; ++n) add_block<W>(sums.span[m][n], record, a, block, inputs[n]);
    }
  }
}

// grid (tiles of activation rows, tiles of weight rows)
template <class W, int M, int N>
__global__ void __launch_bounds__(kTiledThreads, M == 2 ? 2 : 1) tiled_kernel(const uint8_t* weights, Activations x, Sizes sizes, Output out) {
  using S = Slot<W, M, N>;
  PYSERVE_DYN_SHARED(uint8_t, shared);
  const int lane = threadIdx.x & 31, weight_warp = threadIdx.x / 32 / kRowWarps, row_warp = threadIdx.x / 32 % kRowWarps, count = num_records(sizes.cols);
  const auto slot_of = [&](int record) { return shared + record % kSlots * S::num_bytes; };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < count) {
      fill<W, M, N>(slot_of(i), weights, x, sizes, i);
      ScaleLoad<W, M, N> scales;
      scales.load(x, sizes, i);
      scales.store(slot_of(i));
    }
    cp_async_commit();
  }
  TileSums<M, N> sums(reinterpret_cast<float*>(shared + kSlots * S::num_bytes));
  int span = 0;
#pragma unroll 1
  for (int at = 0; at < count; ++at) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();  // everyone's copies have landed, and everyone is through with the slot that is filled next
    const bool has_next = at + kAhead < count;
    ScaleLoad<W, M, N> scales;
    if (has_next) {
      fill<W, M, N>(slot_of(at + kAhead), weights, x, sizes, at + kAhead);
      scales.load(x, sizes, at + kAhead);
    }
    cp_async_commit();
    add_step<W, M, N>(sums, slot_of(at), weight_warp, row_warp, lane);
    if (has_next) scales.store(slot_of(at + kAhead));
    span = sums.after_step(span, at + 1, count);
  }
  sums.store((blockIdx.y * kWeightWarps + weight_warp) * M * kMmaRows, sizes.rows, (blockIdx.x * kRowWarps + row_warp) * N * kMmaCols, sizes.num_rows, out);
}

template <class W, int M, int N>
int start(const PackedWeight& weight, const Activations& x, int64_t num_rows, const Output& out, cudaStream_t stream) {
  using S = Slot<W, M, N>;
  const dim3 grid = tiled_grid(weight.rows, num_rows, S::weight_tiles * kTileRows, S::rows);
  const Sizes sizes = {static_cast<int>(weight.rows), static_cast<int>(weight.cols), static_cast<int>(num_rows)};
  return launch(tiled_kernel<W, M, N>, grid, dim3(kTiledThreads), S::shared_bytes, stream, weight.data, x, sizes, out);
}

}  // namespace

extern "C" int pyserve_cuda_linear_tiled(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride,
                                         int64_t num_rows, int64_t accumulate, int64_t tile, void* stream) {
  if (num_rows == 0) return 0;
  if (!is_product(*weight, *x, out_stride) || !is_tile(tile) || num_rows > INT32_MAX || reinterpret_cast<uintptr_t>(x->q8) % 16 != 0) return kInvalid;
  const Output output = {out, out_stride, bias, accumulate != 0};
  const auto on = static_cast<cudaStream_t>(stream);
  return with_type(static_cast<int64_t>(weight->type), kInvalid, [&](auto tag) {
    using W = typename decltype(tag)::Type;
    if (is_large(tile, weight->rows, num_rows, Slot<W, 4, 4>::shared_bytes)) return start<W, 4, 4>(*weight, *x, num_rows, output, on);
    return start<W, 2, 2>(*weight, *x, num_rows, output, on);
  });
}

}  // namespace pyserve::cuda
