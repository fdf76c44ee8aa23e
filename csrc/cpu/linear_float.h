// One tile of 32 rows of float weights times M rows of float activations: even and odd columns apart (two chains hide the latency), each in order, then
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
void float_product(const uint8_t* tile, Ahead ahead, int64_t cols, const float* x, int64_t x_stride, const TileOutput& to) {
  constexpr int value_bytes = format_of(type).bits / 8, column_bytes = kTileRows * value_bytes, pass_rows = V::lanes * V::groups;
  constexpr int lane_bytes = V::lanes * value_bytes;
  for (int row = 0; row < kTileRows; row += pass_rows) {
    typename V::Float even[V::groups][M], odd[V::groups][M];
    for (int g = 0; g < V::groups; ++g)
      for (int m = 0; m < M; ++m) even[g][m] = odd[g][m] = V::all(0.f);
    const uint8_t* w = tile + row * value_bytes;
    int64_t k = 0;
    for (; k + 1 < cols; k += 2, w += 2 * column_bytes) {
      ask<V>(ahead);
#pragma GCC unroll 2
      for (int g = 0; g < V::groups; ++g) {
        const typename V::Float w0 = load_weights<V, type>(w + g * lane_bytes), w1 = load_weights<V, type>(w + column_bytes + g * lane_bytes);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          even[g][m] = V::fma(w0, V::all(x[m * x_stride + k]), even[g][m]);
          odd[g][m] = V::fma(w1, V::all(x[m * x_stride + k + 1]), odd[g][m]);
        }
      }
    }
    for (int g = 0; g < V::groups; ++g)
      for (int m = 0; m < M; ++m) {
        if (k < cols) even[g][m] = V::fma(load_weights<V, type>(w + g * lane_bytes), V::all(x[m * x_stride + k]), even[g][m]);
        put<V>(to, m, row + g * V::lanes, even[g][m] + odd[g][m]);
      }
  }
}

}  // namespace pyserve
