// A tile's way through its blocks and segments. Included by attention.cpp only, once per kind of arithmetic, after attention_tile.h or attention_pairs.h.

// Row's scores [64] of this block -> weights, and the running maximum and sum brought up to date. Keys that the row does not see get weight 0. Returns the
// factor that what was summed before has to shrink by.
inline float soften(const Tile& tile, float* scores, Range keys, float& largest, float* weights) {
  Vec in[4];
  for (int i = 0; i < 4; ++i) {
    in[i] = capped(tile, load(scores + 16 * i));
    if (keys.first > 0 || keys.last < key_block) in[i] = within(in[i], keys.first - 16 * i, keys.last - 16 * i, -INFINITY);
  }
  const float before = largest, top = largest_of(larger(larger(in[0], in[1]), larger(in[2], in[3])));
  largest = before > top ? before : top;
  const float factor = before == largest ? 1.0f : first_of(weight_of(set(before - largest)));  // e^0 is exactly 1
  const Vec shift = set(largest);
  for (int i = 0; i < 4; ++i) in[i] = weight_of(sub(in[i], shift));
  store(weights, keep_weights(scores, in, load(weights), factor));
  return factor;
}

inline void shrink(float* values, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += 16) store(values + i, mul(load(values + i), set(factor)));
}

// cells: the block's K; next_cells: the next one's, asked for while this one's is used, and V likewise.
inline void take_block(const Tile& tile, Scratch& scratch, int64_t block, const uint8_t** cells, const uint8_t* const* next_cells, const Sums& sums) {
  const int64_t stride = padded(tile.head_dim), first = tile.keys(0, block).first / 16 * 16, last = tile.keys(tile.num_tokens - 1, block).last;
  score_keys(tile, cells, Ahead{next_cells, 0, tile.cell_bytes}, {first, (last + 15) / 16 * 16}, scratch);
  for (int64_t token = 0, row = 0; token < tile.num_tokens; ++token) {
    const Range keys = tile.keys(token, block);
    for (int64_t head = 0; head < tile.num_heads; ++head, ++row) {
      if (keys.first >= keys.last) continue;  // nothing here for this row: it must look as if the block had never been
      const float factor = soften(tile, scratch.scores + row * key_block, keys, sums.largest[row], sums.weights + row * 16);
      if (factor != 1.0f) shrink(sums.values + row * stride, stride, factor);
    }
  }
  for (int64_t key = 0; key < key_block; ++key) cells[key] += cells[key] == no_cell ? 0 : tile.value_offset;
  add_values(tile, cells, Ahead{next_cells, tile.value_offset, tile.cell_bytes}, block, scratch, sums);
}

// total = total and part together, each row's sums brought to the larger maximum. A side that saw nothing leaves the other as it is.
inline void fold(const Tile& tile, const Sums& total, const Sums& part) {
  const int64_t stride = padded(tile.head_dim), num_rows = tile.num_rows();
  for (int64_t row = 0; row < num_rows; ++row) {
    const float before = total.largest[row], other = part.largest[row];
    if (is_empty(part, row)) continue;
    const bool is_first = is_empty(total, row);
    const float largest = before > other ? before : other;
    const Vec keep = set(is_first ? 0.0f : first_of(weight_of(set(before - largest)))), take = set(is_first ? 1.0f : first_of(weight_of(set(other - largest))));
    const auto join = [&](float* to, const float* from) { store(to, fma(load(to), keep, mul(load(from), take))); };
    total.largest[row] = is_first ? other : largest;
    join(total.weights + row * 16, part.weights + row * 16);
    for (int64_t i = 0; i < stride; i += 16) join(total.values + row * stride + i, part.values + row * stride + i);
  }
}

// Blocks of one segment. `cells` holds the K of its first block and, in the end, that of `next`'s.
inline void take_segment(const Run& run, int64_t segment, Scratch& scratch, const Sums& sums, const Run* next) {
  const Tile& tile = run.tile;
  clear(tile, sums);
  const int64_t first = std::max(tile.first_block(), segment * segment_blocks), last = std::min(tile.last_block(), (segment + 1) * segment_blocks - 1);
  for (int64_t block = first; block <= last; ++block) {
    const uint8_t **cells = scratch.cells[scratch.turn], **next_cells = scratch.cells[scratch.turn ^ 1];
    scratch.turn ^= 1;
    if (block < last || segment < run.segments.last - 1) {
      tile.find_cells(block + 1, next_cells);
    } else if (next != nullptr) {
      next->tile.find_cells(next->first_block(), next_cells);
    } else {
      std::fill_n(next_cells, key_block, no_cell);
    }
    take_block(tile, scratch, block, cells, next_cells, sums);
  }
}

inline void write_out(const Tile& tile, const Sums& sums) {
  const int64_t stride = padded(tile.head_dim);
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    float* out = tile.out(row);
    const float weight = sum_of(sums.weights + row * 16);
    for (int64_t i = 0; i < tile.head_dim; ++i) out[i] = sums.values[row * stride + i] / weight;
  }
}

// Returns whether the tile's rows are written: not if others have segments of it left to do.
bool attend(const Run& run, Scratch& scratch, const Run* next) {
  const Tile& tile = run.tile;
  const auto [first, last] = run.segments;
  scale_queries(tile, scratch.queries);
  if (run.slot == nullptr) {
    const Sums total = sums_in(tile, scratch.total), part = sums_in(tile, scratch.part);
    for (int64_t segment = first; segment < last; ++segment) {
      take_segment(run, segment, scratch, segment == first ? total : part, next);
      if (segment > first) fold(tile, total, part);
    }
    write_out(tile, total);
    return true;
  }
  for (int64_t segment = first; segment < last; ++segment) take_segment(run, segment, scratch, run.part(segment), next);
  if (!run.is_complete(last - first)) return false;
  const Sums total = run.part(tile.first_segment());
  for (int64_t segment = tile.first_segment() + 1; segment <= tile.last_segment(); ++segment) fold(tile, total, run.part(segment));
  write_out(tile, total);
  return true;
}
