// Paged attention over decode rows and prompt chunks in one call.
//
// The work is cut into tiles: up to 48 rows, where a row is one query head of one token, the tokens are neighbours in one sequence and the heads share one kv
// head. A tile walks the sequence in blocks of 64 logical positions, counted from position 0 whatever the page size, the chunk or the window. Per block it
// reads K once (transposed into scratch), multiplies all its rows with it, softens the scores with a running maximum and sum, reads V once and adds. Four
// blocks are a segment; each has sums of its own, and a row's result is those of its segments folded together from the first to the last.
//
// Exactness (R37): a score is one chain of fused products over the head's dimensions; a row's sums are, within a segment, one chain over its keys in ascending
// position; the maximum and the sum of weights of a block have one fixed tree. A key that a row does not see gets weight 0 in that tree and is left out of the
// chain, and a segment of which it sees nothing is left out of the fold. So neither the tile, the page size, the company nor the number of threads changes a
// bit of a row. It may change with the instruction set.
//
// The files: attention_deal.h (who does what), attention_simd.h and attention_product.h (vectors, products), attention_tile.h (the arithmetic in float32) or
// attention_pairs.h (by pairs of bfloat16, where the processor has such products and K and V are bfloat16), attention_walk.h (blocks, segments, folds). With
// pairs a chain has one link for two keys or dimensions, and it is the same chain in a prompt and in a decode step.
//
// A cell outside a tile's reach is never read: zeros stand for it. So what other sequences left in the pool, or nobody, cannot leak, NaN included.
//
// The tiles' segments are dealt to the members in order, by cost, every member computing the same deal for itself (attention_deal.h). Where a tile is cut
// between members, each leaves its segments' sums in the workspace, and the last to arrive folds them, in the same order as one member alone would.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "../ops.h"
#include "attention_deal.h"
#include "half.h"
#include "isa.h"

#if PYSERVE_X86
#include <immintrin.h>
#endif

namespace pyserve {
namespace {

using attention_deal::Deal;
using attention_deal::Item;
using attention_deal::key_block;
using attention_deal::max_rows;
using attention_deal::segment_blocks;

constexpr int64_t max_head_dim = 256;
alignas(64) constexpr float zeros[max_head_dim] = {};
// Stands for a cell that no row of a tile sees; zero in every type.
const uint8_t* const no_cell = reinterpret_cast<const uint8_t*>(zeros);

int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

struct Range {
  int64_t first, last;
  bool operator==(const Range& other) const { return first == other.first && last == other.last; }
};

struct Tile {
  const float* qkv;
  float* output;
  const int32_t* positions;  // [num_tokens]
  const int32_t* pages;      // of the sequence
  const uint8_t* planes;     // of page 0, this layer's K of this kv head
  int64_t num_tokens, first_head, num_heads, qkv_width, out_width, head_dim;
  int64_t page_size, page_bytes, cell_bytes, value_offset, window;
  DType type;
  float scale, softcap;

  int64_t num_rows() const { return num_tokens * num_heads; }
  const float* query(int64_t row) const { return qkv + row / num_heads * qkv_width + (first_head + row % num_heads) * head_dim; }
  float* out(int64_t row) const { return output + row / num_heads * out_width + (first_head + row % num_heads) * head_dim; }
  int64_t first_position(int64_t token) const { return window > 0 ? std::max<int64_t>(0, positions[token] - window + 1) : 0; }
  int64_t first_block() const { return first_position(0) / key_block; }
  int64_t last_block() const { return positions[num_tokens - 1] / key_block; }
  int64_t first_segment() const { return first_block() / segment_blocks; }
  int64_t last_segment() const { return last_block() / segment_blocks; }
  // The keys of a block that a token sees, as offsets in the block; empty when first >= last.
  Range keys(int64_t token, int64_t block) const {
    const int64_t start = block * key_block;
    return {std::clamp<int64_t>(first_position(token) - start, 0, key_block), std::clamp<int64_t>(positions[token] + 1 - start, 0, key_block)};
  }
  // K cells of a block that any row sees, no_cell for the rest. One division a block: it would cost more than the cell's arithmetic.
  void find_cells(int64_t block, const uint8_t** cells) const {
    const int64_t first = keys(0, block).first, last = keys(num_tokens - 1, block).last;
    if (last - first < key_block) std::fill_n(cells, key_block, no_cell);
    int64_t page = (block * key_block + first) / page_size, place = (block * key_block + first) % page_size;
    for (int64_t key = first; key < last; ++page, place = 0) {
      const uint8_t* cell = planes + pages[page] * page_bytes + place * cell_bytes;
      const int64_t end = std::min(last, key + page_size - place);
      for (; key < end; ++key, cell += cell_bytes) cells[key] = cell;
    }
  }
};

struct Ahead {  // cells to be used soon
  const uint8_t* const* cells;
  int64_t offset, cell_bytes;

