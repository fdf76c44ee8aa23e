// Products with float weights: out[m, n] (+)= sum_k x[m, k] * w[n, k] + bias[n]. The kernel for f32, and for f16 and bf16 whose columns are no multiple of 8; it is
// plain and right. The others go to linear_half.cu.
//
// One warp for a weight row; it reads the row once for eight activation rows. Exactness (R37): a sum is each lane's columns (lane, lane + 32, ...) in ascending
// order, then a tree over the lanes, whatever other rows there are.
//
// Layout: weights [rows, cols] as in the file; x f32 [num_rows, width].
// Not handled: tensor cores.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "half.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kWarps = 8, kRows = 8;

// grid (tiles of 8 weight rows, tiles of 8 activation rows)
template <class T>
__global__ void __launch_bounds__(32 * kWarps) linear_float_kernel(const T* weights, int rows, int cols, const float* x, int num_rows, Output out) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * kWarps + threadIdx.x / 32, first = blockIdx.y * kRows;
  if (row >= rows) return;
  const T* weight = weights + static_cast<int64_t>(row) * cols;
  float sums[kRows] = {};
  for (int column = lane; column < cols; column += 32) {
    const float w = to_float(weight[column]);
#pragma unroll
    for (int m = 0; m < kRows; ++m)
      if (first + m < num_rows) sums[m] = __fmaf_rn(x[static_cast<int64_t>(first + m) * cols + column], w, sums[m]);
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    const float sum = warp_sum(sums[m]);
    if (lane != 0 || first + m >= num_rows) continue;
    out.store(first + m, row, sum);
  }
}

}  // namespace

extern "C" int pyserve_cuda_linear_float(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                                         int64_t accumulate, void* stream) {
  if (num_rows == 0) return 0;
  const bool is_shaped = weight->rows > 0 && weight->cols > 0 && weight->cols == x->width && out_stride >= weight->rows && num_rows <= 65535 * kRows;
  if (!is_shaped) return kInvalid;
  if (has_half_product(*weight)) return pyserve_cuda_linear_half(weight, x, bias, out, out_stride, num_rows, accumulate, stream);
  const dim3 grid(static_cast<unsigned>((weight->rows + kWarps - 1) / kWarps), static_cast<unsigned>((num_rows + kRows - 1) / kRows));
  const Output output = {out, out_stride, bias, accumulate != 0};
  return with_float_type(static_cast<int64_t>(weight->type), kInvalid, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    return launch(linear_float_kernel<T>, grid, dim3(32 * kWarps), 0, static_cast<cudaStream_t>(stream), reinterpret_cast<const T*>(weight->data),
                  static_cast<int>(weight->rows), static_cast<int>(weight->cols), static_cast<const float*>(x->f32), static_cast<int>(num_rows), output);
  });
}

}  // namespace pyserve::cuda
