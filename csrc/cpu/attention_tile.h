// One tile of attention. Included by attention.cpp only, once per instruction set, after attention_columns.h (see there).

#if PYSERVE_SIMD == 512
constexpr int row_block = 6, col_block = 4;  // 24 of 32 registers hold sums
#else
constexpr int row_block = 3, col_block = 2;  // 12 of 16
#endif

// Left sides of a product: factor of row `i` and line `k`.
struct Queries {  // transposed
  const float* at;
  int64_t num_rows;
  float operator()(int64_t i, int64_t k) const { return at[k * num_rows + i]; }
  Queries from(int64_t row) const { return {at + row, num_rows}; }
};
struct Weights {
  const float* at;
  float operator()(int64_t i, int64_t k) const { return at[i * key_block + k]; }
  Weights from(int64_t row) const { return {at + row * key_block}; }
};

template <DType type>
Vec load_as(const void* x, int64_t i) {
  if constexpr (type == DType::f32) return load(static_cast<const float*>(x) + i);
  const uint16_t* half = static_cast<const uint16_t*>(x) + i;
  return type == DType::f16 ? load_f16(half) : load_bf16(half);
}

// Right sides: 16 columns, the j-th from `col` on, of line `k`. Those that read 16-bit values ask for the next block's as they go, a little at each step:
// asked for all at once they would hold up everything behind them.
template <DType type>
struct Columns {
  const void* at;
  int64_t head_dim;
  Ahead ahead;
  Vec operator()(int64_t k, int64_t j) const {
    if (type != DType::f32 && j == 0 && k < key_block) {
      ahead.ask_line(k, 0);
      ahead.ask_line(k, 64);
    }
    return load_as<type>(at, (j * head_dim + k) * 16);
  }
  Columns from(int64_t col) const { return {static_cast<const uint8_t*>(at) + col * head_dim * (type == DType::f32 ? 4 : 2), head_dim, ahead}; }
};
template <DType type>
struct Cells {
  const uint8_t* const* lines;
  Ahead ahead;
  int64_t col;
  Vec operator()(int64_t k, int64_t j) const {
    if (type != DType::f32 && j % 2 == 0) ahead.ask_line(k, 2 * col + 32 * j);
    return load_as<type>(lines[k], col + 16 * j);
  }
  Cells from(int64_t at) const { return {lines, ahead, col + at}; }
};

struct Product {  // c[row, col] (+)= sum over k in `lines` of a(row, k) * b(k, col), for num_rows rows and the columns in `cols`
  float* c;
  int64_t c_stride, num_rows;
  Range cols, lines;
  bool from_zero;
};

// `rows` rows and 16 * `cols` columns. Each sum is one chain in ascending k, so how the work is cut into blocks changes no bit.
template <int rows, int cols, class Left, class Right>
void multiply_block(const Product& p, float* c, Left a, Right b) {
  const int64_t c_stride = p.c_stride, last = p.lines.last;
  Vec sum[rows][cols];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) sum[i][j] = p.from_zero ? set(0.0f) : load(c + i * c_stride + 16 * j);
  }
#pragma GCC unroll 2
  for (int64_t k = p.lines.first; k < last; ++k) {
    Vec in[cols];
    for (int j = 0; j < cols; ++j) in[j] = b(k, j);
    for (int i = 0; i < rows; ++i) {
      const Vec factor = set(a(i, k));
      for (int j = 0; j < cols; ++j) sum[i][j] = fma(factor, in[j], sum[i][j]);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) store(c + i * c_stride + 16 * j, sum[i][j]);
  }
}

template <int rows, class Left, class Right>
void multiply_rows(const Product& p, int64_t row, const Left& all, const Right& b) {
  const Left a = all.from(row);
  float* c = p.c + row * p.c_stride;
  int64_t col = p.cols.first;
  for (; col + 16 * col_block <= p.cols.last; col += 16 * col_block) multiply_block<rows, col_block>(p, c + col, a, b.from(col));
  for (; col < p.cols.last; col += 16) multiply_block<rows, 1>(p, c + col, a, b.from(col));
}

