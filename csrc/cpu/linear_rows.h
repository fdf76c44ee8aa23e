// Kernels over one row of activations: quantisation, norm, gated activation, exponential, maximum.
//
// Sums run over 16 columns side by side, whatever the width of a register, and are added up in one order; a width that is no multiple of 16 ends in a
// padded copy.
#pragma once
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "half.h"
#include "linear_kernels.h"
#include "linear_quantised.h"

namespace pyserve {

// One scale per block of 32: the largest magnitude becomes 127. A block with an infinity or a NaN gets a NaN for its scale, so that every output it enters
// is NaN and no other; a block below 1e-30 is zero.
template <class V>
void quantise_row(const float* x, int64_t width, int8_t* q8, float* scale, int32_t* sum) {
  for (int64_t block = 0; block < width / kBlock; ++block, x += kBlock, q8 += kBlock) {
    typename V::Int largest = V::all_int(0), total = V::all_int(0);
    for (int i = 0; i < kBlock; i += V::lanes)  // magnitudes order as integers, with infinity and NaN above all
      largest = V::max_int(largest, V::and_int(V::bits_of(V::load(x + i)), V::all_int(0x7fffffff)));
    const float magnitude = float_from_bits(uint32_t(V::max_lane(largest)));
    const bool is_finite = magnitude <= 3.402823466e38f, is_zero = magnitude < 1e-30f;
    if (!is_finite || is_zero) {
      std::memset(q8, 0, kBlock);
      scale[block] = is_finite ? 0.f : NAN;
      sum[block] = 0;
      continue;
    }
    const typename V::Float inverse = V::all(127.f / magnitude);
    for (int i = 0; i < kBlock; i += V::lanes) {
      const typename V::Int q = V::round(V::load(x + i) * inverse);
      V::store_int8(q8 + i, q);
      total = V::add_int(total, q);
    }
    scale[block] = magnitude / 127.f;
    sum[block] = V::sum_lanes(total);
  }
}

// f(pointer to 16 floats of each input, pointer to 16 outputs) over the row; the last, partial 16 go through a copy padded with zeros.
template <int num_inputs, class Function>
PYSERVE_INLINE void for_each_16(const float* const* inputs, float* out, int64_t width, Function&& f) {
  const float* at[num_inputs];
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    for (int n = 0; n < num_inputs; ++n) at[n] = inputs[n] + i;
    f(at, out + i);
  }
  if (i == width) return;
  float padded[num_inputs + 1][16] = {};
  for (int n = 0; n < num_inputs; ++n) {
    std::memcpy(padded[n], inputs[n] + i, size_t(width - i) * 4);
    at[n] = padded[n];
  }
  f(at, padded[num_inputs]);
  std::memcpy(out + i, padded[num_inputs], size_t(width - i) * 4);
}

template <class V>
float sum_of_squares(const float* x, int64_t width) {
  typename V::Float sum[16 / V::lanes];
  for (auto& part : sum) part = V::all(0.f);
  const auto add = [&sum](const float* at) __attribute__((always_inline)) {
    for (int i = 0; i < 16; i += V::lanes) {
      const typename V::Float value = V::load(at + i);
      sum[i / V::lanes] = V::fma(value, value, sum[i / V::lanes]);
    }
  };
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) add(x + i);
  float lanes[16] = {};
  std::memcpy(lanes, x + i, size_t(width - i) * 4);
  add(lanes);
  for (int part = 0; part < 16; part += V::lanes) V::store(lanes + part, sum[part / V::lanes]);
  float total = 0.f;
  for (float lane : lanes) total += lane;
  return total;
}

template <class V>
void rms_norm_row(const float* x, const float* weight, float eps, float* out, int64_t width) {
  const typename V::Float factor = V::all(1.f / std::sqrt(sum_of_squares<V>(x, width) / float(width) + eps));
  const float* inputs[] = {x, weight};
  for_each_16<2>(inputs, out, width, [factor](const float* const* in, float* to) __attribute__((always_inline)) {
    for (int i = 0; i < 16; i += V::lanes) V::store(to + i, V::load(in[0] + i) * factor * V::load(in[1] + i));
  });
}

