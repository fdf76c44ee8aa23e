// One tile of 16 rows of float weights times M rows of float activations: even and odd columns apart (two chains hide the latency), each in order, then
// their sum.
#pragma once
#include "linear_kernels.h"
#include "linear_quantised.h"

namespace pyserve {

template <class V, WeightType type>
PYSERVE_INLINE typename V::Float load_weights(const uint8_t* at) {
  if constexpr (type == WeightType::f32) return V::load((const float*)at);
  if constexpr (type == WeightType::f16) return V::load_half(at);
  if constexpr (type == WeightType::bf16) return V::load_bf16(at);
}

template <class V, WeightType type, int M>
void float_product(const uint8_t* tile, int64_t cols, const float* x, int64_t x_stride, float* out) {
  constexpr int value_bytes = format_of(type).bits / 8, column_bytes = kTileRows * value_bytes;
  for (int row = 0; row < kTileRows; row += V::lanes) {
    typename V::Float even[M], odd[M];
    for (int m = 0; m < M; ++m) even[m] = odd[m] = V::all(0.f);
    const uint8_t* w = tile + row * value_bytes;
    int64_t k = 0;
    for (; k + 1 < cols; k += 2, w += 2 * column_bytes) {
      for (int line = 0; line < 2 * column_bytes; line += 64) V::prefetch(w + 2560 + line);
      const typename V::Float w0 = load_weights<V, type>(w), w1 = load_weights<V, type>(w + column_bytes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        even[m] = V::fma(w0, V::all(x[m * x_stride + k]), even[m]);
        odd[m] = V::fma(w1, V::all(x[m * x_stride + k + 1]), odd[m]);
      }
    }
    if (k < cols)
      for (int m = 0; m < M; ++m) even[m] = V::fma(load_weights<V, type>(w), V::all(x[m * x_stride + k]), even[m]);
    for (int m = 0; m < M; ++m) V::store(out + m * kTileRows + row, even[m] + odd[m]);
  }
}

}  // namespace pyserve
