// The packed layout of a weight matrix, shared by the packer and the kernels.
//
// 32 rows (outputs) make a tile; a tile's columns follow one another. Rows past the end are zero.
//
// F32, F16, BF16: for each column the 32 rows' values side by side, in the file's precision.
//
// Quantised: groups of `group` blocks of 32 columns, each group a multiple of 64 bytes:
//   header    the group's scales, as the file has them, the 32 rows side by side:
//               Q4_0 Q5_0 Q8_0  f16 scale[32]
//               Q4_1 Q5_1       f16 scale[32], f16 min[32]
//               Q4_K Q5_K       f16 d[32], f16 dmin[32], then per block: u8 scale[32], u8 min[32]
//               Q6_K            f16 d[32], then per half block: i8 scale[32]
//   quants    per block, unsigned: `offset` is added to the signed types. The two slices of 16 rows follow one another. Register j of 8 holds the columns
//             4j..4j+3 of a slice, row r in bytes 4r..4r+3, so that one broadcast of four activations feeds 16 rows. A slice has
//               8 bits          512 bytes: the 8 registers
//               4 bits          256 bytes: register j in the low nibbles of line j, register 4 + j in the high ones
//               5 bits          the same, then 64 bytes whose bit j is the high bit of register j
//               6 bits          the same, then 128 bytes: bits 2t, 2t+1 of line i are the high bits of register 4i + t
//
// Every value is kept to the bit, and no type grows by more than a few percent.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../ops.h"

namespace pyserve {

constexpr int kTileRows = 32;
constexpr int kSliceRows = 16;
constexpr int kBlock = 32;  // columns that share an activation scale

enum class Scales { none, half, half_min, k_min, k_halves };

struct Format {
  int bits;       // of a quantised value; of a float otherwise
  int offset;     // added to make the values unsigned
  int group;      // blocks
  Scales scales;
  int raw_bytes;  // of a block in the file: 256 columns of a K type, 32 of another, 1 of a float

  constexpr bool is_float() const { return scales == Scales::none; }
  constexpr bool has_min() const { return scales == Scales::half_min || scales == Scales::k_min; }
  constexpr bool is_k() const { return scales == Scales::k_min || scales == Scales::k_halves; }
  constexpr int f16_bytes() const { return 2 * kTileRows * (has_min() ? 2 : 1); }  // the header's part in f16
  constexpr int header_bytes() const { return f16_bytes() + (is_k() ? group * 2 * kTileRows : 0); }
  constexpr int slice_bytes() const { return bits == 8 ? 512 : 256 + 64 * (bits - 4); }
  constexpr int quant_bytes() const { return slice_bytes() * (kTileRows / kSliceRows); }
  constexpr int group_bytes() const { return header_bytes() + group * quant_bytes(); }
  constexpr int column_multiple() const { return is_float() ? 1 : is_k() ? 256 : kBlock; }
};

constexpr Format format_of(WeightType type) {
  switch (type) {
    case WeightType::f32: return {32, 0, 1, Scales::none, 4};
    case WeightType::f16: return {16, 0, 1, Scales::none, 2};
    case WeightType::bf16: return {16, 0, 1, Scales::none, 2};
    case WeightType::q8_0: return {8, 128, 1, Scales::half, 34};
    case WeightType::q4_0: return {4, 8, 1, Scales::half, 18};
    case WeightType::q4_1: return {4, 0, 1, Scales::half_min, 20};
    case WeightType::q5_0: return {5, 16, 1, Scales::half, 22};
    case WeightType::q5_1: return {5, 0, 1, Scales::half_min, 24};
    case WeightType::q4_k: return {4, 0, 8, Scales::k_min, 144};
    case WeightType::q5_k: return {5, 0, 8, Scales::k_min, 176};
    case WeightType::q6_k: return {6, 32, 8, Scales::k_halves, 210};
  }
  return {};
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of one tile.
constexpr int64_t tile_bytes(WeightType type, int64_t cols) {
  const Format format = format_of(type);
  return format.is_float() ? cols * kTileRows * (format.bits / 8) : ceil_div(cols / kBlock, format.group) * format.group_bytes();
}

struct Range {
  int64_t begin, end;
};

// The share's part of `total` items: contiguous, and no two parts differ by more than one item.
constexpr Range part_of(int64_t total, Share share) { return {total * share.index / share.count, total * (share.index + 1) / share.count}; }

}  // namespace pyserve
