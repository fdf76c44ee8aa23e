// Products with quantised weights: out[m, n] (+)= sum_k x[m, k] * w[n, k] + bias[n], activations int8 by blocks of 32 columns. The kernel for few rows.
//
// mma.m16n8k32 of int8: 16 weight rows by 8 activation rows by exactly one block of 32 columns, see record.cuh. One CUDA block for 16 weight rows; each of its
// eight warps has a span of the columns, which keeps enough 16-byte loads in flight where there are few rows. Up to 32 activation rows share what is read of
// the weights; more rows are linear_tiled.cu's.
//
// Exactness (R37): record.cuh and product.cuh; csrc/cpu/linear.cpp has the same definition but for the order of the sum.
//
// Not handled: columns that are not a multiple of 32.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "record.cuh"

namespace pyserve::cuda {
namespace {

__device__ __forceinline__ void load_inputs(Inputs& inputs, const Activations& x, int first_row, int num_rows, int block, int num_blocks, int lane) {
  const int row = first_row + (lane >> 2), column = block * kBlockLen + (lane & 3) * 4;
  const bool is_inside = block < num_blocks;
  const int8_t* from = x.q8 + row * x.width + column;
  inputs.q8[0] = is_inside && row < num_rows ? *reinterpret_cast<const uint32_t*>(from) : 0;
  inputs.q8[1] = is_inside && row < num_rows ? *reinterpret_cast<const uint32_t*>(from + 16) : 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int result_row = first_row + (lane & 3) * 2 + i;
    const bool is_wanted = is_inside && result_row < num_rows;
    inputs.scale[i] = is_wanted ? x.q8_scale[static_cast<int64_t>(result_row) * num_blocks + block] : 0.f;
    inputs.sum[i] = is_wanted ? __int2float_rn(x.q8_sum[static_cast<int64_t>(result_row) * num_blocks + block]) : 0.f;
  }
}

// grid (tiles of 16 weight rows, tiles of 8 * N activation rows)
template <class W, int N>
__global__ void __launch_bounds__(32 * kSpans, N == 1 ? 4 : 1)
    linear_kernel(const uint8_t* weights, int rows, int cols, Activations x, int num_rows, Output out) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, first_row = blockIdx.y * kMmaCols * N;
  const int num_blocks = cols / kBlockLen, count = num_records(cols), end = span_start(warp + 1, count);
  const uint8_t* tile = weights + static_cast<int64_t>(blockIdx.x) * tile_bytes<W>(cols);
  float sums[N][4] = {};
#pragma unroll(N == 1 && !W::is_k ? 2 : 1)
  for (int at = span_start(warp, count); at < end; ++at) {
    Record<W> record;
    const uint8_t* header = tile + header_at<W>(at);  // one place of 64 bits for both: two are more than the registers of sm_100 hold
    record.template load<true>(header, header + behind_header<W>(at), lane);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      uint32_t a[4];
      record.operand(a, block);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        Inputs inputs;
        load_inputs(inputs, x, first_row + kMmaCols * n, num_rows, 2 * at + block, num_blocks, lane);
        add_block<W>(sums[n], record, a, block, inputs);
      }
    }
  }
  add_spans<N>(sums, blockIdx.x * kTileRows, rows, first_row, num_rows, out);
}

// One warp for each block of 32 columns.
__global__ void __launch_bounds__(256) quantise_kernel(Activations x, int64_t num_blocks) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane = threadIdx.x & 31;
  if (block < num_blocks) quantise_block(x, block, x.f32[block * kBlockLen + lane], lane);
}

template <class W>
int run(const PackedWeight& weight, const Activations& x, int64_t num_rows, const Output& out, cudaStream_t stream) {
  const auto start = [&](auto n) {
    constexpr int N = decltype(n)::value;
    const dim3 grid(static_cast<unsigned>((weight.rows + kTileRows - 1) / kTileRows), static_cast<unsigned>((num_rows + 8 * N - 1) / (8 * N)));
    return launch(linear_kernel<W, N>, grid, dim3(32 * kSpans), 0, stream, weight.data, static_cast<int>(weight.rows), static_cast<int>(weight.cols), x,
                  static_cast<int>(num_rows), out);
  };
  if (num_rows <= 8) return start(std::integral_constant<int, 1>{});
  return start(std::integral_constant<int, 4>{});
}

}  // namespace

extern "C" int pyserve_cuda_quantise(const Activations* x, int64_t num_rows, void* stream) {
  if (num_rows == 0) return 0;
  if (!is_valid(*x) || x->q8 == nullptr) return kInvalid;
  const int64_t num_blocks = num_rows * x->width / kBlockLen;
  return launch(quantise_kernel, dim3(static_cast<unsigned>((num_blocks + 7) / 8)), dim3(256), 0, static_cast<cudaStream_t>(stream), *x, num_blocks);
}

extern "C" int pyserve_cuda_linear(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                                   int64_t accumulate, void* stream) {
  if (num_rows == 0) return 0;
  if (num_rows > kNarrowRows) return pyserve_cuda_linear_tiled(weight, x, bias, out, out_stride, num_rows, accumulate, 0, stream);
  if (!is_product(*weight, *x, out_stride)) return kInvalid;
  const Output output = {out, out_stride, bias, accumulate != 0};
  return with_type(static_cast<int64_t>(weight->type), kInvalid, [&](auto tag) {
    return run<typename decltype(tag)::Type>(*weight, *x, num_rows, output, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace pyserve::cuda
