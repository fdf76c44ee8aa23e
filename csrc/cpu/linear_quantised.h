// One tile of 32 rows of quantised weights times M rows of int8 activations.
//
//   y[m][n] = sum over blocks b of  scale[n][b] * a_scale[m][b] * dot(q[n][b], a[m][b])  +  min[n][b] * a_scale[m][b] * a_sum[m][b]
//
// The lanes of an accumulator are rows of the tile, so there is no horizontal sum. The dot products are integers, hence exact in any order; the floats
// are added block by block with one fused multiply-add each, the same for every M: a row's bits do not depend on the rows beside it. Types without a
// minimum start the integer sum at -offset * a_sum, which takes the weights' offset off for nothing.
//
// What bounds it on Zen 4: 8 dot products a row and block beside one multiplication and two additions that share their pipes, so 8 / 11 of the int8 peak.
// To get near it, the rows' chains of dot products run side by side, register by register of the weights, and a broadcast of activations serves the whole
// tile. Few rows wait for memory: weights are asked for a tile ahead, into the second-level cache, since more requests can be on their way to it than to the
// first.
#pragma once
#include <utility>

#include "linear_kernels.h"

namespace pyserve {

#define PYSERVE_INLINE static inline __attribute__((always_inline))

// Register j of 8 of one block and slice, `at` its quants.
template <class V, int bits, int j>
PYSERVE_INLINE typename V::Bytes unpacked(const uint8_t* at) {
  if constexpr (bits == 8) {
    return V::load_bytes(at + 64 * j);
  } else {
    const typename V::Bytes line = V::load_bytes(at + 64 * (j % 4)), nibble = j < 4 ? V::low_nibbles(line) : V::high_nibbles(line);
    if constexpr (bits == 5) return V::template with_high_bits<4 - j>(nibble, V::load_bytes(at + 256), 0x10);
    if constexpr (bits == 6) return V::template with_high_bits<4 - 2 * (j % 4)>(nibble, V::load_bytes(at + 256 + 64 * (j / 4)), 0x30);
    return nibble;
  }
}

// The scales of block `b` of a group for the lanes from `row` on: [0] of the whole block or its first half, [1] the minimum or the second half's scale.
template <class V, WeightType type>
PYSERVE_INLINE void load_scales(const uint8_t* header, int b, int row, typename V::Float* scale) {
  constexpr Format format = format_of(type);
  const uint8_t* small = header + format.f16_bytes() + 2 * kTileRows * b + row;
  scale[0] = V::load_half(header + 2 * row);
  if constexpr (format.has_min()) scale[1] = V::load_half(header + 2 * (kTileRows + row));
  if constexpr (format.scales == Scales::k_min) {
    scale[0] = scale[0] * V::load_uint8(small);
    scale[1] = scale[1] * (V::all(0.f) - V::load_uint8(small + kTileRows));
  }
  if constexpr (format.scales == Scales::k_halves) {
    scale[1] = scale[0] * V::load_int8(small + kTileRows);
    scale[0] = scale[0] * V::load_int8(small);
  }
}

// How one pass over a block is cut: `sums` integer sums (one, or one for each half), each of `registers` of the 8, `step` at a time.
template <class V, WeightType type>
struct Steps {
  static constexpr Format format = format_of(type);
  static constexpr int sums = format.scales == Scales::k_halves ? 2 : 1, registers = 8 / sums;
  static constexpr int step = V::template step<format.bits> < registers ? V::template step<format.bits> : registers, count = registers / step;
  // One by one, the two registers that share a line follow one another.
  static constexpr int first_register(int sum, int i) { return sums == 1 && step == 1 && format.bits < 8 ? i % 2 * 4 + i / 2 : sum * registers + i * step; }
};

template <class V, WeightType type, int M, int first, int... k>
PYSERVE_INLINE void add_dots(const uint8_t* const* quants, const int8_t* a, typename V::Int (*sum)[M], std::integer_sequence<int, k...>) {
  constexpr int bits = format_of(type).bits;
  typename V::Bytes q[V::groups][sizeof...(k)];
#pragma GCC unroll 2
  for (int g = 0; g < V::groups; ++g) ((q[g][k] = unpacked<V, bits, first + k>(quants[g])), ...);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int g = 0; g < V::groups; ++g) sum[g][m] = V::template dot<bits, int(sizeof...(k))>(sum[g][m], q[g], a + m * kBlock + 4 * first);
}

