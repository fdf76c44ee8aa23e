// Products of a tile's rows with 16 columns at a time. Included by attention.cpp only, once per instruction set, after attention_simd.h (see there).

#if PYSERVE_SIMD == 512
constexpr int row_block = 6, col_block = 4;  // 24 of 32 registers hold sums
#else
constexpr int row_block = 3, col_block = 2;  // 12 of 16
#endif

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
    decltype(b(k, 0)) in[cols];
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

// Rows of one token see the same keys of a block; `add(first_row, num_rows, keys)` gets whole tokens that do together, those that see none left out.
template <class Add>
void for_rows_alike(const Tile& tile, int64_t block, const Add& add) {
  for (int64_t token = 0; token < tile.num_tokens;) {
    const Range keys = tile.keys(token, block);
    int64_t end = token + 1;
    while (end < tile.num_tokens && tile.keys(end, block) == keys) ++end;
    if (keys.first < keys.last) add(token * tile.num_heads, (end - token) * tile.num_heads, keys);
    token = end;
  }
}