  // Into the second-level cache only: the rows of pages that are a power of two apart push each other, and all else, out of the first.
  void ask_line(int64_t key, int64_t byte) const { __builtin_prefetch(cells[key] + offset + byte, 0, 2); }
  void ask_lines(int64_t first_key, int64_t byte) const {
    for (int64_t key = first_key; key < first_key + 16; ++key) ask_line(key, byte);
  }
  void ask_all() const {
    for (int64_t byte = 0; byte < cell_bytes; byte += 64) {
      for (int64_t key = 0; key < key_block; key += 16) ask_lines(key, byte);
    }
  }
};

struct Sums {  // of a tile's rows, over some of their keys
  float* largest;  // [rows] score; -infinity while none was seen
  float* weights;  // [rows, 16]: their total lies in 16 parts
  float* values;   // [rows, padded(head_dim)]
};

int64_t sums_len(int64_t num_rows, int64_t head_dim) { return padded(num_rows) + num_rows * (16 + padded(head_dim)); }

Sums sums_in(const Tile& tile, float* floats) {
  float* weights = floats + padded(tile.num_rows());
  return {floats, weights, weights + 16 * tile.num_rows()};
}

void clear(const Tile& tile, const Sums& sums) {
  std::fill_n(sums.largest, tile.num_rows(), -INFINITY);
  std::memset(sums.weights, 0, static_cast<size_t>(tile.num_rows() * (16 + padded(tile.head_dim))) * sizeof(float));
}

// Weights are sums of exponentials of which the largest is 1, unless they are NaN.
bool is_empty(const Sums& sums, int64_t row) { return sums.largest[row] == -INFINITY && sums.weights[row * 16] == 0.0f; }

float sum_of(const float* parts) {
  float lanes[8];
  for (int i = 0; i < 8; ++i) lanes[i] = parts[i] + parts[i + 8];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

struct Run {  // some segments of a tile, one member's
  Tile tile;
  Range segments;
  float* slot;  // where the sums of the tile's segments are gathered; null when all segments are this member's
  std::atomic<int32_t>* num_done;

  int64_t first_block() const { return std::max(tile.first_block(), segments.first * segment_blocks); }
  Sums part(int64_t segment) const { return sums_in(tile, slot + (segment - tile.first_segment()) * sums_len(tile.num_rows(), tile.head_dim)); }
  // Whether the `count` segments just done were the last of all: then the counter is zero again, for the next call.
  bool is_complete(int64_t count) const {
    const int64_t all = tile.last_segment() - tile.first_segment() + 1;
    if (num_done->fetch_add(static_cast<int32_t>(count), std::memory_order_acq_rel) + count < all) return false;
    num_done->store(0, std::memory_order_relaxed);
    return true;
  }
};

struct Scratch {  // some 350 KiB on the member's stack; only what the head's size needs is touched
  alignas(64) float floats[key_block * max_head_dim];
  alignas(64) float columns[max_head_dim * key_block];
  alignas(64) uint16_t halves[max_head_dim * key_block];
  alignas(64) float queries[max_rows * max_head_dim];
  alignas(64) float scores[max_rows * key_block];
  alignas(64) float total[max_rows * (1 + 16 + max_head_dim)];
  alignas(64) float part[max_rows * (1 + 16 + max_head_dim)];
  const uint8_t* cells[2][key_block];  // of this block and the next, in turn
  int turn;
};

namespace generic {
#define PYSERVE_SIMD 0
#include "attention_simd.h"
#include "attention_columns.h"
#include "attention_product.h"
#include "attention_tile.h"
#include "attention_walk.h"
#undef PYSERVE_SIMD
}  // namespace generic

#if PYSERVE_X86
PYSERVE_TARGET_BEGIN(PYSERVE_AVX2)
namespace avx2 {
#define PYSERVE_SIMD 256
#include "attention_simd.h"
#include "attention_columns.h"
#include "attention_product.h"
#include "attention_tile.h"
#include "attention_walk.h"
#undef PYSERVE_SIMD
}  // namespace avx2
PYSERVE_TARGET_END

PYSERVE_TARGET_BEGIN(PYSERVE_AVX512)
namespace avx512 {
#define PYSERVE_SIMD 512
#include "attention_simd.h"
#include "attention_columns.h"
#include "attention_product.h"
#include "attention_tile.h"
#include "attention_walk.h"
#undef PYSERVE_SIMD
}  // namespace avx512
PYSERVE_TARGET_END

PYSERVE_TARGET_BEGIN(PYSERVE_AVX512_BF16)
namespace avx512_bf16 {
#define PYSERVE_SIMD 512
#include "attention_simd.h"
#include "attention_columns.h"
#include "attention_product.h"
#include "attention_pairs.h"
#include "attention_walk.h"
#undef PYSERVE_SIMD
}  // namespace avx512_bf16
PYSERVE_TARGET_END
#endif

bool attend(const Run& run, Scratch& scratch, const Run* next) {
#if PYSERVE_X86
  if (isa() >= Isa::avx512_bf16 && run.tile.type == DType::bf16 && run.tile.head_dim % 32 == 0) return avx512_bf16::attend(run, scratch, next);
  if (isa() >= Isa::avx512) return avx512::attend(run, scratch, next);
  if (isa() == Isa::avx2) return avx2::attend(run, scratch, next);
#endif
  return generic::attend(run, scratch, next);
}

struct Job {  // one call
  const float* qkv;
  const AttentionSpec& spec;
  const Pool& pool;
  const StepRows& rows;
  const Activations& out;
  const Deal& deal;
  uint8_t* workspace;  // a counter in a cache line of its own for each slot, then the slots

  Tile tile(const Item& item) const;
  Run run(const Item& item) const;
  void fill_q8(const Tile& tile, int64_t row) const;
};

Tile Job::tile(const Item& item) const {
  Tile tile{};
  tile.head_dim = pool.head_dim;
  tile.qkv_width = (spec.num_heads + 2 * pool.num_kv_heads) * pool.head_dim;
  tile.out_width = out.width;
  tile.qkv = qkv + item.row * tile.qkv_width;
  tile.output = out.f32 + item.row * tile.out_width;
  tile.positions = rows.positions + item.row;
  tile.pages = rows.page_table + rows.sequences[item.row] * rows.page_table_width;
  tile.num_tokens = item.num_tokens;
  tile.first_head = item.first_head;
  tile.num_heads = item.num_heads;
  tile.page_size = pool.page_size;
  tile.cell_bytes = pool.head_dim * (pool.type == DType::f32 ? 4 : 2);
  const int64_t plane_bytes = pool.page_size * tile.cell_bytes;
  tile.value_offset = pool.num_kv_heads * plane_bytes;
  tile.page_bytes = pool.num_layers * 2 * tile.value_offset;
  tile.planes = pool.data + spec.layer * 2 * tile.value_offset + item.first_head / deal.group * plane_bytes;
  tile.window = spec.window;
  tile.type = pool.type;
  tile.scale = spec.scale;
  tile.softcap = spec.softcap;
  return tile;
}

Run Job::run(const Item& item) const {
  Run run{tile(item), {item.first_segment, item.end_segment}, nullptr, nullptr};
  if (item.slot < 0) return run;
  run.num_done = reinterpret_cast<std::atomic<int32_t>*>(workspace + item.slot * 64);
  run.slot = reinterpret_cast<float*>(workspace + deal.num_slots * 64) + item.slot * deal.max_segments * sums_len(deal.max_tile_rows(), pool.head_dim);
  return run;
}

// The int8 half of what the tile wrote. Heads are whole blocks of 32 columns here, else the program would not ask for it.
void Job::fill_q8(const Tile& tile, int64_t row) const {
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    const int64_t start = (row + token) * out.width + tile.first_head * tile.head_dim;
    quantise(Activations{out.f32 + start, out.q8 + start, out.q8_scale + start / 32, out.q8_sum + start / 32, tile.num_heads * tile.head_dim}, 1, Share{0, 1});
  }
}

}  // namespace

size_t attention_workspace_bytes(int64_t num_heads, const Pool& pool, const StepRows& rows, int num_members) {
  const Deal deal(num_heads, pool.num_kv_heads, 0, rows, num_members);
  if (deal.num_slots == 0 || deal.max_segments < 2) return 0;
  return static_cast<size_t>(deal.num_slots * (64 + deal.max_segments * sums_len(deal.max_tile_rows(), pool.head_dim) * int64_t{sizeof(float)}));
}

void attention(const float* qkv, const AttentionSpec& spec, const Pool& pool, const StepRows& rows, const Activations& out, uint8_t* workspace, Share share) {
  const Deal deal(spec.num_heads, pool.num_kv_heads, spec.window, rows, share.count);
  thread_local std::vector<Item> items;  // grows to the largest step and stays
  items.clear();
  deal.collect(share.index, items);
  if (items.empty()) return;
  const Job job{qkv, spec, pool, rows, out, deal, workspace};
  Scratch scratch;
  Run runs[2] = {job.run(items[0]), {}};
  scratch.turn = 0;
  runs[0].tile.find_cells(runs[0].first_block(), scratch.cells[0]);
  if (pool.head_dim % 16 != 0) std::memset(scratch.floats, 0, sizeof scratch.floats);  // the padding beside narrow heads
  for (size_t i = 0; i < items.size(); ++i) {
    const Run& run = runs[i % 2];
    Run* next = nullptr;
    if (i + 1 < items.size()) {
      next = &runs[(i + 1) % 2];
      *next = job.run(items[i + 1]);
    }
    const bool is_written = attend(run, scratch, next);
    if (is_written && out.q8 != nullptr) job.fill_q8(run.tile, items[i].row);
  }
}

}  // namespace pyserve
