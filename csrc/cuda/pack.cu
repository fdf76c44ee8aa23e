// From a file's blocks to the records of packed.cuh, on the host. Only bits move: no value is computed.
#include <cstring>

#include "packed.cuh"

namespace pyserve::cuda {
namespace {

struct Block {  // 32 columns of one row, taken apart
  uint8_t quants[kBlockLen];  // as in the file, with its offset; q8_0: with 128 added
  const uint8_t *d, *least;   // f16 scale and minimum (dmin), where they lie; null where there is none
  uint8_t small[2];           // K types: scale and minimum of the block, or the scales of its halves
};

void read_nibbles(const uint8_t* nibbles, uint8_t* quants) {
  for (int i = 0; i < 16; ++i) quants[i] = nibbles[i] & 15, quants[16 + i] = nibbles[i] >> 4;
}

void add_fifth_bits(const uint8_t* bits, uint8_t* quants) {
  for (int i = 0; i < kBlockLen; ++i) quants[i] = static_cast<uint8_t>(quants[i] | (bits[i / 8] >> (i % 8) & 1) << 4);
}

template <class W>
Block read_plain(const uint8_t* from) {  // scale, minimum, fifth bits, quants
  Block block = {{}, from, W::has_min ? from + 2 : nullptr, {}};
  const uint8_t* rest = from + (W::has_min ? 4 : 2);
  if (W::bits == 8) {
    for (int i = 0; i < kBlockLen; ++i) block.quants[i] = static_cast<uint8_t>(rest[i] ^ 0x80);
  } else {
    read_nibbles(rest + (W::bits == 5 ? 4 : 0), block.quants);
    if (W::bits == 5) add_fifth_bits(rest, block.quants);
  }
  return block;
}

// Block b of 256 columns. Scales and minima of 6 bits lie in 12 bytes: four of scales, four of minima, whose top pairs of bits are those of blocks 4 to 7.
template <class W>
Block read_k(const uint8_t* from, int b) {
  Block block = {{}, from, from + 2, {}};
  const uint8_t* scales = from + 4;
  if (b < 4) {
    block.small[0] = scales[b] & 63, block.small[1] = scales[b + 4] & 63;
  } else {
    block.small[0] = static_cast<uint8_t>((scales[b + 4] & 15) | scales[b - 4] >> 6 << 4);
    block.small[1] = static_cast<uint8_t>(scales[b + 4] >> 4 | scales[b] >> 6 << 4);
  }
  const uint8_t* nibbles = from + (W::bits == 4 ? 16 : 48) + b / 2 * kBlockLen;  // blocks 2 i and 2 i + 1 share their bytes
  for (int i = 0; i < kBlockLen; ++i) {
    block.quants[i] = b % 2 != 0 ? nibbles[i] >> 4 : nibbles[i] & 15;
    if (W::bits == 5) block.quants[i] = static_cast<uint8_t>(block.quants[i] | (from[16 + i] >> b & 1) << 4);
  }
  return block;
}

// 256 columns are two halves of four blocks: 64 bytes of nibbles and 32 of pairs of high bits each; blocks 0 and 1 have the low nibbles, 2 and 3 the high ones.
Block read_q6_k(const uint8_t* from, int b) {
  const int half = b / 4, quarter = b % 4;
  const uint8_t *low = from + 64 * half + 32 * (quarter % 2), *high = from + 128 + 32 * half, *scales = from + 192;
  Block block = {{}, from + 208, nullptr, {scales[2 * b], scales[2 * b + 1]}};
  for (int i = 0; i < kBlockLen; ++i)
    block.quants[i] = static_cast<uint8_t>((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * quarter & 3) << 4);
  return block;
}

template <class W>
Block read_block(const uint8_t* row, int64_t block) {
  if constexpr (!W::is_k) return read_plain<W>(row + block * W::file_bytes);
  else if constexpr (W::has_halves) return read_q6_k(row + block / 8 * W::file_bytes, static_cast<int>(block % 8));
  else return read_k<W>(row + block / 8 * W::file_bytes, static_cast<int>(block % 8));
}

template <class W>
void write_quants(const Block& from, int row, int block, uint8_t* record) {
  for (int column = 0; column < kBlockLen; ++column) {
    const int lane = row % 8 * 4 + column % 16 / 4, word = row / 8 + 2 * (column / 16), byte = lane * 16 + word * 4 + column % 4;
    const int quant = from.quants[column] ^ W::offset, high = quant >> 4;
    if (W::bits == 8) {
      record[block * 512 + byte] = static_cast<uint8_t>(quant);
      continue;
    }
    record[byte] = static_cast<uint8_t>(record[byte] | (quant & 15) << 4 * block);
    uint8_t* upper = record + W::low_bytes;
    if (W::bits == 5) upper += lane * 4 + column % 4, *upper = static_cast<uint8_t>(*upper | high << (4 * block + word));
    if (W::bits == 6) upper += lane * 8 + block * 4 + column % 4, *upper = static_cast<uint8_t>(*upper | high << 2 * word);
  }
}

template <class W>
void write_scales(const Block& from, int row, int block, uint8_t* header, uint8_t* record) {
  uint8_t* scales = record + W::quant_bytes;
  const int place = row % 8, which = row / 8;
  if constexpr (W::is_k) {
    constexpr int width = W::has_min ? 4 : 2;
    std::memcpy(header + (place * width + which) * 2, from.d, 2);
    if (W::has_min) std::memcpy(header + (place * width + 2 + which) * 2, from.least, 2);
    scales[(block * 8 + place) * 4 + which] = from.small[0], scales[(block * 8 + place) * 4 + 2 + which] = from.small[1];
  } else {
    std::memcpy(scales + ((block * 8 + place) * 2 + which) * 2, from.d, 2);
    if (W::has_min) std::memcpy(scales + 64 + ((block * 8 + place) * 2 + which) * 2, from.least, 2);
  }
}

template <class W>
void pack_row(const uint8_t* raw_row, int cols, int row, uint8_t* tile) {
  for (int block = 0; block < cols / kBlockLen; ++block) {
    const Block from = read_block<W>(raw_row, block);
    uint8_t *header = tile + header_at<W>(block / 2), *record = tile + record_at<W>(block / 2);
    write_quants<W>(from, row, block % 2, record);
    write_scales<W>(from, row, block % 2, header, record);
  }
}

}  // namespace

extern "C" int64_t pyserve_cuda_packed_bytes(int64_t weight_type, int64_t rows, int64_t cols) {
  if (rows <= 0 || cols <= 0 || cols > INT32_MAX) return -1;
  return with_type(weight_type, int64_t{-1}, [&](auto tag) {
    using W = typename decltype(tag)::Type;
    return cols % W::column_multiple != 0 ? int64_t{-1} : (rows + kTileRows - 1) / kTileRows * tile_bytes<W>(static_cast<int>(cols));
  });
}

extern "C" int pyserve_cuda_pack(int64_t weight_type, const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* packed) {
  const int64_t size = pyserve_cuda_packed_bytes(weight_type, rows, cols);
  if (size < 0) return kInvalid;
  std::memset(packed, 0, static_cast<size_t>(size));
  return with_type(weight_type, kInvalid, [&](auto tag) {
    using W = typename decltype(tag)::Type;
    const int64_t row_bytes = cols / W::column_multiple * W::file_bytes;
    for (int64_t row = 0; row < rows; ++row)
      pack_row<W>(raw + row * row_bytes, static_cast<int>(cols), static_cast<int>(row % kTileRows), packed + row / kTileRows * tile_bytes<W>(static_cast<int>(cols)));
    return 0;
  });
}

}  // namespace pyserve::cuda
