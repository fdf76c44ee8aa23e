// Paged attention over decode rows and prompt chunks in one call.
//
// The work is cut into tiles: up to 48 rows, where a row is one query head of one token, the tokens are neighbours in one sequence and the heads share one kv
// head. A tile walks the sequence in blocks of 64 logical positions, counted from position 0 whatever the page size, the chunk or the window. Per block it
// reads K once (transposed into scratch), multiplies all its rows with it, softens the scores with a running maximum and sum, reads V once and adds.
//
// Exactness (R37): a score is one chain of fused products over the head's dimensions; a row's sums are one chain over its keys in ascending position; the
// maximum and the sum of weights of a block have one fixed tree. A key that a row does not see gets weight 0 in that tree and is left out of the chain.
// So neither the tile, the page size, the company nor the number of threads changes a bit of a row. It may change with the instruction set.
//
// A cell outside a tile's reach is never read: zeros stand for it. So what other sequences left in the pool, or nobody, cannot leak, NaN included.
//
// The tiles are dealt to the members in order, by cost (blocks times rows, plus what loading a block costs), every member computing the same deal for itself.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../ops.h"
#include "half.h"
#include "isa.h"

#if PYSERVE_X86
#include <immintrin.h>
#endif

namespace pyserve {
namespace {

constexpr int64_t key_block = 64, max_rows = 48, max_head_dim = 256;
constexpr int64_t load_cost = 5;  // what reading a block of K and V costs, in rows: measured, 1050 ns against 200 ns a row
alignas(64) constexpr float zeros[max_head_dim] = {};
// Stands for a cell that no row of a tile sees; zero in every type.
const uint8_t* const no_cell = reinterpret_cast<const uint8_t*>(zeros);

int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

struct Range {
  int64_t first, last;
  bool operator==(const Range& other) const { return first == other.first && last == other.last; }
};

struct RowState {
  float largest, sum;
};

struct Scratch {  // some 250 KiB on the member's stack; only what the head's size needs is touched
  alignas(64) float floats[key_block * max_head_dim];
  alignas(64) float columns[max_head_dim * key_block];
  alignas(64) float queries[max_rows * max_head_dim];
  alignas(64) float sums[max_rows * max_head_dim];
  alignas(64) float scores[max_rows * key_block];
  RowState state[max_rows];
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

  const float* query(int64_t row) const { return qkv + row / num_heads * qkv_width + (first_head + row % num_heads) * head_dim; }
  float* out(int64_t row) const { return output + row / num_heads * out_width + (first_head + row % num_heads) * head_dim; }
  int64_t first_position(int64_t token) const { return window > 0 ? std::max<int64_t>(0, positions[token] - window + 1) : 0; }
  int64_t first_block() const { return first_position(0) / key_block; }
  int64_t last_block() const { return positions[num_tokens - 1] / key_block; }
  // The keys of a block that a token sees, as offsets in the block; empty when first >= last.
  Range keys(int64_t token, int64_t block) const {
    const int64_t start = block * key_block;
    return {std::clamp<int64_t>(first_position(token) - start, 0, key_block), std::clamp<int64_t>(positions[token] + 1 - start, 0, key_block)};
  }
  // K cells of a block that any row sees, no_cell for the rest. One division a block: it would cost more than the cell's arithmetic.
  void find_cells(int64_t block, const uint8_t** cells) const {
    const int64_t first = keys(0, block).first, last = keys(num_tokens - 1, block).last;
    std::fill_n(cells, key_block, no_cell);
    int64_t page = (block * key_block + first) / page_size, place = (block * key_block + first) % page_size;
    for (int64_t key = first; key < last; ++key) {
      cells[key] = planes + pages[page] * page_bytes + place * cell_bytes;
      if (++place < page_size) continue;
      place = 0;
      ++page;
    }
  }
  void prefetch(const uint8_t* const* cells) const {
    for (int64_t key = 0; key < key_block; ++key) {
      for (int64_t line = 0; line < cell_bytes; line += 64) __builtin_prefetch(cells[key] + line);
    }
  }
};

namespace generic {
#define PYSERVE_SIMD 0
#include "attention_simd.h"
#include "attention_tile.h"
#undef PYSERVE_SIMD
}  // namespace generic

#if PYSERVE_X86
PYSERVE_TARGET_BEGIN(PYSERVE_AVX2)
namespace avx2 {
#define PYSERVE_SIMD 256
#include "attention_simd.h"
#include "attention_tile.h"
#undef PYSERVE_SIMD
}  // namespace avx2
PYSERVE_TARGET_END

PYSERVE_TARGET_BEGIN(PYSERVE_AVX512)
namespace avx512 {
#define PYSERVE_SIMD 512
#include "attention_simd.h"
#include "attention_tile.h"
#undef PYSERVE_SIMD
}  // namespace avx512
PYSERVE_TARGET_END
#endif

void attend(const Tile& tile, Scratch& scratch) {
#if PYSERVE_X86
  if (isa() == Isa::avx512) return avx512::attend(tile, scratch);
  if (isa() == Isa::avx2) return avx2::attend(tile, scratch);
#endif
  generic::attend(tile, scratch);
}

struct Job {  // one call
  const float* qkv;
  const AttentionSpec& spec;
  const Pool& pool;
  const StepRows& rows;
  const Activations& out;
  int64_t group, tile_heads, tile_tokens;