template <class Left, class Right>
void multiply(const Product& p, const Left& a, const Right& b) {
  int64_t row = 0;
  for (; row + row_block <= p.num_rows; row += row_block) multiply_rows<row_block>(p, row, a, b);
  switch (p.num_rows - row) {
#if PYSERVE_SIMD == 512
    case 5: return multiply_rows<5>(p, row, a, b);
    case 4: return multiply_rows<4>(p, row, a, b);
    case 3: return multiply_rows<3>(p, row, a, b);
#endif
    case 2: return multiply_rows<2>(p, row, a, b);
    case 1: return multiply_rows<1>(p, row, a, b);
  }
}

// Few rows take 16-bit values as they are, converting at each use; for many it pays to convert once.
inline bool is_small(const Tile& tile) { return tile.num_rows() <= 2 * row_block; }

// Whether K is transposed in 16 bits; then dimension i of queries and columns stands at place_of(i), and products go through them in that order.
inline bool has_half_columns(const Tile& tile) { return PYSERVE_SIMD == 512 && tile.type != DType::f32 && tile.head_dim % 32 == 0; }
inline int64_t place_of(int64_t i) { return i / 32 * 32 + (i % 32 / 16 * 8 + i % 8) * 2 + i / 8 % 2; }

#if PYSERVE_SIMD == 512
template <DType type>
void multiply_halves(const Tile& tile, const Product& product, const Queries& queries, const Ahead& ahead, Scratch& scratch) {
  if (is_small(tile)) return multiply(product, queries, Columns<type>{scratch.halves, tile.head_dim, ahead});
  const int64_t first = product.cols.first * tile.head_dim, last = product.cols.last * tile.head_dim;
  for (int64_t i = first; i < last; i += 16) store(scratch.columns + i, load_as<type>(scratch.halves, i));
  multiply(product, queries, Columns<DType::f32>{scratch.columns, tile.head_dim, ahead});
}
#endif

// scores [rows][64] of the keys in `chunks`, a range in steps of 16
inline void score_keys(const Tile& tile, const uint8_t* const* cells, const Ahead& ahead, Range chunks, Scratch& scratch) {
  const int64_t head_dim = tile.head_dim, num_rows = tile.num_rows();
  const Product product{scratch.scores, key_block, num_rows, chunks, {0, head_dim}, true};
  const Queries queries{scratch.queries, num_rows};
#if PYSERVE_SIMD == 512
  if (has_half_columns(tile)) {
    if (!is_small(tile) || head_dim < key_block) ahead.ask_all();
    for (int64_t key = chunks.first; key < chunks.last; key += 16) {
      for (int64_t i = 0; i < head_dim; i += 32) {
        if (i >= 64) ahead.ask_lines(key, 2 * i);  // the product asks for the first 64 dimensions
        transpose_halves(cells + key, i, scratch.halves + key * head_dim);
      }
    }
    if (tile.type == DType::f16) return multiply_halves<DType::f16>(tile, product, queries, ahead, scratch);
    return multiply_halves<DType::bf16>(tile, product, queries, ahead, scratch);
  }
#endif
  ahead.ask_all();
#if PYSERVE_SIMD == 512
  if (tile.type == DType::f32 && head_dim % 16 == 0) {
    for (int64_t key = chunks.first; key < chunks.last; key += 16) {
      for (int64_t i = 0; i < head_dim; i += 16) transpose_16(cells + key, i, scratch.columns + key * head_dim);
    }
    return multiply(product, queries, Columns<DType::f32>{scratch.columns, head_dim, ahead});
  }
#endif
  const uint8_t* rows[key_block];
  as_floats(tile, cells, scratch.floats, rows);
  transpose(rows, head_dim, scratch.columns);
  multiply(product, queries, Columns<DType::f32>{scratch.columns, head_dim, ahead});
}

