// How a quantised weight lies on the device, for the kernels that read it: products and embeddings.
//
// Layout of packed weights, made by `pyserve_cuda_pack` from a file's blocks (GGML's q8_0, q4_0, q4_1), no value changed: a record for each 16 rows and 64
// columns, tile after tile, in a tile the columns ascending; rows are filled up to 16 and columns to 64 with zero scales.
//     q8_0  [2 blocks][32 lanes][16 bytes]      lane 4 g + t: columns 4 t .. 4 t + 3 of row g, of row g + 8, then columns 16 + 4 t .. of both: the mma's A
//     q4_*  [32 lanes][16 bytes]                the same; the first block in the low nibbles, the second in the high ones; not offset
//     then  [2 blocks][8][2] f16                scales of rows g and g + 8; q4_1: the same again for the minima
#pragma once
#include "rows.cuh"

namespace pyserve::cuda {

constexpr int kTileRows = 16, kPairCols = 2 * kBlockLen;

struct Q8_0 {
  static constexpr int quant_bytes = 1024, file_bytes = 34, file_quants = 2;
  static constexpr bool is_4bit = false, has_min = false;
};
struct Q4_0 {
  static constexpr int quant_bytes = 512, file_bytes = 18, file_quants = 2;
  static constexpr bool is_4bit = true, has_min = false;
};
struct Q4_1 {
  static constexpr int quant_bytes = 512, file_bytes = 20, file_quants = 4;
  static constexpr bool is_4bit = true, has_min = true;
};

constexpr int kScaleBytes = 2 * kTileRows * 2;  // of one record
template <class W>
constexpr int kRecordBytes = W::quant_bytes + kScaleBytes * (W::has_min ? 2 : 1);

// Calls action with the type's struct as template argument.
template <class W>
struct Tag {
  using Type = W;
};

template <class Result, class Action>
Result with_type(int64_t type, Result otherwise, Action&& action) {
  switch (static_cast<WeightType>(type)) {
    case WeightType::q8_0: return action(Tag<Q8_0>{});
    case WeightType::q4_0: return action(Tag<Q4_0>{});
    case WeightType::q4_1: return action(Tag<Q4_1>{});
    default: return otherwise;
  }
}

// --- weights that are floats: [rows, cols] as in the file

constexpr int kNoSuchType = -1;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class Result, class Action>
Result with_float_type(int64_t type, Result otherwise, Action&& action) {
  switch (static_cast<WeightType>(type)) {
    case WeightType::f32: return action(Tag<float>{});
    case WeightType::f16: return action(Tag<__half>{});
    case WeightType::bf16: return action(Tag<__nv_bfloat16>{});
    default: return otherwise;
  }
}

}  // namespace pyserve::cuda
