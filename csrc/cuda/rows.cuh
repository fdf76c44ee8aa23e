// Small pieces that the kernels over rows of activations share: sums in a fixed order, and the rounding of activations to int8.
#pragma once
#include "kernels.h"
#include "portable.cuh"

namespace pyserve::cuda {

constexpr int kBlockLen = 32;  // columns that share an activation scale, and a weight's scale
constexpr unsigned kAllLanes = 0xffffffffu;

// Over the lanes of a warp; every lane gets the result, in one fixed order.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
// NaN wins, as it must where a NaN is to be noticed.
__device__ __forceinline__ float warp_max_or_nan(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, x, step);
    x = other > x || other != other ? other : x;
  }
  return x;
}

// A block of 32 columns, one a lane, to int8; as `quantise` in pyserve/ops/reference_linear.py, bit for bit. `block` counts over all rows.
__device__ __forceinline__ void quantise_block(const Activations& out, int64_t block, float x, int lane) {
  const float largest = warp_max_or_nan(fabsf(x));
  const bool is_finite = largest < INFINITY, is_used = is_finite && largest >= 1e-30f;
  const float inverse = is_used ? __fdiv_rn(127.f, largest) : 0.f;
  const int q8 = is_used ? __float2int_rn(__fmul_rn(x, inverse)) : 0;
  const int sum = warp_sum(q8);
  out.q8[block * kBlockLen + lane] = static_cast<int8_t>(q8);
  if (lane != 0) return;
  out.q8_scale[block] = is_used ? __fdiv_rn(largest, 127.f) : is_finite ? 0.f : NAN;
  out.q8_sum[block] = sum;
}

// Can the int8 half be written, where one is wanted?
inline bool is_valid(const Activations& out) { return out.width > 0 && (out.q8 == nullptr || out.width % kBlockLen == 0); }

}  // namespace pyserve::cuda
