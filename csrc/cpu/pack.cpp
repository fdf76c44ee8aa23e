// From a file's blocks to the tiles of linear_format.h. Only bits move: no value is computed. And what is looked for in a file before: values that are none.
//
// A model is packed whenever it is loaded, so this is to be no slower than a disk: values are moved four at a time, in the 32-bit words that a register of the
// packed layout takes from one row.
#include <algorithm>
#include <cstring>

#include "linear_format.h"

namespace pyserve {
namespace {

constexpr int kQuads = kBlock / 4;
constexpr uint32_t kLow4 = 0x0f0f0f0f, kLow2 = 0x03030303, kLow1 = 0x01010101;  // of each byte

// A block of 32 columns of one row, taken apart.
struct Block {
  uint32_t quads[kQuads];  // four columns in a word, the first in its lowest byte; unsigned, the format's offset added
  const uint8_t* d;        // f16 scale, where it lies
  const uint8_t* min;      // f16 minimum (or dmin); null where there is none
  uint8_t small[2];        // K types: scale and min of the block, or the scales of its halves
};

uint32_t word(const uint8_t* bytes, int i) {
  uint32_t value;
  std::memcpy(&value, bytes + 4 * i, 4);
  return value;
}

void read_nibbles(const uint8_t* nibbles, uint32_t* quads) {
  for (int j = 0; j < 4; ++j) quads[j] = word(nibbles, j) & kLow4, quads[4 + j] = word(nibbles, j) >> 4 & kLow4;
}

void add_high_bits(uint32_t bits, uint32_t* quads) {  // bit i of 32 is value i's
  constexpr uint32_t spread = 1 | 1 << 7 | 1 << 14 | 1 << 21;  // times this, bit i of four comes to stand in byte i
  for (int j = 0; j < kQuads; ++j) quads[j] |= ((bits >> 4 * j & 15) * spread & kLow1) << 4;
}

template <WeightType type>
Block read_small_block(const uint8_t* raw) {
  Block block{{}, raw, nullptr, {}};
  if constexpr (type == WeightType::q8_0) {
    for (int j = 0; j < kQuads; ++j) block.quads[j] = word(raw + 2, j) ^ 0x80808080;
  } else {
    constexpr bool has_min = format_of(type).has_min(), has_high = format_of(type).bits == 5;
    const uint8_t* bits = raw + (has_min ? 4 : 2);
    if (has_min) block.min = raw + 2;
    read_nibbles(bits + (has_high ? 4 : 0), block.quads);
    if (has_high) add_high_bits(word(bits, 0), block.quads);
  }
  return block;
}

// Blocks 0..7 of 256 columns. Their 6-bit scales and minima lie in 12 bytes: four bytes of scales, four of minima, whose top bit pairs are blocks 4..7's.
template <WeightType type>
Block read_k_block(const uint8_t* raw, int b) {
  Block block{{}, raw, raw + 2, {}};
  const uint8_t* scales = raw + 4;
  if (b < 4) {
    block.small[0] = scales[b] & 63, block.small[1] = scales[b + 4] & 63;
  } else {
    block.small[0] = uint8_t((scales[b + 4] & 15) | (scales[b - 4] >> 6) << 4);
    block.small[1] = uint8_t((scales[b + 4] >> 4) | (scales[b] >> 6) << 4);
  }
  const uint8_t* nibbles = raw + (type == WeightType::q4_k ? 16 : 48) + b / 2 * kBlock;  // blocks 2i and 2i + 1 share their bytes
  for (int j = 0; j < kQuads; ++j) {
    block.quads[j] = word(nibbles, j) >> (b % 2 * 4) & kLow4;
    if (type == WeightType::q5_k) block.quads[j] |= (word(raw + 16, j) >> b & kLow1) << 4;
  }
  return block;
}

// 256 columns in two halves of four blocks: 64 bytes of nibbles, 32 of high bit pairs; blocks 0, 1 have the low nibbles, 2, 3 the high ones.
Block read_q6_k_block(const uint8_t* raw, int b) {
  const int half = b / 4, quarter = b % 4;
  const uint8_t *low = raw + 64 * half + 32 * (quarter % 2), *high = raw + 128 + 32 * half, *scales = raw + 192;
  Block block{{}, raw + 208, nullptr, {scales[2 * b], scales[2 * b + 1]}};
  for (int j = 0; j < kQuads; ++j)
    block.quads[j] = (word(low, j) >> (quarter < 2 ? 0 : 4) & kLow4) | (word(high, j) >> (2 * quarter) & kLow2) << 4;
  return block;
}

template <WeightType type>
Block read_block(const uint8_t* raw_row, int64_t b) {
  constexpr Format format = format_of(type);
  if constexpr (!format.is_k()) return read_small_block<type>(raw_row + b * format.raw_bytes);
  const uint8_t* raw = raw_row + b / 8 * format.raw_bytes;
  if constexpr (type == WeightType::q6_k) return read_q6_k_block(raw, int(b % 8));
  return read_k_block<type>(raw, int(b % 8));
}

template <int bits>
void write_quants(const uint32_t* quads, uint8_t* out) {  // `out`: where the row begins in its slice
  const auto put = [out](int line, uint32_t value) { std::memcpy(out + 64 * line, &value, 4); };
  if constexpr (bits == 8) {
    for (int j = 0; j < kQuads; ++j) put(j, quads[j]);
    return;
  }
  for (int j = 0; j < 4; ++j) put(j, (quads[j] & kLow4) | (quads[4 + j] & kLow4) << 4);
  uint32_t high[2] = {};
  for (int j = 0; j < kQuads; ++j) {
    if (bits == 5) high[0] |= (quads[j] >> 4 & kLow1) << j;
    if (bits == 6) high[j / 4] |= (quads[j] >> 4 & kLow2) << 2 * (j % 4);
  }
  for (int i = 0; i < bits - 4; ++i) put(4 + i, high[i]);
}

template <WeightType type>
void write_scales(const Block& block, int b, int row, uint8_t* header) {
  constexpr Format format = format_of(type);
  std::memcpy(header + 2 * row, block.d, 2);
  if (format.has_min()) std::memcpy(header + 2 * (kTileRows + row), block.min, 2);
  if (format.is_k())
    for (int i = 0; i < 2; ++i) header[format.f16_bytes() + kTileRows * (2 * b + i) + row] = block.small[i];
}

template <WeightType type>
void pack_quantised_row(const uint8_t* raw_row, int64_t cols, int row, uint8_t* tile) {
  constexpr Format format = format_of(type);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    uint8_t* group = tile + b / format.group * format.group_bytes();
    const int within = int(b % format.group);
    const Block block = read_block<type>(raw_row, b);
    write_scales<type>(block, within, row, group);
    uint8_t* quants = group + format.header_bytes() + within * format.quant_bytes();
    write_quants<format.bits>(block.quads, quants + row / kSliceRows * format.slice_bytes() + 4 * (row % kSliceRows));
  }
}

template <class Value>
void pack_float_row(const uint8_t* raw_row, int64_t cols, int row, uint8_t* tile) {
  for (int64_t k = 0; k < cols; ++k) std::memcpy(tile + (k * kTileRows + row) * sizeof(Value), raw_row + k * sizeof(Value), sizeof(Value));
}

using PackRow = void (*)(const uint8_t* raw_row, int64_t cols, int row, uint8_t* tile);

PackRow pack_row_of(WeightType type) {
  switch (type) {
    case WeightType::f32: return pack_float_row<uint32_t>;
    case WeightType::f16:
    case WeightType::bf16: return pack_float_row<uint16_t>;
    case WeightType::q8_0: return pack_quantised_row<WeightType::q8_0>;
    case WeightType::q4_0: return pack_quantised_row<WeightType::q4_0>;
    case WeightType::q4_1: return pack_quantised_row<WeightType::q4_1>;
    case WeightType::q5_0: return pack_quantised_row<WeightType::q5_0>;
    case WeightType::q5_1: return pack_quantised_row<WeightType::q5_1>;
    case WeightType::q4_k: return pack_quantised_row<WeightType::q4_k>;
    case WeightType::q5_k: return pack_quantised_row<WeightType::q5_k>;
    case WeightType::q6_k: return pack_quantised_row<WeightType::q6_k>;
  }
  return nullptr;
}

int64_t raw_row_bytes(WeightType type, int64_t cols) {
  const Format format = format_of(type);
  return cols / (format.is_float() ? 1 : format.is_k() ? 256 : kBlock) * format.raw_bytes;
}

// Whether one of `count` numbers, `stride` bytes apart, has all bits of its exponent set: it is NaN or infinite then.
template <class Bits, Bits exponent>
bool has_broken(const uint8_t* raw, int64_t count, int64_t stride) {
  Bits is_broken = 0;  // as wide as they are, so that the compiler uses vectors
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, raw + i * stride, sizeof bits);
    is_broken |= (bits & exponent) == exponent ? 1 : 0;
  }
  return is_broken != 0;
}

