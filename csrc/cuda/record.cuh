// What the two quantised products share: one lane's part of a record as the operands of int8 tensor-core products, and the one way in which a block is added.
//
// A block of 32 columns is an exact integer product, scaled once:
//     sum = fma(scale * x_scale, dot, sum);  with a minimum  sum = fma(x_scale, fma(scale, dot, minimum * x_sum), sum);
//     q6_k, whose scales are of 16 columns:  sum = fma(x_scale, fma(scale_1, dot_1, scale_0 * dot_0), sum)
// The columns of a row are cut into eight spans of whole records (`span_start`), a sum for each in ascending order; the eight sums are added in order. That is
// the definition of a product, whatever kernel makes it (R37).
#pragma once
#include "packed.cuh"
#include "product.cuh"
#include "ptx.cuh"

namespace pyserve::cuda {

// Added to a dot product, whose magnitude is below 2^22, this makes a float of it without a conversion: 1.5 * 2^23 has a unit in its last place.
constexpr int kMagic = 0x4b400000;
constexpr float kMagicValue = 12582912.f;

template <class W>
struct Record {
  static constexpr int halves = W::has_halves ? 2 : 1;
  uint4 low[W::bits == 8 ? 2 : 1];
  uint32_t high[2];
  float scale[2][halves][2], least[2][2];  // [block][half of it][row g, row g + 8]

  template <bool is_streamed>  // from global memory, read once
  __device__ __forceinline__ void load(const uint8_t* header, const uint8_t* record, int lane) {
    const uint4* words = reinterpret_cast<const uint4*>(record) + lane;
#pragma unroll
    for (int i = 0; i < W::low_bytes / 512; ++i) low[i] = is_streamed ? __ldcs(words + 32 * i) : words[32 * i];
    const uint8_t* upper = record + W::low_bytes;
    if constexpr (W::bits == 5) high[0] = reinterpret_cast<const uint32_t*>(upper)[lane];
    if constexpr (W::bits == 6) {
      const uint2 pair = reinterpret_cast<const uint2*>(upper)[lane];
      high[0] = pair.x, high[1] = pair.y;
    }
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if constexpr (W::is_k) load_small_scales(header, record + W::quant_bytes, block, lane >> 2);
      else load_half_scales(record + W::quant_bytes, block, lane >> 2);
    }
  }

  // The A operand of a block. Signed values come out times 2^(8 - bits), which the scales make up for.
  __device__ __forceinline__ void operand(uint32_t (&a)[4], int block) const {
    const uint4 from = low[W::bits == 8 ? block : 0];
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) a[w] = W::bits == 8 ? words[w] : nibbles(words[w], block) | upper_bits(w, block);
  }

 private:
  static constexpr int shift = W::has_min ? 0 : 8 - W::bits;
  static constexpr float unit = 1.f / (1 << shift);

  __device__ __forceinline__ static uint32_t nibbles(uint32_t word, int block) {  // << shift
    const int left = shift - 4 * block;
    return (left >= 0 ? word << left : word >> -left) & 0x0f0f0f0fu << shift;
  }
  __device__ __forceinline__ uint32_t upper_bits(int w, int block) const {
    if constexpr (W::bits == 5) {
      const int left = 4 + shift - (4 * block + w);
      return (left >= 0 ? high[0] << left : high[0] >> -left) & 0x10101010u << shift;
    }
    if constexpr (W::bits == 6) return high[block] << (6 - 2 * w) & 0xc0c0c0c0u;
    return 0;
  }
  __device__ __forceinline__ void load_half_scales(const uint8_t* scales, int block, int group) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2*>(scales)[block * 8 + group]);
    scale[block][0][0] = pair.x * unit, scale[block][0][1] = pair.y * unit;
    if constexpr (W::has_min) {
      const float2 minima = __half22float2(reinterpret_cast<const __half2*>(scales + 64)[block * 8 + group]);
      least[block][0] = minima.x, least[block][1] = minima.y;
    }
  }
  __device__ __forceinline__ void load_small_scales(const uint8_t* header, const uint8_t* scales, int block, int group) {
    const uint32_t small = reinterpret_cast<const uint32_t*>(scales)[block * 8 + group];
    const __half2* halves_at = reinterpret_cast<const __half2*>(header) + group * (W::has_min ? 2 : 1);
    const float2 d = __half22float2(halves_at[0]);
    if constexpr (W::has_min) {
      const float2 dmin = __half22float2(halves_at[1]);
      scale[block][0][0] = __fmul_rn(d.x, static_cast<float>(small & 255)), scale[block][0][1] = __fmul_rn(d.y, static_cast<float>(small >> 8 & 255));
      least[block][0] = -__fmul_rn(dmin.x, static_cast<float>(small >> 16 & 255)), least[block][1] = -__fmul_rn(dmin.y, static_cast<float>(small >> 24));
    } else {
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        scale[block][half][0] = __fmul_rn(d.x * unit, static_cast<float>(static_cast<int8_t>(small >> 16 * half)));
        scale[block][half][1] = __fmul_rn(d.y * unit, static_cast<float>(static_cast<int8_t>(small >> (16 * half + 8))));
      }
    }
  }
};

// One block of 8 activation rows: the B operand, and what belongs to this lane's two columns of the result.
struct Inputs {
  uint32_t q8[2];
  float scale[2], sum[2];
};

__device__ __forceinline__ void dot_products(float (&out)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  int dot[4] = {kMagic, kMagic, kMagic, kMagic};
  mma_m16n8k32_s8(dot, a, b);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = __fadd_rn(__int_as_float(dot[i]), -kMagicValue);
}

// `a` is the record's operand of the block.
template <class W>
__device__ __forceinline__ void add_block(float (&sums)[4], const Record<W>& record, const uint32_t (&a)[4], int block, const Inputs& x) {
  float dot[4], second[4];
  if constexpr (W::has_halves) {
    const uint32_t a0[4] = {a[0], a[1], 0, 0}, a1[4] = {0, 0, a[2], a[3]};
    dot_products(dot, a0, x.q8);
    dot_products(second, a1, x.q8);
  } else {
    dot_products(dot, a, x.q8);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scale = record.scale[block][0][i >> 1];
    if constexpr (W::has_halves) {
      const float value = __fmaf_rn(record.scale[block][Record<W>::halves - 1][i >> 1], second[i], __fmul_rn(scale, dot[i]));
      sums[i] = __fmaf_rn(x.scale[i & 1], value, sums[i]);
    } else if constexpr (W::has_min) {
      const float value = __fmaf_rn(scale, dot[i], __fmul_rn(record.least[block][i >> 1], x.sum[i & 1]));
      sums[i] = __fmaf_rn(x.scale[i & 1], value, sums[i]);
    } else {
      sums[i] = __fmaf_rn(__fmul_rn(scale, x.scale[i & 1]), dot[i], sums[i]);
    }
  }
}

// Can a quantised product be made of these?
inline bool is_product(const PackedWeight& weight, const Activations& x, int64_t out_stride) {
  return weight.rows > 0 && weight.cols > 0 && weight.cols == x.width && out_stride >= weight.rows && is_valid(x) && x.q8 != nullptr &&
         reinterpret_cast<uintptr_t>(weight.data) % 16 == 0;
}

}  // namespace pyserve::cuda
