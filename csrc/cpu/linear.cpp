// Products of a step's rows with packed weights.
//
// The work is a grid of row blocks by weight tiles, those of all matrices in one line; a share is a contiguous part of it, row block by row block, so a
// matrix is read once per row block and one row's product is cut by outputs alone. Inside an item the tile, in the nearest cache after its first use, serves
// the row block a few rows at a time. Activations of quantised products are first copied to the order in which the kernel reads them.
//
// With few rows the weights' way from memory is what takes the time. So each tile is told where the one after it lies, at the end of a share that of the
// thread's next product, and asks for its beginning.
#include <algorithm>
#include <cstring>
#include <vector>

#include "linear_kernels.h"

namespace pyserve {

const LinearKernels& linear_kernels() {
#if PYSERVE_X86
  if (isa() >= Isa::avx512) return kAvx512Kernels;
  if (isa() == Isa::avx2) return kAvx2Kernels;
#endif
  return kGenericKernels;
}

namespace {

constexpr int64_t kLargestTileAhead = 256 << 10, kNear = 8 << 10;
constexpr int64_t kRowBlockBytes = 256 << 10;  // activations of a row block: they and a weight tile stay in the second-level cache

struct Output {
  const float* bias;
  float* out;  // the matrix's first column
  int64_t stride, rows;  // rows of the weight matrix
  bool accumulate;
};

// kernel(where to put a tile's outputs) for rows from `first_row` on. The last tile's may stand out over the matrix: then they go through a buffer.
template <class Kernel>
void put_tile(const Output& to, int64_t tile, int64_t first_row, int num_rows, Kernel&& kernel) {
  const int64_t n = tile * kTileRows, width = to.rows - n;
  float* out = to.out + first_row * to.stride + n;
  if (width >= kTileRows) return kernel(TileOutput{out, to.stride, to.bias == nullptr ? nullptr : to.bias + n, to.accumulate});
  alignas(64) float products[kMaxTileM * kTileRows];
  kernel(TileOutput{products, kTileRows, nullptr, false});
  for (int m = 0; m < num_rows; ++m, out += to.stride) {
    for (int i = 0; i < width; ++i) {
      float value = products[m * kTileRows + i];
      if (to.bias != nullptr) value += to.bias[n + i];
      if (to.accumulate) value += out[i];
      out[i] = value;
    }
  }
}

int32_t sum_of(const int8_t* q8, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += q8[i];
  return sum;
}

// Rows [first, first + M) in the kernel's order; see kActivationBlockBytes.
template <Scales scales>
void arrange_as(const Activations& x, int offset, int64_t first, int num_rows, uint8_t* out) {
  const int64_t num_blocks = x.width / kBlock;
  for (int m = 0; m < num_rows; ++m) {
    const int8_t* q8 = x.q8 + (first + m) * x.width;
    const float* scale = x.q8_scale + (first + m) * num_blocks;
    const int32_t* sum = x.q8_sum + (first + m) * num_blocks;
    uint8_t* to = out + m * kBlock;
    uint8_t* small = out + num_rows * kBlock + m * 4;
    for (int64_t b = 0; b < num_blocks; ++b, q8 += kBlock, to += num_rows * kActivationBlockBytes, small += num_rows * kActivationBlockBytes) {
      std::memcpy(to, q8, kBlock);
      std::memcpy(small, scale + b, 4);
      if constexpr (scales == Scales::half_min) {
        const float product = scale[b] * float(sum[b]);
        std::memcpy(small + num_rows * 4, &product, 4);
      } else {
        const int32_t first_half = scales == Scales::k_halves ? sum_of(q8, kBlock / 2) : sum[b];
        const int32_t offsets[] = {-offset * first_half, -offset * (sum[b] - first_half)};
        std::memcpy(small + num_rows * 4, offsets, 4);
        std::memcpy(small + num_rows * 8, offsets + 1, 4);
      }
    }
  }
}

void arrange(const Activations& x, Format format, int64_t first, int num_rows, uint8_t* out) {
  if (format.has_min()) return arrange_as<Scales::half_min>(x, format.offset, first, num_rows, out);
  if (format.scales == Scales::k_halves) return arrange_as<Scales::k_halves>(x, format.offset, first, num_rows, out);
  arrange_as<Scales::half>(x, format.offset, first, num_rows, out);
}

// A row block in the kernel's order, as one thread keeps it from tile to tile, from part to part of a call, and from weight to weight that read the same rows.
struct Arranged {
  std::vector<uint8_t> bytes;  // grows to the widest row block and stays
  uint64_t call = 0;
  const int8_t* q8 = nullptr;
  int64_t first = -1;
  Scales scales{};
  int offset = 0;