// Quantised values are finite whenever their scales are.
bool has_broken_scale(WeightType type, const uint8_t* raw_row, int64_t cols) {
  constexpr int q6_k_scale = 208;
  const Format format = format_of(type);
  const int64_t num_blocks = cols / format.column_multiple(), stride = format.raw_bytes;
  if (has_broken<uint16_t, 0x7c00>(raw_row + (type == WeightType::q6_k ? q6_k_scale : 0), num_blocks, stride)) return true;
  return format.has_min() && has_broken<uint16_t, 0x7c00>(raw_row + 2, num_blocks, stride);
}

bool is_broken(WeightType type, const uint8_t* raw_row, int64_t cols) {
  switch (type) {
    case WeightType::f32: return has_broken<uint32_t, 0x7f800000>(raw_row, cols, 4);
    case WeightType::f16: return has_broken<uint16_t, 0x7c00>(raw_row, cols, 2);
    case WeightType::bf16: return has_broken<uint16_t, 0x7f80>(raw_row, cols, 2);
    default: return has_broken_scale(type, raw_row, cols);
  }
}

}  // namespace

int64_t broken_row(WeightType type, const uint8_t* raw, int64_t rows, int64_t cols) {
  const int64_t row_bytes = raw_row_bytes(type, cols);
  for (int64_t row = 0; row < rows; ++row)
    if (is_broken(type, raw + row * row_bytes, cols)) return row;
  return -1;
}

size_t packed_bytes(WeightType type, int64_t rows, int64_t cols) { return size_t(ceil_div(rows, kTileRows) * tile_bytes(type, cols)); }

void pack(WeightType type, const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* out, Share share) {
  const int64_t stride = tile_bytes(type, cols), row_bytes = raw_row_bytes(type, cols);
  const PackRow pack_row = pack_row_of(type);
  const Range part = part_of(ceil_div(rows, kTileRows), share);
  for (int64_t tile = part.begin; tile < part.end; ++tile) {
    uint8_t* to = out + tile * stride;
    const int64_t first = tile * kTileRows;
    const int num_rows = int(std::min<int64_t>(kTileRows, rows - first));
    if (num_rows < kTileRows) std::memset(to, 0, size_t(stride));
    for (int row = 0; row < num_rows; ++row) pack_row(raw + (first + row) * row_bytes, cols, row, to);
  }
}

}  // namespace pyserve
