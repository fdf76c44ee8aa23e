// The arithmetic of a tile in float32. Included by attention.cpp only, once per instruction set, after attention_columns.h and attention_product.h.

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

// What the softmax makes of a score, less the largest.
inline Vec weight_of(Vec x) { return exp(x); }
inline Vec capped(const Tile& tile, Vec score) { return tile.softcap > 0 ? soft_capped(score, tile.softcap) : score; }

// The weights of a row's 64 keys take the place of its scores; returns `total`, shrunk by `factor`, with theirs.
inline Vec keep_weights(float* scores, const Vec (&weights)[4], Vec total, float factor) {
  for (int i = 0; i < 4; ++i) store(scores + 16 * i, weights[i]);
  return fma(total, set(factor), add(add(weights[0], weights[1]), add(weights[2], weights[3])));
}

// Weighted values of one block for all rows of the tile.
template <class Lines>
void add_lines(const Tile& tile, Scratch& scratch, const Lines& lines, int64_t block, const Sums& sums) {
  const int64_t stride = padded(tile.head_dim);
  for_rows_alike(tile, block, [&](int64_t row, int64_t num_rows, Range keys) {
    const Product product{sums.values + row * stride, stride, num_rows, {0, stride}, keys, false};
    multiply(product, Weights{scratch.scores + row * key_block}, lines);
  });
}

inline void add_values(const Tile& tile, const uint8_t* const* cells, const Ahead& ahead, int64_t block, Scratch& scratch, const Sums& sums) {
  if (is_small(tile) && tile.type != DType::f32 && tile.head_dim % 16 == 0) {
    if (tile.type == DType::f16) return add_lines(tile, scratch, Cells<DType::f16>{cells, ahead, 0}, block, sums);
    return add_lines(tile, scratch, Cells<DType::bf16>{cells, ahead, 0}, block, sums);
  }
  ahead.ask_all();
  const uint8_t* rows[key_block];
  as_floats(tile, cells, scratch.floats, rows);
  add_lines(tile, scratch, Cells<DType::f32>{rows, ahead, 0}, block, sums);
}
