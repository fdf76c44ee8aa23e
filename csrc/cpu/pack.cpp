// From a file's blocks to the tiles of linear_format.h. Only bits move: no value is computed.
#include <cstring>

#include "linear_format.h"

namespace pyserve {
namespace {

// A block of 32 columns of one row, taken apart.
struct Block {
  uint8_t q[kBlock];       // unsigned, the format's offset added
  const uint8_t* d;        // f16 scale, where it lies
  const uint8_t* min;      // f16 minimum (or dmin); null where there is none
  uint8_t small[2];        // K types: scale and min of the block, or the scales of its halves
};

void read_nibbles(const uint8_t* nibbles, uint8_t* q) {
  for (int i = 0; i < 16; ++i) q[i] = nibbles[i] & 15, q[16 + i] = nibbles[i] >> 4;
}

void add_high_bits(const uint8_t* bits, uint8_t* q) {  // bit i of 32 is value i's
  for (int i = 0; i < kBlock; ++i) q[i] = uint8_t(q[i] | (bits[i / 8] >> (i % 8) & 1) << 4);
}

Block read_small_block(WeightType type, const uint8_t* raw) {
  Block block{{}, raw, nullptr, {}};
  switch (type) {
    case WeightType::q8_0:
      for (int i = 0; i < kBlock; ++i) block.q[i] = raw[2 + i] ^ 0x80;
      break;
    case WeightType::q4_0: read_nibbles(raw + 2, block.q); break;
    case WeightType::q5_0: read_nibbles(raw + 6, block.q), add_high_bits(raw + 2, block.q); break;
    case WeightType::q4_1: read_nibbles(raw + 4, block.q), block.min = raw + 2; break;
    default: read_nibbles(raw + 8, block.q), add_high_bits(raw + 4, block.q), block.min = raw + 2;  // q5_1
  }
  return block;
}

// Blocks 0..7 of 256 columns. Their 6-bit scales and minima lie in 12 bytes: four bytes of scales, four of minima, whose top bit pairs are blocks 4..7's.
Block read_k_block(WeightType type, const uint8_t* raw, int b) {
  Block block{{}, raw, raw + 2, {}};
  const uint8_t* scales = raw + 4;
  if (b < 4) {
    block.small[0] = scales[b] & 63, block.small[1] = scales[b + 4] & 63;
  } else {
    block.small[0] = uint8_t((scales[b + 4] & 15) | (scales[b - 4] >> 6) << 4);
    block.small[1] = uint8_t((scales[b + 4] >> 4) | (scales[b] >> 6) << 4);
  }
  const uint8_t* nibbles = raw + (type == WeightType::q4_k ? 16 : 48) + b / 2 * kBlock;  // blocks 2i and 2i + 1 share their bytes
  for (int i = 0; i < kBlock; ++i) {
    block.q[i] = b % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
    if (type == WeightType::q5_k) block.q[i] = uint8_t(block.q[i] | (raw[16 + i] >> b & 1) << 4);
  }
  return block;
}

// 256 columns in two halves of four blocks: 64 bytes of nibbles, 32 of high bit pairs; blocks 0, 1 have the low nibbles, 2, 3 the high ones.
Block read_q6_k_block(const uint8_t* raw, int b) {
  const int half = b / 4, quarter = b % 4;
  const uint8_t *low = raw + 64 * half + 32 * (quarter % 2), *high = raw + 128 + 32 * half, *scales = raw + 192;
  Block block{{}, raw + 208, nullptr, {scales[2 * b], scales[2 * b + 1]}};
  for (int i = 0; i < kBlock; ++i)
    block.q[i] = uint8_t((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * quarter) & 3) << 4);
  return block;
}

Block read_block(WeightType type, const uint8_t* raw_row, int64_t b) {
  const Format format = format_of(type);
  if (!format.is_k()) return read_small_block(type, raw_row + b * format.raw_bytes);
  const uint8_t* raw = raw_row + b / 8 * format.raw_bytes;
  return type == WeightType::q6_k ? read_q6_k_block(raw, int(b % 8)) : read_k_block(type, raw, int(b % 8));
}

void write_quants(const Block& block, int bits, int row, uint8_t* out) {  // of a slice
  for (int i = 0; i < kBlock; ++i) {
    const int j = i / 4, at = 4 * row + i % 4;
    const uint8_t q = block.q[i];
    if (bits == 8) {
      out[64 * j + at] = q;
      continue;
    }
    out[64 * (j % 4) + at] = uint8_t(out[64 * (j % 4) + at] | (q & 15) << (j < 4 ? 0 : 4));
    if (bits == 5) out[256 + at] = uint8_t(out[256 + at] | q >> 4 << j);
    if (bits == 6) out[256 + 64 * (j / 4) + at] = uint8_t(out[256 + 64 * (j / 4) + at] | q >> 4 << 2 * (j % 4));
  }
}

void write_scales(const Block& block, const Format& format, int b, int row, uint8_t* header) {
  std::memcpy(header + 2 * row, block.d, 2);
  if (block.min) std::memcpy(header + 2 * (kTileRows + row), block.min, 2);
  if (format.is_k())
    for (int i = 0; i < 2; ++i) header[format.f16_bytes() + kTileRows * (2 * b + i) + row] = block.small[i];
}

void pack_quantised_row(WeightType type, const uint8_t* raw_row, int64_t cols, int row, uint8_t* tile) {
  const Format format = format_of(type);
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    uint8_t* group = tile + b / format.group * format.group_bytes();
    const int within = int(b % format.group);
    const Block block = read_block(type, raw_row, b);
    write_scales(block, format, within, row, group);
    uint8_t* quants = group + format.header_bytes() + within * format.quant_bytes();
    write_quants(block, format.bits, row % kSliceRows, quants + row / kSliceRows * format.slice_bytes());
  }
}

void pack_float_row(int value_bytes, const uint8_t* raw_row, int64_t cols, int row, uint8_t* tile) {
  for (int64_t k = 0; k < cols; ++k) std::memcpy(tile + (k * kTileRows + row) * value_bytes, raw_row + k * value_bytes, size_t(value_bytes));
}

int64_t raw_row_bytes(WeightType type, int64_t cols) {
  const Format format = format_of(type);
  return cols / (format.is_float() ? 1 : format.is_k() ? 256 : kBlock) * format.raw_bytes;
}

}  // namespace

size_t packed_bytes(WeightType type, int64_t rows, int64_t cols) { return size_t(ceil_div(rows, kTileRows) * tile_bytes(type, cols)); }

void pack(WeightType type, const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* out, Share share) {
  const Format format = format_of(type);
  const int64_t stride = tile_bytes(type, cols), row_bytes = raw_row_bytes(type, cols);
  const Range part = part_of(ceil_div(rows, kTileRows), share);
  for (int64_t tile = part.begin; tile < part.end; ++tile) {
    uint8_t* to = out + tile * stride;
    std::memset(to, 0, size_t(stride));
    for (int row = 0; row < kTileRows && tile * kTileRows + row < rows; ++row) {
      const uint8_t* raw_row = raw + (tile * kTileRows + row) * row_bytes;
      if (format.is_float()) {
        pack_float_row(format.bits / 8, raw_row, cols, row, to);
      } else {
        pack_quantised_row(type, raw_row, cols, row, to);
      }
    }
  }
}

}  // namespace pyserve
