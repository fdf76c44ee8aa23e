// Rows of an embedding table, read back out of its packed form: embeddings and the output product share one copy of the table.
#include <cstring>

#include "half.h"
#include "linear_format.h"

namespace pyserve {
namespace {

float half_at(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  return f16_to_float(half);
}

float float_value(WeightType type, const uint8_t* tile, int64_t column, int row) {
  const int64_t at = column * kTileRows + row;
  if (type == WeightType::f16) return half_at(tile + 2 * at);
  uint32_t bits = 0;
  if (type == WeightType::f32) std::memcpy(&bits, tile + 4 * at, 4);
  if (type == WeightType::bf16) std::memcpy((uint8_t*)&bits + 2, tile + 2 * at, 2);  // the upper half, on a little-endian machine
  return float_from_bits(bits);
}

struct BlockScales {
  float scale[2];  // of the halves of the block
  float min;       // added
};

BlockScales scales_of(const Format& format, const uint8_t* header, int b, int row) {
  const uint8_t* small = header + format.f16_bytes() + 2 * kTileRows * b + row;
  const float d = half_at(header + 2 * row);
  switch (format.scales) {
    case Scales::k_halves: return {{d * float(int8_t(small[0])), d * float(int8_t(small[kTileRows]))}, 0.f};
    case Scales::k_min: return {{d * float(small[0]), d * float(small[0])}, -(half_at(header + 2 * (kTileRows + row)) * float(small[kTileRows]))};
    case Scales::half_min: return {{d, d}, half_at(header + 2 * (kTileRows + row))};
    default: return {{d, d}, 0.f};
  }
}

int quant_at(int bits, const uint8_t* quants, int row, int i) {  // of a slice
  const int j = i / 4, at = 4 * row + i % 4;
  if (bits == 8) return quants[64 * j + at];
  const int low = quants[64 * (j % 4) + at] >> (j < 4 ? 0 : 4) & 15;
  if (bits == 5) return low | (quants[256 + at] >> j & 1) << 4;
  if (bits == 6) return low | (quants[256 + 64 * (j / 4) + at] >> 2 * (j % 4) & 3) << 4;
  return low;
}

void unpack_block(const Format& format, const uint8_t* tile, int64_t b, int row, float factor, float* out) {
  const int within = int(b % format.group);
  const uint8_t* group = tile + b / format.group * format.group_bytes();
  const uint8_t* quants = group + format.header_bytes() + within * format.quant_bytes() + row / kSliceRows * format.slice_bytes();
  const BlockScales scales = scales_of(format, group, within, row);
  for (int i = 0; i < kBlock; ++i)
    out[i] = (scales.scale[i / 16] * float(quant_at(format.bits, quants, row % kSliceRows, i) - format.offset) + scales.min) * factor;
}

void embed_row(const PackedWeight& table, int64_t token, float scale, float* out) {
  const Format format = format_of(table.type);
  const uint8_t* tile = table.data + token / kTileRows * tile_bytes(table.type, table.cols);
  const int row = int(token % kTileRows);
  if (format.is_float()) {
    for (int64_t k = 0; k < table.cols; ++k) out[k] = float_value(table.type, tile, k, row) * scale;
  } else {
    for (int64_t b = 0; b < table.cols / kBlock; ++b) unpack_block(format, tile, b, row, scale, out + b * kBlock);
  }
}

}  // namespace

void embed(const PackedWeight& table, const int32_t* tokens, int64_t num_rows, float scale, float* out, Share share) {
  const Range part = part_of(num_rows, share);
  for (int64_t m = part.begin; m < part.end; ++m) embed_row(table, tokens[m], scale, out + m * table.cols);
}

}  // namespace pyserve
