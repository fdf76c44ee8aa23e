// Products with f16 and bf16 weights for many rows: prompts. The same numbers in the same order as linear_half.cu, see half.cuh and product.cuh.
//
// A block has a tile of 128 x 128 or 64 x 64 outputs, eight warps by 2 x 4. Chunks of 32 columns of the weights and of the f32 activations come through a ring of
// three slots in shared memory, filled by cp.async two chunks ahead of use; one barrier a chunk. Activations are split into two bf16 where they are used.
// A row takes 64 bytes of weights and 128 + 16 of activations in a slot: with that, lanes that load together meet in no bank.
//
// Layout: weights [rows, cols] as in the file, cols a multiple of 8; x f32 [num_rows, width]; both 16-byte aligned.
// Not run on hardware so far: proved on the emulator of tests/cuda. No time has been measured.
#include "half.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kSlots = 3, kAhead = kSlots - 1;
constexpr int kWeightPitch = kChunkLen * 2, kInputPitch = kChunkLen * 4 + 16;  // bytes of a row

template <int M, int N>
struct Slot {
  static constexpr int weights = kWeightWarps * M * kMmaRows, rows = kRowWarps * N * kMmaCols;  // of the tile
  static constexpr int inputs_at = weights * kWeightPitch, num_bytes = inputs_at + rows * kInputPitch;
  static constexpr int shared_bytes = kSlots * num_bytes + TileSums<M, N>::total_bytes;
};

struct Sizes {
  int rows, cols, num_rows;  // of weights, of both, of activations
};

template <class T, int M, int N>
__device__ __forceinline__ void fill(uint8_t* slot, const T* weights, const float* x, const Sizes& sizes, int chunk) {
  using S = Slot<M, N>;
  constexpr int weight_words = kWeightPitch / 16, input_words = kChunkLen * 4 / 16;
#pragma unroll 2
  for (int i = threadIdx.x; i < S::weights * weight_words; i += kTiledThreads) {
    const int row = blockIdx.y * S::weights + i / weight_words, column = chunk * kChunkLen + i % weight_words * kWordLen;
    const bool is_wanted = row < sizes.rows && column < sizes.cols;
    cp_async16(slot + i * 16, is_wanted ? weights + static_cast<int64_t>(row) * sizes.cols + column : weights, is_wanted);
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < S::rows * input_words; i += kTiledThreads) {
    const int row = blockIdx.x * S::rows + i / input_words, column = chunk * kChunkLen + i % input_words * 4;
    const bool is_wanted = row < sizes.num_rows && column < sizes.cols;
    cp_async16(slot + S::inputs_at + i / input_words * kInputPitch + i % input_words * 16,
               is_wanted ? x + static_cast<int64_t>(row) * sizes.cols + column : x, is_wanted);
  }
}

template <class T, int M, int N>
__device__ __forceinline__ void add_chunk(TileSums<M, N>& sums, const uint8_t* slot, int weight_warp, int row_warp, int lane) {
  const int group = lane >> 2, word = lane & 3;
  HalfWeights loaded[M];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      loaded[m].rows[r] = *reinterpret_cast<const uint4*>(slot + ((weight_warp * M + m) * kMmaRows + group + 8 * r) * kWeightPitch + word * 16);
  const uint8_t* inputs_at = slot + Slot<M, N>::inputs_at + row_warp * N * kMmaCols * kInputPitch + word * 32;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    HalfInputs inputs[N];
#pragma unroll
    for (int n = 0; n < N; ++n) inputs[n].set(*reinterpret_cast<const float4*>(inputs_at + (n * kMmaCols + group) * kInputPitch + step * 16));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      HalfOperand<T> operand;
      operand.set(loaded[m], step);
#pragma unroll
      for (int n = 0; n < N; ++n) add_half_step<T>(sums.span[m][n], operand, inputs[n]);
    }
  }
}

// grid (tiles of activation rows, tiles of weight rows)
template <class T, int M, int N>
__global__ void __launch_bounds__(kTiledThreads, M == 2 ? 2 : 1) half_tiled_kernel(const T* weights, const float* x, Sizes sizes, Output out) {
  using S = Slot<M, N>;
  PYSERVE_DYN_SHARED(uint8_t, shared);
  const int lane = threadIdx.x & 31, weight_warp = threadIdx.x / 32 / kRowWarps, row_warp = threadIdx.x / 32 % kRowWarps, count = num_chunks(sizes.cols);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < count) fill<T, M, N>(shared + i * S::num_bytes, weights, x, sizes, i);
    cp_async_commit();
  }
  TileSums<M, N> sums(reinterpret_cast<float*>(shared + kSlots * S::num_bytes));
  int span = 0;
#pragma unroll 1
  for (int at = 0; at < count; ++at) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();  // everyone's copies have landed, and everyone is through with the slot that is filled next
    if (at + kAhead < count) fill<T, M, N>(shared + (at + kAhead) % kSlots * S::num_bytes, weights, x, sizes, at + kAhead);
    cp_async_commit();
    add_chunk<T, M, N>(sums, shared + at % kSlots * S::num_bytes, weight_warp, row_warp, lane);
    span = sums.after_step(span, at + 1, count);
  }
  sums.store((blockIdx.y * kWeightWarps + weight_warp) * M * kMmaRows, sizes.rows, (blockIdx.x * kRowWarps + row_warp) * N * kMmaCols, sizes.num_rows, out);
}

template <class T, int M, int N>
int start(const PackedWeight& weight, const Activations& x, int64_t num_rows, const Output& out, cudaStream_t stream) {
  using S = Slot<M, N>;
  const Sizes sizes = {static_cast<int>(weight.rows), static_cast<int>(weight.cols), static_cast<int>(num_rows)};
  return launch(half_tiled_kernel<T, M, N>, tiled_grid(weight.rows, num_rows, S::weights, S::rows), dim3(kTiledThreads), S::shared_bytes, stream,
                reinterpret_cast<const T*>(weight.data), static_cast<const float*>(x.f32), sizes, out);
}

}  // namespace

extern "C" int pyserve_cuda_linear_half_tiled(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride,
                                              int64_t num_rows, int64_t accumulate, int64_t tile, void* stream) {
  if (num_rows == 0) return 0;
  if (!is_half_product(*weight, *x, out_stride) || !is_tile(tile) || num_rows > INT32_MAX) return kInvalid;
  const Output output = {out, out_stride, bias, accumulate != 0};
  const auto on = static_cast<cudaStream_t>(stream);
  return with_half_type(weight->type, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if (is_large(tile, weight->rows, num_rows, Slot<4, 4>::shared_bytes)) return start<T, 4, 4>(*weight, *x, num_rows, output, on);
    return start<T, 2, 2>(*weight, *x, num_rows, output, on);
  });
}

}  // namespace pyserve::cuda
