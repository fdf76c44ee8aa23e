// The table of one instruction set's kernels, filled from the templates.
#pragma once
#include <utility>

#include "linear_float.h"
#include "linear_kernels.h"
#include "linear_quantised.h"
#include "linear_rows.h"

namespace pyserve {

template <class V, WeightType type, int... m>
constexpr void fill_quantised(LinearKernels& table, std::integer_sequence<int, m...>) {
  ((table.quantised[int(type) - int(WeightType::q8_0)][m] = quantised_product<V, type, m + 1>), ...);
}

template <class V, WeightType type, int... m>
constexpr void fill_floats(LinearKernels& table, std::integer_sequence<int, m...>) {
  ((table.floats[int(type)][m] = float_product<V, type, m + 1>), ...);
}

template <class V>
constexpr LinearKernels make_linear_kernels(const char* name) {
  LinearKernels table{name, V::tile_m, kTileRows / (V::lanes * V::groups), {}, {}, quantise_row<V>, rms_norm_row<V>, gated_row<V>, exp_scaled_row<V>,
                      largest_row<V>};
  constexpr auto sizes = std::make_integer_sequence<int, V::tile_m>();
  fill_floats<V, WeightType::f32>(table, sizes);
  fill_floats<V, WeightType::f16>(table, sizes);
  fill_floats<V, WeightType::bf16>(table, sizes);
  fill_quantised<V, WeightType::q8_0>(table, sizes);
  fill_quantised<V, WeightType::q4_0>(table, sizes);
  fill_quantised<V, WeightType::q4_1>(table, sizes);
  fill_quantised<V, WeightType::q5_0>(table, sizes);
  fill_quantised<V, WeightType::q5_1>(table, sizes);
  fill_quantised<V, WeightType::q4_k>(table, sizes);
  fill_quantised<V, WeightType::q5_k>(table, sizes);
  fill_quantised<V, WeightType::q6_k>(table, sizes);
  return table;
}

}  // namespace pyserve