  Job(const float* qkv, const AttentionSpec& spec, const Pool& pool, const StepRows& rows, const Activations& out)
      : qkv(qkv), spec(spec), pool(pool), rows(rows), out(out), group(spec.num_heads / pool.num_kv_heads) {
    tile_heads = std::min(group, max_rows);
    tile_tokens = max_rows / tile_heads;
  }

  // Rows of the tile that starts at `row`: neighbours of one sequence.
  int64_t tokens_from(int64_t row) const {
    int64_t end = row + 1;
    while (end < rows.num_rows && end - row < tile_tokens && rows.sequences[end] == rows.sequences[row]) ++end;
    return end - row;
  }
  int64_t parts_of_group() const { return (group + tile_heads - 1) / tile_heads; }
  int64_t cost(int64_t row, int64_t num_tokens) const {
    const int64_t last = rows.positions[row + num_tokens - 1];
    const int64_t first = spec.window > 0 ? std::max<int64_t>(0, rows.positions[row] - spec.window + 1) : 0;
    return (last / key_block - first / key_block + 1) * (num_tokens * tile_heads + load_cost);
  }
  Tile tile(int64_t row, int64_t num_tokens, int64_t kv_head, int64_t part) const;
  void fill_q8(const Tile& tile, int64_t row) const;
};

Tile Job::tile(int64_t row, int64_t num_tokens, int64_t kv_head, int64_t part) const {
  Tile tile{};
  tile.head_dim = pool.head_dim;
  tile.qkv_width = (spec.num_heads + 2 * pool.num_kv_heads) * pool.head_dim;
  tile.out_width = out.width;
  tile.qkv = qkv + row * tile.qkv_width;
  tile.output = out.f32 + row * tile.out_width;
  tile.positions = rows.positions + row;
  tile.pages = rows.page_table + rows.sequences[row] * rows.page_table_width;
  tile.num_tokens = num_tokens;
  tile.first_head = kv_head * group + part * tile_heads;
  tile.num_heads = std::min(tile_heads, group - part * tile_heads);
  tile.page_size = pool.page_size;
  tile.cell_bytes = pool.head_dim * (pool.type == DType::f32 ? 4 : 2);
  const int64_t plane_bytes = pool.page_size * tile.cell_bytes;
  tile.value_offset = pool.num_kv_heads * plane_bytes;
  tile.page_bytes = pool.num_layers * 2 * tile.value_offset;
  tile.planes = pool.data + spec.layer * 2 * tile.value_offset + kv_head * plane_bytes;
  tile.window = spec.window;
  tile.type = pool.type;
  tile.scale = spec.scale;
  tile.softcap = spec.softcap;
  return tile;
}

// The int8 half of what the tile wrote. Heads are whole blocks of 32 columns here, else the program would not ask for it.
void Job::fill_q8(const Tile& tile, int64_t row) const {
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    const int64_t start = (row + token) * out.width + tile.first_head * tile.head_dim;
    quantise(Activations{out.f32 + start, out.q8 + start, out.q8_scale + start / 32, out.q8_sum + start / 32, tile.num_heads * tile.head_dim}, 1, Share{0, 1});
  }
}

}  // namespace

void attention(const float* qkv, const AttentionSpec& spec, const Pool& pool, const StepRows& rows, const Activations& out, Share share) {
  const Job job(qkv, spec, pool, rows, out);
  const int64_t parts = job.parts_of_group(), tiles_per_row = pool.num_kv_heads * parts;
  int64_t total = 0;
  for (int64_t row = 0; row < rows.num_rows; row += job.tokens_from(row)) total += job.cost(row, job.tokens_from(row)) * tiles_per_row;
  Scratch scratch;
  int64_t before = 0;
  for (int64_t row = 0; row < rows.num_rows;) {
    const int64_t num_tokens = job.tokens_from(row), cost = job.cost(row, num_tokens);
    for (int64_t i = 0; i < tiles_per_row; ++i, before += cost) {
      if ((before + cost / 2) * share.count / total != share.index) continue;  // another member's: the tile's middle decides
      const Tile tile = job.tile(row, num_tokens, i / parts, i % parts);
      attend(tile, scratch);
      if (out.q8 != nullptr) job.fill_q8(tile, row);
    }
    row += num_tokens;
  }
}

}  // namespace pyserve
