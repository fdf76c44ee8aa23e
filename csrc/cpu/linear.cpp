// Products of a step's rows with packed weights.
//
// The work is a grid of row blocks by weight tiles; a share is a contiguous part of it, row block by row block, so a matrix is read once per row block and
// one row's product is cut by outputs alone. Inside an item the tile, in the nearest cache after its first use, serves the row block a few rows at a time.
// Activations of quantised products are first copied to the order in which the kernel reads them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "linear_kernels.h"

namespace pyserve {

const LinearKernels& linear_kernels() {
#if PYSERVE_X86
  if (isa() == Isa::avx512) return kAvx512Kernels;
  if (isa() == Isa::avx2) return kAvx2Kernels;
#endif
  return kGenericKernels;
}

namespace {

constexpr int64_t kRowBlockBytes = 256 << 10;  // activations of a row block: they and a weight tile stay in the second-level cache

struct Output {
  const float* bias;
  float* out;
  int64_t stride, rows;  // rows of the weight matrix
  bool accumulate;
};

// products [M, 16] of tile `tile` -> out. `width` is 16 but for the last tile; where the compiler sees that it is, it uses vectors.
inline __attribute__((always_inline)) void store_rows(const Output& to, const float* products, int64_t n, int width, int64_t first_row, int num_rows) {
  float* out = to.out + first_row * to.stride + n;
  for (int m = 0; m < num_rows; ++m, products += kTileRows, out += to.stride) {
    float row[kTileRows];
    std::memcpy(row, products, sizeof row);
    if (to.bias)
      for (int i = 0; i < width; ++i) row[i] += to.bias[n + i];
    if (to.accumulate)
      for (int i = 0; i < width; ++i) row[i] += out[i];
    std::memcpy(out, row, size_t(width) * sizeof *out);
  }
}

void store_tile(const Output& to, const float* products, int64_t tile, int64_t first_row, int num_rows) {
  const int64_t n = tile * kTileRows;
  if (to.rows - n >= kTileRows) {
    store_rows(to, products, n, kTileRows, first_row, num_rows);
  } else {
    store_rows(to, products, n, int(to.rows - n), first_row, num_rows);
  }
}

int32_t sum_of(const int8_t* q8, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += q8[i];
  return sum;
}

// Rows [first, first + M) in the kernel's order; see kActivationBlockBytes.
void arrange(const Activations& x, Format format, int64_t first, int num_rows, uint8_t* out) {
  const int64_t num_blocks = x.width / kBlock;
  for (int64_t b = 0; b < num_blocks; ++b, out += num_rows * kActivationBlockBytes) {
    auto* scale = (float*)(out + num_rows * kBlock);
    for (int m = 0; m < num_rows; ++m) {
      const int8_t* q8 = x.q8 + (first + m) * x.width + b * kBlock;
      const int64_t at = (first + m) * num_blocks + b;
      std::memcpy(out + m * kBlock, q8, kBlock);
      scale[m] = x.q8_scale[at];
      if (format.has_min()) {
        scale[num_rows + m] = x.q8_scale[at] * float(x.q8_sum[at]);
        continue;
      }
      const int32_t first_half = format.scales == Scales::k_halves ? sum_of(q8, kBlock / 2) : x.q8_sum[at];
      const int32_t offsets[] = {-format.offset * first_half, -format.offset * (x.q8_sum[at] - first_half)};
      std::memcpy(scale + num_rows + m, offsets, 4);
      std::memcpy(scale + 2 * num_rows + m, offsets + 1, 4);
    }
  }
}

// A row block in the kernel's order, as one thread keeps it from part to part of a call, and from weight to weight that read the same rows.
struct Arranged {
  std::vector<uint8_t> bytes;  // grows to the widest row block and stays
  uint64_t call = 0;
  const int8_t* q8 = nullptr;
  int64_t first = -1;
  Scales scales{};
  int offset = 0;