// Row's scores [64] of this block -> weights, and the running maximum and sum brought up to date. Keys that the row does not see get weight 0. Returns the
// factor that what was summed before has to shrink by.
inline float soften(const Tile& tile, float* scores, Range keys, float& largest, float* weights) {
  Vec in[4];
  for (int i = 0; i < 4; ++i) {
    in[i] = load(scores + 16 * i);
    if (tile.softcap > 0) in[i] = soft_capped(in[i], tile.softcap);
    if (keys.first > 0 || keys.last < key_block) in[i] = within(in[i], keys.first - 16 * i, keys.last - 16 * i, -INFINITY);
  }
  const float before = largest, top = largest_of(larger(larger(in[0], in[1]), larger(in[2], in[3])));
  largest = before > top ? before : top;
  const float factor = before == largest ? 1.0f : first_of(exp(set(before - largest)));  // e^0 is exactly 1
  const Vec shift = set(largest);
  for (int i = 0; i < 4; ++i) {
    in[i] = exp(sub(in[i], shift));
    store(scores + 16 * i, in[i]);
  }
  store(weights, fma(load(weights), set(factor), add(add(in[0], in[1]), add(in[2], in[3]))));
  return factor;
}

inline void shrink(float* values, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += 16) store(values + i, mul(load(values + i), set(factor)));
}

// Weighted values of one block for all rows of the tile. Rows of one token see the same keys; whole tokens that do are taken together.
template <class Lines>
void add_values(const Tile& tile, Scratch& scratch, const Lines& lines, int64_t block, const Sums& sums) {
  const int64_t stride = padded(tile.head_dim);
  for (int64_t token = 0; token < tile.num_tokens;) {
    const Range keys = tile.keys(token, block);
    int64_t end = token + 1;
    while (end < tile.num_tokens && tile.keys(end, block) == keys) ++end;
    const int64_t row = token * tile.num_heads;
    if (keys.first < keys.last) {
      const Product product{sums.values + row * stride, stride, (end - token) * tile.num_heads, {0, stride}, keys, false};
      multiply(product, Weights{scratch.scores + row * key_block}, lines);
    }
    token = end;
  }
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
  const Ahead ahead{next_cells, tile.value_offset, tile.cell_bytes};
  if (is_small(tile) && tile.type != DType::f32 && tile.head_dim % 16 == 0) {
    if (tile.type == DType::f16) return add_values(tile, scratch, Cells<DType::f16>{cells, ahead, 0}, block, sums);
    return add_values(tile, scratch, Cells<DType::bf16>{cells, ahead, 0}, block, sums);
  }
  ahead.ask_all();
  const uint8_t* rows[key_block];
  as_floats(tile, cells, scratch.floats, rows);
  add_values(tile, scratch, Cells<DType::f32>{rows, ahead, 0}, block, sums);
}

// total = total and part together, each row's sums brought to the larger maximum. A side that saw nothing leaves the other as it is.
inline void fold(const Tile& tile, const Sums& total, const Sums& part) {
  const int64_t stride = padded(tile.head_dim), num_rows = tile.num_rows();
  for (int64_t row = 0; row < num_rows; ++row) {
    const float before = total.largest[row], other = part.largest[row];
    if (is_empty(part, row)) continue;
    const bool is_first = is_empty(total, row);
    const float largest = before > other ? before : other;
    const Vec keep = set(is_first ? 0.0f : first_of(exp(set(before - largest)))), take = set(is_first ? 1.0f : first_of(exp(set(other - largest))));
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

// queries [head_dim][rows], scaled
inline void scale_queries(const Tile& tile, float* queries) {
  const int64_t num_rows = tile.num_rows();
  const float* query[max_rows];
  for (int64_t row = 0; row < num_rows; ++row) query[row] = tile.query(row);
  const bool is_reordered = has_half_columns(tile);
  for (int64_t i = 0; i < tile.head_dim; ++i) {
    float* line = queries + (is_reordered ? place_of(i) : i) * num_rows;
    for (int64_t row = 0; row < num_rows; ++row) line[row] = query[row][i] * tile.scale;
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
