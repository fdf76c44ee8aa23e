// RMS norm of rows, with or without a residual, to f32 and, where a quantised product reads it, int8.
//
// One block a row, 256 threads. The sum of squares: each thread over its columns (thread, thread + 256, ...) in ascending order, then a tree over the lanes, then
// the warps in order. That order depends on the width alone, so a row's bits do not depend on the company (R37). With a residual, x + residual takes the residual's
// place before the norm reads it; each thread reads back only what it wrote itself.
//
// A program adds in the product instead (`accumulate`): there the sum costs a read and a write of the residual, here a write of the product, a read of it, and
// the same two. The bits are the same. With a residual is for who has the product already, as where several devices have parts of it.
//
// Layout: rows are [num_rows, width], dense. The int8 half: width a multiple of 32, one warp a block of 32 columns.
// Not handled: weights in other types than f32, layer norm with a mean.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "rows.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const float* x, float* residual, const float* weight, float eps, Activations out) {
  PYSERVE_SHARED(float, sums, [kWarps]);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * out.width;
  const int width = static_cast<int>(out.width), lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  float sum = 0.f;
  for (int column = threadIdx.x; column < width; column += kThreads) {
    float value = x[row + column];
    if (residual != nullptr) residual[row + column] = value = __fadd_rn(value, residual[row + column]);
    sum = __fmaf_rn(value, value, sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += sums[i];
  const float scale = __frcp_rn(__fsqrt_rn(__fdiv_rn(total, static_cast<float>(width)) + eps));
  const float* from = residual != nullptr ? residual : x;
  for (int column = threadIdx.x; column < width; column += kThreads) {
    const float value = __fmul_rn(__fmul_rn(from[row + column], scale), weight[column]);
    out.f32[row + column] = value;
    if (out.q8 != nullptr) quantise_block(out, (row + column) / kBlockLen, value, lane);  // width % 32 == 0: a warp is here as a whole or not at all
  }
}

}  // namespace

extern "C" int pyserve_cuda_rms_norm(const float* x, float* residual, const float* weight, float eps, const Activations* out, int64_t num_rows, void* stream) {
  if (num_rows == 0) return 0;
  if (!is_valid(*out)) return kInvalid;
  return launch(rms_norm_kernel, dim3(static_cast<unsigned>(num_rows)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), x, residual, weight, eps, *out);
}

}  // namespace pyserve::cuda