  bool holds(uint64_t now, const Activations& x, int64_t row, Format format) const {
    return now != 0 && call == now && q8 == x.q8 && first == row && scales == format.scales && offset == format.offset;
  }
};

struct Grid {
  int64_t num_rows, rows_per_block, num_tiles;
  int tile_m;
  int64_t num_items() const { return ceil_div(num_rows, rows_per_block) * num_tiles; }
};

Grid grid_for(const PackedWeight& weight, int64_t num_rows, int64_t row_bytes, int tile_m) {
  const int64_t fitting = std::clamp<int64_t>(kRowBlockBytes / std::max<int64_t>(row_bytes, 1), tile_m, 64);
  return {num_rows, fitting / tile_m * tile_m, ceil_div(weight.rows, kTileRows), tile_m};
}

// begin_block(first row, rows) at each row block of the share, then product(tile, row within the block, rows, out [rows, 16]) for its tiles.
template <class BeginBlock, class Product>
void for_each_item(const Grid& grid, const Output& to, Share share, BeginBlock&& begin_block, Product&& product) {
  const Range part = part_of(grid.num_items(), share);
  int64_t current = -1, first = 0, rows = 0;
  alignas(64) float products[kMaxTileM * kTileRows];
  for (int64_t item = part.begin; item < part.end; ++item) {
    const int64_t block = item / grid.num_tiles, tile = item % grid.num_tiles;
    if (block != current) {
      current = block;
      first = block * grid.rows_per_block;
      rows = std::min(grid.rows_per_block, grid.num_rows - first);
      begin_block(first, rows);
    }
    for (int64_t m = 0; m < rows; m += grid.tile_m) {
      const int count = int(std::min<int64_t>(grid.tile_m, rows - m));
      product(tile, m, count, products);
      store_tile(to, products, tile, first + m, count);
    }
  }
}

void quantised_linear(const PackedWeight& weight, const Activations& x, const Output& to, int64_t num_rows, Share share) {
  const LinearKernels& kernels = linear_kernels();
  const Format format = format_of(weight.type);
  const int64_t num_blocks = weight.cols / kBlock, row_bytes = num_blocks * kActivationBlockBytes, stride = tile_bytes(weight.type, weight.cols);
  const Grid grid = grid_for(weight, num_rows, row_bytes, kernels.max_tile_m);
  const auto* by_rows = kernels.quantised[int(weight.type) - int(WeightType::q8_0)];
  thread_local Arranged arranged;
  if (arranged.bytes.size() < size_t(grid.rows_per_block * row_bytes)) arranged.bytes.resize(size_t(grid.rows_per_block * row_bytes));
  for_each_item(
      grid, to, share,
      [&](int64_t first, int64_t rows) {
        if (arranged.holds(share.call, x, first, format)) return;
        for (int64_t m = 0; m < rows; m += grid.tile_m)
          arrange(x, format, first + m, int(std::min<int64_t>(grid.tile_m, rows - m)), arranged.bytes.data() + m * row_bytes);
        arranged.call = share.call, arranged.q8 = x.q8, arranged.first = first, arranged.scales = format.scales, arranged.offset = format.offset;
      },
      [&](int64_t tile, int64_t m, int count, float* products) {
        by_rows[count - 1](weight.data + tile * stride, num_blocks, arranged.bytes.data() + m * row_bytes, products);
      });
}

void float_linear(const PackedWeight& weight, const Activations& x, const Output& to, int64_t num_rows, Share share) {
  const LinearKernels& kernels = linear_kernels();
  const int64_t stride = tile_bytes(weight.type, weight.cols);
  const Grid grid = grid_for(weight, num_rows, weight.cols * 4, kernels.max_tile_m);
  const auto* by_rows = kernels.floats[int(weight.type)];
  const float* block = nullptr;
  for_each_item(
      grid, to, share, [&](int64_t first, int64_t) { block = x.f32 + first * x.width; },
      [&](int64_t tile, int64_t m, int count, float* products) {
        by_rows[count - 1](weight.data + tile * stride, weight.cols, block + m * x.width, x.width, products);
      });
}

}  // namespace

void linear(const PackedWeight& weight, const Activations& x, const float* bias, float* out, int64_t out_stride, int64_t num_rows, bool accumulate,
            Share share) {
  const Output to{bias, out, out_stride, weight.rows, accumulate};
  if (format_of(weight.type).is_float()) {
    float_linear(weight, x, to, num_rows, share);
  } else {
    quantised_linear(weight, x, to, num_rows, share);
  }
}

void quantise(const Activations& x, int64_t num_rows, Share share) {
  const int64_t per_row = x.width / kBlock;
  const Range part = part_of(num_rows * per_row, share);  // rows follow one another, and so do their blocks
  linear_kernels().quantise(x.f32 + part.begin * kBlock, (part.end - part.begin) * kBlock, x.q8 + part.begin * kBlock, x.q8_scale + part.begin,
                            x.q8_sum + part.begin);
}

}  // namespace pyserve
