// One tile of 16 rows of quantised weights times M rows of int8 activations.
//
//   y[m][n] = sum over blocks b of  scale[n][b] * a_scale[m][b] * dot(q[n][b], a[m][b])  +  min[n][b] * a_scale[m][b] * a_sum[m][b]
//
// The lanes of an accumulator are the rows of the tile, so there is no horizontal sum. The dot products are integers, hence exact in any order; the floats
// are added block by block with one fused multiply-add each, the same for every M: a row's bits do not depend on the rows beside it. Types without a
// minimum start the integer sum at -offset * a_sum, which takes the weights' offset off for nothing.
//
// What bounds it on Zen 4: 8 dot products a row and block beside one multiplication and two additions that share their pipes, so 8 / 11 of the int8 peak.
#pragma once
#include "linear_kernels.h"

namespace pyserve {

#define PYSERVE_INLINE static inline __attribute__((always_inline))

template <class V, int bits>
struct Unpack {  // the 8 registers of one block, `at` its quants
  template <int j>
  PYSERVE_INLINE typename V::Bytes get(const uint8_t* at) {
    if constexpr (bits == 8) {
      return V::load_bytes(at + 64 * j);
    } else {
      const typename V::Bytes line = V::load_bytes(at + 64 * (j % 4)), nibble = j < 4 ? V::low_nibbles(line) : V::high_nibbles(line);
      if constexpr (bits == 5) return V::template with_high_bits<4 - j>(nibble, V::load_bytes(at + 256), 0x10);
      if constexpr (bits == 6) return V::template with_high_bits<4 - 2 * (j % 4)>(nibble, V::load_bytes(at + 256 + 64 * (j / 4)), 0x30);
      return nibble;
    }
  }
  PYSERVE_INLINE void all(const uint8_t* at, typename V::Bytes* q) {
    q[0] = get<0>(at), q[1] = get<1>(at), q[2] = get<2>(at), q[3] = get<3>(at);
    q[4] = get<4>(at), q[5] = get<5>(at), q[6] = get<6>(at), q[7] = get<7>(at);
  }
};

// The scales of block `b` of a group for the lanes from `row` on: [0] of the whole block or its first half, [1] the minimum or the second half's scale.
template <class V, Scales kind>
PYSERVE_INLINE void load_scales(const uint8_t* header, int b, int row, typename V::Float* scale) {
  const uint8_t* small = header + 64 + 32 * b + row;
  if constexpr (kind == Scales::half) scale[0] = V::load_half(header + 32 * b + 2 * row);
  if constexpr (kind == Scales::half_min) scale[0] = V::load_half(header + 2 * row), scale[1] = V::load_half(header + 32 + 2 * row);
  if constexpr (kind == Scales::k_min) {
    scale[0] = V::load_half(header + 2 * row) * V::load_uint8(small);
    scale[1] = V::load_half(header + 32 + 2 * row) * (V::all(0.f) - V::load_uint8(small + 16));
  }
  if constexpr (kind == Scales::k_halves) {
    const typename V::Float d = V::load_half(header + 2 * row);
    scale[0] = d * V::load_int8(small), scale[1] = d * V::load_int8(small + 16);
  }
}

template <class V, WeightType type, int M>
PYSERVE_INLINE void add_block(const uint8_t* header, const uint8_t* quants, int b, int row, const uint8_t* activations, typename V::Float* acc) {
  constexpr Format format = format_of(type);
  constexpr bool starts_at_zero = format.has_min() || (format.bits == 8 && V::subtracts_offset);
  typename V::Bytes q[8];
  typename V::Float scale[2];
  Unpack<V, format.bits>::all(quants + 4 * row, q);
  load_scales<V, format.scales>(header, b, row, scale);
  const auto* a = (const int8_t*)activations;
  const auto* a_scale = (const float*)(activations + M * kBlock);
  const auto* offset = (const int32_t*)(a_scale + M);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m, a += kBlock) {
    const typename V::Float factor = V::all(a_scale[m]);
    const typename V::Int start = V::all_int(starts_at_zero ? 0 : offset[m]);
    if constexpr (format.scales == Scales::k_halves) {
      const typename V::Int first = V::template dot<format.bits, 4>(start, q, a);
      const typename V::Int second = V::template dot<format.bits, 4>(V::all_int(offset[M + m]), q + 4, a + 16);
      acc[m] = V::fma(scale[0] * factor, V::to_float(first), acc[m]);
      acc[m] = V::fma(scale[1] * factor, V::to_float(second), acc[m]);
    } else {
      acc[m] = V::fma(scale[0] * factor, V::to_float(V::template dot<format.bits, 8>(start, q, a)), acc[m]);
      if constexpr (format.has_min()) acc[m] = V::fma(scale[1], V::all(((const float*)offset)[m]), acc[m]);
    }
  }
}

template <class V, WeightType type, int M>
void quantised_product(const uint8_t* tile, int64_t num_blocks, const uint8_t* activations, float* out) {
  constexpr Format format = format_of(type);
  constexpr int ahead = 2560;  // bytes; the tiles of a matrix follow one another, so this runs on into the next one
  for (int row = 0; row < kTileRows; row += V::lanes) {
    typename V::Float acc[M];
    for (int m = 0; m < M; ++m) acc[m] = V::all(0.f);
    const uint8_t* a = activations;
    const uint8_t* group = tile;
    for (int64_t done = 0; done < num_blocks; done += format.group, group += format.group_bytes()) {
      const int blocks = num_blocks - done < format.group ? int(num_blocks - done) : format.group;
      for (int line = 0; line < format.header_bytes(); line += 64) V::prefetch(group + ahead + line);
      for (int b = 0; b < blocks; ++b, a += M * kActivationBlockBytes) {
        const uint8_t* quants = group + format.header_bytes() + b * format.quant_bytes();
        for (int line = 0; line < format.quant_bytes(); line += 64) V::prefetch(quants + ahead + line);
        add_block<V, type, M>(group, quants, b, row, a, acc);
      }
    }
    for (int m = 0; m < M; ++m) V::store(out + m * kTileRows + row, acc[m]);
  }
}

}  // namespace pyserve
