// How a quantised weight lies on the device, for the kernels that read it: products and embeddings.
//
// Layout of packed weights, made by `pyserve_cuda_pack` from a file's blocks, no value changed: a record for each 16 rows and 64 columns (two blocks of 32), tile
// after tile, in a tile the columns ascending; rows are filled up to 16 and columns to 64 with zero scales. A record is
//     low     8 bits: [2 blocks][32 lanes][16 bytes]; fewer: [32 lanes][16 bytes], the first block in the low nibbles, the second in the high ones.
//             Lane 4 g + t: columns 4 t .. 4 t + 3 of row g, of row g + 8, then columns 16 + 4 t .. of both: four words, the mma's A
//     high    5 bits: [32 lanes] uint32, bit 8 b + 4 block + w is the fifth bit of byte b of word w;  6 bits: [32 lanes][2 blocks] uint32, bits 8 b + 2 w, + 1
//     scales  [2 blocks][8][2] f16 of rows g and g + 8, then the same of the minima where there are any. K types: [2 blocks][8][4] bytes: scales of rows g and
//             g + 8, then their minima (q4_k, q5_k) or their scales of columns 16 .. 31 (q6_k)
// K types: four records (256 columns) stand behind a header [8][4] f16: d of rows g and g + 8, dmin of both; q6_k has no dmin and [8][2].
//
// Types without a minimum are signed and kept as two's complement: the top bit of each value is turned over (q8_0 has it so in the file).
#pragma once
#include "rows.cuh"

namespace pyserve::cuda {

constexpr int kTileRows = 16, kPairCols = 2 * kBlockLen;

enum class Scales { half, half_min, k_min, k_halves };

template <int bits_, Scales scales_, int file_bytes_>
struct Format {
  static constexpr int bits = bits_, file_bytes = file_bytes_;  // of a block of 32 columns in the file, of 256 for K types
  static constexpr Scales scales = scales_;
  static constexpr bool is_k = scales == Scales::k_min || scales == Scales::k_halves;
  static constexpr bool has_min = scales == Scales::half_min || scales == Scales::k_min, has_halves = scales == Scales::k_halves;
  static constexpr int low_bytes = bits == 8 ? 1024 : 512, high_bytes = bits == 5 ? 128 : bits == 6 ? 256 : 0, quant_bytes = low_bytes + high_bytes;
  static constexpr int record_bytes = quant_bytes + (scales == Scales::half_min ? 128 : 64);
  static constexpr int header_bytes = scales == Scales::k_min ? 64 : scales == Scales::k_halves ? 32 : 0;
  static constexpr int group = is_k ? 4 : 1, group_bytes = header_bytes + group * record_bytes;  // records behind one header
  static constexpr int column_multiple = is_k ? 256 : kBlockLen;
  static constexpr int offset = has_min ? 0 : 1 << (bits - 1);  // of the values in the file
};
using Q8_0 = Format<8, Scales::half, 34>;
using Q4_0 = Format<4, Scales::half, 18>;
using Q4_1 = Format<4, Scales::half_min, 20>;
using Q5_0 = Format<5, Scales::half, 22>;
using Q5_1 = Format<5, Scales::half_min, 24>;
using Q4_K = Format<4, Scales::k_min, 144>;
using Q5_K = Format<5, Scales::k_min, 176>;
using Q6_K = Format<6, Scales::k_halves, 210>;

__host__ __device__ constexpr int num_records(int cols) { return (cols + kPairCols - 1) / kPairCols; }
template <class W>
__host__ __device__ constexpr int64_t tile_bytes(int cols) {  // of 16 rows
  return static_cast<int64_t>(num_records(cols) / W::group) * W::group_bytes;
}
template <class W>
__host__ __device__ constexpr int64_t header_at(int record) {  // in its tile
  return static_cast<int64_t>(record / W::group) * W::group_bytes;
}
template <class W>
__host__ __device__ constexpr int behind_header(int record) {
  return W::header_bytes + record % W::group * W::record_bytes;
}
template <class W>
__host__ __device__ constexpr int64_t record_at(int record) {
  return header_at<W>(record) + behind_header<W>(record);
}

// Calls action with the type's struct as template argument.
template <class W>
struct Tag {
  using Type = W;
};

template <class Result, class Action>
Result with_type(int64_t type, Result otherwise, Action&& action) {
  switch (static_cast<WeightType>(type)) {
    case WeightType::q8_0: return action(Tag<Q8_0>{});
    case WeightType::q5_1: return action(Tag<Q5_1>{});
    case WeightType::q4_k: return action(Tag<Q4_K>{});
#ifndef PYSERVE_FEW_TYPES  // the sanitizers' builds: one of each kind of scales
    case WeightType::q4_0: return action(Tag<Q4_0>{});
    case WeightType::q4_1: return action(Tag<Q4_1>{});
    case WeightType::q5_0: return action(Tag<Q5_0>{});
    case WeightType::q5_k: return action(Tag<Q5_K>{});
#endif
    case WeightType::q6_k: return action(Tag<Q6_K>{});
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