// e^x within 2 units in the last place, 0 below -87.3, infinity above 88.7: 2^n * e^r with |r| <= ln(2) / 2 and e^r by its Taylor terms up to r^7.
template <class V>
PYSERVE_INLINE typename V::Float exponential(typename V::Float x) {
  using Float = typename V::Float;
  const Float low = V::all(-87.3f), high = V::all(88.7f);
  const Float clamped = V::max(low, V::min(high, x));  // in this order a NaN stays
  const typename V::Int n = V::round(clamped * V::all(1.44269504f));
  const Float whole = V::to_float(n);
  Float r = V::fma(whole, V::all(-0.693359375f), clamped);  // ln 2 in two parts, the first exact in 9 bits
  r = V::fma(whole, V::all(2.12194440e-4f), r);
  Float p = V::all(1.f / 5040);
  for (const float coefficient : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = V::fma(p, r, V::all(coefficient));
  const Float result = V::from_bits(V::add_int(V::bits_of(p), V::exponent(n)));  // p * 2^n; at n = 128 p is below 1
  return x < low ? V::all(0.f) : x > high ? V::all(INFINITY) : result;
}

template <class V>
PYSERVE_INLINE typename V::Float sigmoid(typename V::Float x) {
  return V::all(1.f) / (V::all(1.f) + exponential<V>(V::all(0.f) - x));
}

// f(gate) * up. GELU's tanh form, 0.5 * g * (1 + tanh(t)), is g * sigmoid(2 t).
template <class V>
void gated_row(Activation kind, const float* gate, const float* up, float* out, int64_t width) {
  const float* inputs[] = {gate, up};
  for_each_16<2>(inputs, out, width, [kind](const float* const* in, float* to) __attribute__((always_inline)) {
    for (int i = 0; i < 16; i += V::lanes) {
      const typename V::Float g = V::load(in[0] + i);
      typename V::Float t = g;
      if (kind == Activation::gelu_tanh) t = V::all(1.5957691216f) * V::fma(g * g * g, V::all(0.044715f), g);
      V::store(to + i, g * sigmoid<V>(t) * V::load(in[1] + i));
    }
  });
}

template <class V>
void exp_scaled_row(const float* x, float shift, float divisor, float* out, int64_t width) {
  const float* inputs[] = {x};
  for_each_16<1>(inputs, out, width, [shift, divisor](const float* const* in, float* to) __attribute__((always_inline)) {
    for (int i = 0; i < 16; i += V::lanes)
      V::store(to + i, exponential<V>((V::load(in[0] + i) - V::all(shift)) / V::all(divisor)));
  });
}

// NaN where any of them is. Four registers side by side, so that none waits for the one before it.
template <class V>
float largest_row(const float* x, int64_t width) {
  constexpr int kSideBySide = 4, step = kSideBySide * V::lanes;
  typename V::Float best[kSideBySide];
  typename V::Int magnitude = V::all_int(0);  // magnitudes order as integers, with infinity and NaN above all
  for (auto& part : best) part = V::all(-INFINITY);
  const auto take = [&](const float* at) __attribute__((always_inline)) {
    for (int i = 0; i < kSideBySide; ++i) {
      const typename V::Float value = V::load(at + i * V::lanes);
      best[i] = V::max(value, best[i]);  // in this order a NaN goes
      magnitude = V::max_int(magnitude, V::and_int(V::bits_of(value), V::all_int(0x7fffffff)));
    }
  };
  int64_t i = 0;
  for (; i + step <= width; i += step) take(x + i);
  float lanes[step];
  for (float& lane : lanes) lane = -INFINITY;
  std::memcpy(lanes, x + i, size_t(width - i) * 4);
  take(lanes);
  if (V::max_lane(magnitude) > 0x7f800000) return NAN;
  for (int part = 0; part < kSideBySide; ++part) V::store(lanes + part * V::lanes, best[part]);
  float largest = lanes[0];
  for (float lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

}  // namespace pyserve