template <class V, WeightType type, int M, int sum_index, int... i>
PYSERVE_INLINE void dots_of_block(const uint8_t* const* quants, const int8_t* a, typename V::Int (*sum)[M], std::integer_sequence<int, i...>) {
  using S = Steps<V, type>;
  (add_dots<V, type, M, S::first_register(sum_index, i)>(quants, a, sum, std::make_integer_sequence<int, S::step>()), ...);
}

template <class V, WeightType type, int M, int sum_index>
PYSERVE_INLINE void add_sum(const uint8_t* const* quants, const uint8_t* activations, const typename V::Float (*scale)[2], typename V::Float (*acc)[M]) {
  constexpr Format format = format_of(type);
  constexpr bool starts_at_zero = format.has_min() || (format.bits == 8 && V::subtracts_offset);
  const auto* a_scale = (const float*)(activations + M * kBlock);
  const auto* offset = (const int32_t*)(a_scale + M) + sum_index * M;
  typename V::Int sum[V::groups][M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int g = 0; g < V::groups; ++g) sum[g][m] = V::all_int(starts_at_zero ? 0 : offset[m]);
  dots_of_block<V, type, M, sum_index>(quants, (const int8_t*)activations, sum, std::make_integer_sequence<int, Steps<V, type>::count>());
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const typename V::Float factor = V::all(a_scale[m]);
#pragma GCC unroll 2
    for (int g = 0; g < V::groups; ++g) {
      acc[g][m] = V::fma(scale[g][sum_index] * factor, V::to_float(sum[g][m]), acc[g][m]);
      if constexpr (format.has_min()) acc[g][m] = V::fma(scale[g][1], V::all(((const float*)offset)[m]), acc[g][m]);
    }
  }
}

// Rows from `row` on, as many as the registers of one pass hold.
template <class V, WeightType type, int M>
PYSERVE_INLINE void add_block(const uint8_t* header, const uint8_t* block, int b, int row, const uint8_t* activations, typename V::Float (*acc)[M]) {
  constexpr int slice_bytes = format_of(type).slice_bytes();
  typename V::Float scale[V::groups][2];
  const uint8_t* quants[V::groups];
#pragma GCC unroll 2
  for (int g = 0; g < V::groups; ++g) {
    const int first = row + g * V::lanes;
    load_scales<V, type>(header, b, first, scale[g]);
    quants[g] = block + first / kSliceRows * slice_bytes + 4 * (first % kSliceRows);
  }
  add_sum<V, type, M, 0>(quants, activations, scale, acc);
  if constexpr (Steps<V, type>::sums == 2) add_sum<V, type, M, 1>(quants, activations, scale, acc);
}

// Asks for what is read later, a few lines at a time: all at once they would hold up everything behind them.
template <class V>
PYSERVE_INLINE void ask(Ahead& ahead) {
  for (int line = 0; line < ahead.lines; ++line, ahead.at += 64) V::prefetch(ahead.at);
}

template <class V>
PYSERVE_INLINE void put(const TileOutput& to, int m, int row, typename V::Float value) {
  float* out = to.out + m * to.stride + row;
  if (to.bias != nullptr) value = value + V::load(to.bias + row);
  if (to.accumulate) value = value + V::load(out);
  V::store(out, value);
}

template <class V, WeightType type, int M>
void quantised_product(const uint8_t* tile, Ahead ahead, int64_t num_blocks, const uint8_t* activations, const TileOutput& to) {
  constexpr Format format = format_of(type);
  constexpr int pass_rows = V::lanes * V::groups;
  for (int row = 0; row < kTileRows; row += pass_rows) {
    typename V::Float acc[V::groups][M];
    for (int g = 0; g < V::groups; ++g)
      for (int m = 0; m < M; ++m) acc[g][m] = V::all(0.f);
    const uint8_t* a = activations;
    const uint8_t* group = tile;
    for (int64_t done = 0; done < num_blocks; done += format.group, group += format.group_bytes()) {
      const int blocks = num_blocks - done < format.group ? int(num_blocks - done) : format.group;
      for (int b = 0; b < blocks; ++b, a += M * kActivationBlockBytes) {
        const uint8_t* block = group + format.header_bytes() + b * format.quant_bytes();
        ask<V>(ahead);
        add_block<V, type, M>(group, block, b, row, a, acc);
      }
    }
    for (int g = 0; g < V::groups; ++g)
      for (int m = 0; m < M; ++m) put<V>(to, m, row + g * V::lanes, acc[g][m]);
  }
}

}  // namespace pyserve
