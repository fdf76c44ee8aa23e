// Products with f16 and bf16 weights for few rows, on the tensor cores: half.cuh has the definition.
//
// One CUDA block for 16 weight rows; each of its eight warps has a span of the columns and reads 16 bytes of two rows a lane and chunk straight into the mma's
// operand. Up to 32 activation rows share what is read; more rows are linear_half_tiled.cu's.
//
// Layout: weights [rows, cols] as in the file, cols a multiple of 8; x f32 [num_rows, width]; both 16-byte aligned.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "half.cuh"

namespace pyserve::cuda {
namespace {

template <class T>
__device__ __forceinline__ HalfWeights load_weights(const T* weights, int first, int rows, int cols, int column, int lane) {
  HalfWeights loaded;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + (lane >> 2) + 8 * r;
    const bool is_inside = row < rows && column < cols;
    loaded.rows[r] = is_inside ? __ldcs(reinterpret_cast<const uint4*>(weights + static_cast<int64_t>(row) * cols + column)) : make_uint4(0, 0, 0, 0);
  }
  return loaded;
}

// grid (tiles of 16 weight rows, tiles of 8 * N activation rows)
template <class T, int N>
__global__ void __launch_bounds__(32 * kSpans, N == 1 ? 4 : 2) half_kernel(const T* weights, int rows, int cols, const float* x, int num_rows, Output out) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, first_row = blockIdx.y * kMmaCols * N, first_weight = blockIdx.x * kMmaRows;
  const int count = num_chunks(cols), end = span_start(warp + 1, count);
  float sums[N][4] = {};
#pragma unroll(N == 1 ? 2 : 1)
  for (int at = span_start(warp, count); at < end; ++at) {
    const int column = at * kChunkLen + (lane & 3) * kWordLen;
    const HalfWeights loaded = load_weights(weights, first_weight, rows, cols, column, lane);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      HalfOperand<T> operand;
      operand.set(loaded, step);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int row = first_row + kMmaCols * n + (lane >> 2);
        const bool is_inside = row < num_rows && column < cols;
        const float4* from = reinterpret_cast<const float4*>(x + static_cast<int64_t>(row) * cols + column) + step;
        HalfInputs inputs;
        inputs.set(is_inside ? *from : make_float4(0.f, 0.f, 0.f, 0.f));
        add_half_step<T>(sums[n], operand, inputs);
      }
    }
  }
  add_spans<N>(sums, first_weight, rows, first_row, num_rows, out);
}

}  // namespace

extern "C" int pyserve_cuda_linear_half(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                                        int64_t accumulate, void* stream) {
  if (num_rows == 0) return 0;
  if (num_rows > kNarrowRows) return pyserve_cuda_linear_half_tiled(weight, x, bias, out, out_stride, num_rows, accumulate, 0, stream);
  if (!is_half_product(*weight, *x, out_stride)) return kInvalid;
  const Output output = {out, out_stride, bias, accumulate != 0};
  return with_half_type(weight->type, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto start = [&](auto n) {
      constexpr int N = decltype(n)::value;
      const dim3 grid(static_cast<unsigned>((weight->rows + kMmaRows - 1) / kMmaRows), static_cast<unsigned>((num_rows + 8 * N - 1) / (8 * N)));
      return launch(half_kernel<T, N>, grid, dim3(32 * kSpans), 0, static_cast<cudaStream_t>(stream), reinterpret_cast<const T*>(weight->data),
                    static_cast<int>(weight->rows), static_cast<int>(weight->cols), static_cast<const float*>(x->f32), static_cast<int>(num_rows), output);
    };
    return num_rows <= 8 ? start(std::integral_constant<int, 1>{}) : start(std::integral_constant<int, 4>{});
  });
}

}  // namespace pyserve::cuda
