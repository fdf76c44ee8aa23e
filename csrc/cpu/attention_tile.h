// One tile of attention. Included by attention.cpp only, once per instruction set, after attention_simd.h (see there).

#if PYSERVE_SIMD == 512
constexpr int row_block = 6, col_block = 4;  // 24 of 32 registers hold sums
#else
constexpr int row_block = 3, col_block = 2;  // 12 of 16
#endif

// c[row, col] += sum over k in [first, last) of a[row, k] * b[k][col], for `rows` rows and `16 * cols` columns. Each sum is one chain in ascending k, so how the
// work is cut into blocks changes no bit.
template <int rows, int cols>
void multiply_block(const float* a, int64_t a_stride, const float* const* b, int64_t col, float* c, int64_t c_stride, int64_t first, int64_t last) {
  Vec sum[rows][cols];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) sum[i][j] = load(c + i * c_stride + col + 16 * j);
  }
  for (int64_t k = first; k < last; ++k) {
    Vec in[cols];
    for (int j = 0; j < cols; ++j) in[j] = load(b[k] + col + 16 * j);
    for (int i = 0; i < rows; ++i) {
      const Vec factor = set(a[i * a_stride + k]);
      for (int j = 0; j < cols; ++j) sum[i][j] = fma(factor, in[j], sum[i][j]);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) store(c + i * c_stride + col + 16 * j, sum[i][j]);
  }
}

template <int rows>
void multiply_rows(const float* a, int64_t a_stride, const float* const* b, float* c, int64_t c_stride, int64_t num_cols, int64_t first, int64_t last) {
  int64_t col = 0;
  for (; col + 16 * col_block <= num_cols; col += 16 * col_block) multiply_block<rows, col_block>(a, a_stride, b, col, c, c_stride, first, last);
  for (; col < num_cols; col += 16) multiply_block<rows, 1>(a, a_stride, b, col, c, c_stride, first, last);
}

inline void multiply(const float* a, int64_t a_stride, const float* const* b, float* c, int64_t c_stride, int64_t num_rows, int64_t num_cols, int64_t first,
                     int64_t last) {
  int64_t row = 0;
  for (; row + row_block <= num_rows; row += row_block) {
    multiply_rows<row_block>(a + row * a_stride, a_stride, b, c + row * c_stride, c_stride, num_cols, first, last);
  }
  for (; row + 2 <= num_rows; row += 2) multiply_rows<2>(a + row * a_stride, a_stride, b, c + row * c_stride, c_stride, num_cols, first, last);
  for (; row < num_rows; ++row) multiply_rows<1>(a + row * a_stride, a_stride, b, c + row * c_stride, c_stride, num_cols, first, last);
}

inline void widen(const uint8_t* cell, DType type, int64_t head_dim, float* out) {
  const uint16_t* half = reinterpret_cast<const uint16_t*>(cell);
  int64_t i = 0;
  if (type == DType::f16) {
    for (; i + 16 <= head_dim; i += 16) store(out + i, load_f16(half + i));
    for (; i < head_dim; ++i) out[i] = f16_to_float(half[i]);
  } else if (type == DType::bf16) {
    for (; i + 16 <= head_dim; i += 16) store(out + i, load_bf16(half + i));
    for (; i < head_dim; ++i) out[i] = bf16_to_float(half[i]);
  } else {
    std::memcpy(out, cell, static_cast<size_t>(head_dim) * sizeof(float));
  }
}

// cells [64][head_dim] -> columns [head_dim][64], four by four
inline void transpose(const float* const* cells, int64_t head_dim, float* columns) {
  for (int64_t key = 0; key < key_block; key += 4) {
    for (int64_t i = 0; i < head_dim; i += 4) {
#if PYSERVE_X86
      __m128 a = _mm_loadu_ps(cells[key] + i), b = _mm_loadu_ps(cells[key + 1] + i);
      __m128 c = _mm_loadu_ps(cells[key + 2] + i), d = _mm_loadu_ps(cells[key + 3] + i);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_store_ps(columns + i * key_block + key, a);
      _mm_store_ps(columns + (i + 1) * key_block + key, b);
      _mm_store_ps(columns + (i + 2) * key_block + key, c);
      _mm_store_ps(columns + (i + 3) * key_block + key, d);
#else
      for (int64_t j = 0; j < 4; ++j) {
        for (int64_t k = 0; k < 4; ++k) columns[(i + j) * key_block + key + k] = cells[key + k][i + j];
      }
#endif
    }
  }
}

// The cells of positions [first, last) of a block as floats; rows of other positions point to zeros, so that a cell nobody owns is never read.
inline void load_block(const Tile& tile, int64_t is_value, int64_t block, int64_t first, int64_t last, float* floats, const float** cells) {
  const int64_t stride = padded(tile.head_dim);
  for (int64_t key = 0; key < key_block; ++key) cells[key] = zeros;
  for (int64_t key = first; key < last; ++key) {
    const uint8_t* cell = tile.cell(block * key_block + key, is_value);
    if (tile.type == DType::f32 && stride == tile.head_dim) {
      cells[key] = reinterpret_cast<const float*>(cell);
    } else {
      widen(cell, tile.type, tile.head_dim, floats + key * stride);
      cells[key] = floats + key * stride;
    }
  }
}