  void begin(uint64_t now) {
    if (now == 0 || now != call) first = -1;
    call = now;
  }
  bool holds(const Activations& x, int64_t row, Format format) const {
    return q8 == x.q8 && first == row && scales == format.scales && offset == format.offset;
  }
};

// f(first, count, group, num_groups) over `rows` rows in as few groups of at most `largest` as there can be, all about as large: small ones waste more than
// they save.
template <class Function>
void for_each_group(int64_t rows, int largest, Function&& f) {
  const int64_t num_groups = ceil_div(rows, largest);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = rows * group / num_groups;
    f(first, int(rows * (group + 1) / num_groups - first), group, num_groups);
  }
}

int64_t row_bytes_of(const PackedWeight& weight) {
  return format_of(weight.type).is_float() ? weight.cols * int64_t{sizeof(float)} : weight.cols / kBlock * kActivationBlockBytes;
}

struct Grid {
  const Product* products;
  int num_products, tile_m;
  int64_t num_rows, rows_per_block, num_tiles = 0;  // of all products

  // Row blocks as few and as even as fit.
  Grid(const Product* products, int num_products, int64_t num_rows)
      : products(products), num_products(num_products), tile_m(linear_kernels().max_tile_m), num_rows(num_rows) {
    int64_t row_bytes = 1;
    for (int i = 0; i < num_products; ++i) {
      num_tiles += ceil_div(products[i].weight.rows, kTileRows);
      row_bytes = std::max(row_bytes, row_bytes_of(products[i].weight));
    }
    const int64_t fitting = std::clamp<int64_t>(kRowBlockBytes / row_bytes, tile_m, 64) / tile_m * tile_m;
    rows_per_block = ceil_div(num_rows, ceil_div(num_rows, fitting));
  }

  int64_t num_items() const { return ceil_div(num_rows, rows_per_block) * num_tiles; }
  // The product that tile `tile` of the line belongs to; `tile` becomes its own, `column` where its outputs begin.
  const Product& find(int64_t& tile, int64_t& column) const {
    column = 0;
    for (int i = 0;; ++i) {
      const int64_t tiles = ceil_div(products[i].weight.rows, kTileRows);
      if (tile < tiles) return products[i];
      tile -= tiles, column += products[i].weight.rows;
    }
  }
  const uint8_t* address(int64_t tile) const {
    int64_t column;
    const PackedWeight& weight = find(tile, column).weight;
    return weight.data + tile * tile_bytes(weight.type, weight.cols);
  }
};

// While a tile serves one group of rows after the other, the next one is on its way: each group asks for a part of it, so that memory is busy all the time. A
// tile that would push itself out of the second-level cache so is asked for a little ahead instead.
struct Asking {
  const uint8_t *tile, *next;
  int64_t bytes;  // of a tile
  int64_t steps;  // blocks, or pairs of columns

