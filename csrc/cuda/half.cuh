// Products with f16 and bf16 weights on the tensor cores: what their two kernels share.
//
// mma.m16n8k16 multiplies bf16. An activation goes in as the sum of two, x = high + low, which keeps 16 bits of its mantissa and all of its range; an f16 weight,
// too, exactly; a bf16 weight is one. A step of 16 columns adds, smallest first:  w_low * x_high (f16 only), w * x_low, w * x_high.
// So bf16 costs two tensor-core products where rounding the activations to bf16 would cost one, and f16 three.
//
// Columns come in chunks of 32. Lane 4 g + t has columns 8 t .. 8 t + 7 of a row, 16 bytes of it; step s of the chunk takes 8 t + 4 s .. + 3 of these as the
// mma's columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9. Both operands are dealt like this, so the sum is over the right pairs, and both kernels deal alike: which products
// meet in one mma, and where in it, is part of the definition. Spans: product.cuh, of whole chunks.
#pragma once
#include "packed.cuh"
#include "product.cuh"
#include "ptx.cuh"

namespace pyserve::cuda {

constexpr int kChunkLen = 32, kWordLen = 8;  // columns: of a chunk, of 16 bytes of weights

template <class T>
constexpr bool kIsF16 = std::is_same_v<T, __half>;

struct Pair {  // two values, each the sum of two bf16
  uint32_t high, low;
};

__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

__device__ __forceinline__ Pair split(float x, float y) {
  const __nv_bfloat162 high = __floats2bfloat162_rn(x, y);
  const float2 kept = __bfloat1622float2(high);
  return {bits_of(high), bits_of(__floats2bfloat162_rn(__fsub_rn(x, kept.x), __fsub_rn(y, kept.y)))};
}

struct HalfInputs {  // one step of 8 activation rows: the B operands
  uint32_t high[2], low[2];

  __device__ __forceinline__ void set(float4 x) {
    const Pair first = split(x.x, x.y), second = split(x.z, x.w);
    high[0] = first.high, high[1] = second.high, low[0] = first.low, low[1] = second.low;
  }
};

// One chunk of 16 weight rows: this lane's 8 columns of rows g and g + 8, as they lie in memory.
struct HalfWeights {
  uint4 rows[2];
};

template <class T>
struct HalfOperand {  // one step: the A operands
  uint32_t high[4], low[4];

  __device__ __forceinline__ void set(const HalfWeights& weights, int step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t pairs[2] = {step == 0 ? weights.rows[r].x : weights.rows[r].z, step == 0 ? weights.rows[r].y : weights.rows[r].w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (kIsF16<T>) {
          const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
          const Pair parts = split(values.x, values.y);
          high[r + 2 * i] = parts.high, low[r + 2 * i] = parts.low;
        } else {
          high[r + 2 * i] = pairs[i];
        }
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void add_half_step(float (&sums)[4], const HalfOperand<T>& weights, const HalfInputs& x) {
  if constexpr (kIsF16<T>) mma_m16n8k16_bf16(sums, weights.low, x.high);
  mma_m16n8k16_bf16(sums, weights.high, x.low);
  mma_m16n8k16_bf16(sums, weights.high, x.high);
}

__host__ __device__ constexpr int num_chunks(int cols) { return (cols + kChunkLen - 1) / kChunkLen; }

// Do the tensor cores have this weight? A matter of the weight alone: activations are as the program allocates them.
inline bool has_half_product(const PackedWeight& weight) {
  return (weight.type == WeightType::f16 || weight.type == WeightType::bf16) && weight.cols % kWordLen == 0 &&
         reinterpret_cast<uintptr_t>(weight.data) % 16 == 0;
}

inline bool is_half_product(const PackedWeight& weight, const Activations& x, int64_t out_stride) {
  return weight.rows > 0 && weight.cols > 0 && weight.cols == x.width && out_stride >= weight.rows && has_half_product(weight) &&
         reinterpret_cast<uintptr_t>(x.f32) % 16 == 0;
}

// Calls action with the weight's type as template argument.
template <class Action>
int with_half_type(WeightType type, Action&& action) {
  if (type == WeightType::f16) return action(Tag<__half>{});
  return type == WeightType::bf16 ? action(Tag<__nv_bfloat16>{}) : kInvalid;
}

}  // namespace pyserve::cuda