// Row's scores [64] of this block -> weights, and the running maximum and sum brought up to date. Keys outside [first, last) get weight 0. Returns the factor
// that what was summed before has to shrink by.
inline float soften(const Tile& tile, float* scores, int64_t first, int64_t last, RowState& state) {
  if (tile.softcap > 0) {
    for (int64_t key = 0; key < key_block; key += 16) store(scores + key, soft_capped(load(scores + key), tile.softcap));
  }
  for (int64_t key = 0; key < first; ++key) scores[key] = -INFINITY;
  for (int64_t key = last; key < key_block; ++key) scores[key] = -INFINITY;
  Vec top = larger(larger(load(scores), load(scores + 16)), larger(load(scores + 32), load(scores + 48)));
  alignas(64) float lanes[32];
  store(lanes, top);
  float largest = state.largest;
  for (int i = 0; i < 16; ++i) largest = largest > lanes[i] ? largest : lanes[i];
  store(lanes, exp(set(state.largest - largest)));
  const float factor = lanes[0];
  Vec total = set(0.0f);
  for (int64_t key = 0; key < key_block; key += 16) {
    const Vec weight = exp(sub(load(scores + key), set(largest)));
    store(scores + key, weight);
    total = add(total, weight);
  }
  store(lanes, total);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  state.sum = state.sum * factor + lanes[0];
  state.largest = largest;
  return factor;
}

inline void shrink(float* sums, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += 16) store(sums + i, mul(load(sums + i), set(factor)));
}

// Weighted values of one block for all rows of the tile. Rows of one token see the same keys; whole tokens that do are taken together.
inline void add_values(const Tile& tile, Scratch& scratch, const float* const* values, int64_t block) {
  const int64_t stride = padded(tile.head_dim);
  for (int64_t token = 0; token < tile.num_tokens;) {
    const Range keys = tile.keys(token, block);
    int64_t end = token + 1;
    while (end < tile.num_tokens && tile.keys(end, block) == keys) ++end;
    const int64_t row = token * tile.num_heads;
    if (keys.first < keys.last) {
      multiply(scratch.scores + row * key_block, key_block, values, scratch.sums + row * stride, stride, (end - token) * tile.num_heads, stride, keys.first,
               keys.last);
    }
    token = end;
  }
}

inline void take_block(const Tile& tile, Scratch& scratch, int64_t block) {
  const int64_t stride = padded(tile.head_dim), num_rows = tile.num_tokens * tile.num_heads;
  const Range seen = tile.keys_of_any(block);
  const float *cells[key_block], *columns[max_head_dim];
  load_block(tile, 0, block, seen.first, seen.last, scratch.cells, cells);
  transpose(cells, tile.head_dim, scratch.columns);
  for (int64_t i = 0; i < tile.head_dim; ++i) columns[i] = scratch.columns + i * key_block;
  std::memset(scratch.scores, 0, static_cast<size_t>(num_rows * key_block) * sizeof(float));
  multiply(scratch.queries, stride, columns, scratch.scores, key_block, num_rows, key_block, 0, tile.head_dim);
  for (int64_t row = 0; row < num_rows; ++row) {
    const Range keys = tile.keys(row / tile.num_heads, block);
    if (keys.first >= keys.last) continue;  // nothing here for this row: it must look as if the block had never been
    const float factor = soften(tile, scratch.scores + row * key_block, keys.first, keys.last, scratch.state[row]);
    if (factor != 1.0f) shrink(scratch.sums + row * stride, stride, factor);
  }
  load_block(tile, 1, block, seen.first, seen.last, scratch.cells, cells);
  add_values(tile, scratch, cells, block);
}

void attend(const Tile& tile, Scratch& scratch) {
  const int64_t stride = padded(tile.head_dim), num_rows = tile.num_tokens * tile.num_heads;
  std::memset(scratch.sums, 0, static_cast<size_t>(num_rows * stride) * sizeof(float));
  std::memset(scratch.cells, 0, static_cast<size_t>(key_block * stride) * sizeof(float));  // the padding beside narrow heads
  for (int64_t row = 0; row < num_rows; ++row) {
    scratch.state[row] = RowState{-INFINITY, 0.0f};
    const float* query = tile.query(row);
    for (int64_t i = 0; i < tile.head_dim; ++i) scratch.queries[row * stride + i] = query[i] * tile.scale;
  }
  for (int64_t block = tile.first_block(); block <= tile.last_block(); ++block) take_block(tile, scratch, block);
  for (int64_t row = 0; row < num_rows; ++row) {
    float* out = tile.out(row);
    for (int64_t i = 0; i < tile.head_dim; ++i) out[i] = scratch.sums[row * stride + i] / scratch.state[row].sum;
  }
}