  Ahead part(int64_t group, int64_t num_groups) const {
    const int64_t lines = ceil_div(bytes, 64 * steps);
    if (bytes > kLargestTileAhead) return {tile + kNear, int(lines)};
    const int64_t passes = num_groups * linear_kernels().num_passes;
    return {next + bytes * group / num_groups, int(ceil_div(lines, passes))};
  }
};

// Rows [first, first + rows) times one tile; `next` is read after it.
void multiply_floats(const PackedWeight& weight, int64_t tile, const uint8_t* next, const Activations& x, const Output& to, int64_t first, int64_t rows) {
  const LinearKernels& kernels = linear_kernels();
  const uint8_t* data = weight.data + tile * tile_bytes(weight.type, weight.cols);
  const Asking asking{data, next, tile_bytes(weight.type, weight.cols), ceil_div(weight.cols, 2)};
  for_each_group(rows, kernels.max_tile_m, [&](int64_t m, int count, int64_t group, int64_t num_groups) {
    put_tile(to, tile, first + m, count, [&](const TileOutput& out) {
      kernels.floats[int(weight.type)][count - 1](data, asking.part(group, num_groups), weight.cols, x.f32 + (first + m) * x.width, x.width, out);
    });
  });
}

void multiply_quantised(const PackedWeight& weight, int64_t tile, const uint8_t* next, const Activations& x, const Output& to, int64_t first, int64_t rows,
                        Arranged& arranged) {
  const LinearKernels& kernels = linear_kernels();
  const Format format = format_of(weight.type);
  const int64_t num_blocks = weight.cols / kBlock, row_bytes = num_blocks * kActivationBlockBytes;
  const auto* by_rows = kernels.quantised[int(weight.type) - int(WeightType::q8_0)];
  const uint8_t* data = weight.data + tile * tile_bytes(weight.type, weight.cols);
  if (!arranged.holds(x, first, format)) {
    arranged.bytes.resize(std::max(arranged.bytes.size(), size_t(rows * row_bytes)));
    for_each_group(rows, kernels.max_tile_m, [&](int64_t m, int count, int64_t, int64_t) {
      arrange(x, format, first + m, count, arranged.bytes.data() + m * row_bytes);
    });
    arranged.q8 = x.q8, arranged.first = first, arranged.scales = format.scales, arranged.offset = format.offset;
  }
  const Asking asking{data, next, tile_bytes(weight.type, weight.cols), num_blocks};
  for_each_group(rows, kernels.max_tile_m, [&](int64_t m, int count, int64_t group, int64_t num_groups) {
    put_tile(to, tile, first + m, count, [&](const TileOutput& out) {
      by_rows[count - 1](data, asking.part(group, num_groups), num_blocks, arranged.bytes.data() + m * row_bytes, out);
    });
  });
}

}  // namespace

void linear(const Product* products, int num_products, const Activations& x, float* out, int64_t out_stride, int64_t num_rows, bool accumulate, Share share) {
  thread_local Arranged arranged;
  arranged.begin(share.call);
  const Grid grid(products, num_products, num_rows);
  const Range part = part_of(grid.num_items(), share);
  for (int64_t item = part.begin; item < part.end; ++item) {
    const int64_t first = item / grid.num_tiles * grid.rows_per_block, rows = std::min(grid.rows_per_block, num_rows - first);
    const bool is_last = item + 1 == part.end && share.next != nullptr;
    const uint8_t* next = is_last ? share.next : grid.address((item + 1) % grid.num_tiles);
    int64_t tile = item % grid.num_tiles, column;
    const auto& [weight, bias] = grid.find(tile, column);
    const Output to{bias, out + column, out_stride, weight.rows, accumulate};
    if (format_of(weight.type).is_float()) {
      multiply_floats(weight, tile, next, x, to, first, rows);
    } else {
      multiply_quantised(weight, tile, next, x, to, first, rows, arranged);
    }
  }
}

const uint8_t* linear_start(const Product* products, int num_products, int64_t num_rows, Share share) {
  const Grid grid(products, num_products, num_rows);
  return grid.address(part_of(grid.num_items(), share).begin % grid.num_tiles);
}

void quantise(const Activations& x, int64_t num_rows, Share share) {
  const int64_t per_row = x.width / kBlock;
  const Range part = part_of(num_rows * per_row, share);  // rows follow one another, and so do their blocks
  linear_kernels().quantise(x.f32 + part.begin * kBlock, (part.end - part.begin) * kBlock, x.q8 + part.begin * kBlock, x.q8_scale + part.begin,
                            x.q8_sum + part.begin);
}

}  // namespace pyserve
