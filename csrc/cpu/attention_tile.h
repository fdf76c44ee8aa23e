// One tile of attention. Included by attention.cpp only, once per instruction set, after attention_simd.h (see there).

#if PYSERVE_SIMD == 512
constexpr int row_block = 6, col_block = 4;  // 24 of 32 registers hold sums
#else
constexpr int row_block = 3, col_block = 2;  // 12 of 16
#endif

// c[row, col] += sum over k in [first, last) of a[row, k] * b[k][col], for `rows` rows and `16 * cols` columns. Each sum is one chain in ascending k, so
// how the work is cut into blocks changes no bit.
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
  const float* last_a = a + row * a_stride;
  float* last_c = c + row * c_stride;
  switch (num_rows - row) {
#if PYSERVE_SIMD == 512
    case 5: return multiply_rows<5>(last_a, a_stride, b, last_c, c_stride, num_cols, first, last);
    case 4: return multiply_rows<4>(last_a, a_stride, b, last_c, c_stride, num_cols, first, last);
    case 3: return multiply_rows<3>(last_a, a_stride, b, last_c, c_stride, num_cols, first, last);
#endif
    case 2: return multiply_rows<2>(last_a, a_stride, b, last_c, c_stride, num_cols, first, last);
    case 1: return multiply_rows<1>(last_a, a_stride, b, last_c, c_stride, num_cols, first, last);
  }
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

#if PYSERVE_SIMD == 512

inline Vec load_cells(const uint8_t* cell, DType type, int64_t first) {
  if (type == DType::f32) return load(reinterpret_cast<const float*>(cell) + first);
  const uint16_t* half = reinterpret_cast<const uint16_t*>(cell) + first;
  return type == DType::f16 ? load_f16(half) : load_bf16(half);
}

// 16 cells' dimensions [i, i + 16) -> columns i.. of these 16 keys: transposed in registers, in pairs, fours, and the four quarters.
inline void transpose_16(const uint8_t* const* cells, DType type, int64_t i, float* columns) {
  __m512 in[16], pair[16];
  for (int k = 0; k < 16; ++k) in[k] = load_cells(cells[k], type, i).v;
  for (int k = 0; k < 16; k += 2) {
    pair[k] = _mm512_unpacklo_ps(in[k], in[k + 1]);
    pair[k + 1] = _mm512_unpackhi_ps(in[k], in[k + 1]);
  }
  for (int k = 0; k < 16; k += 4) {  // in[k + j]: element j of each quarter, of keys k..k+3
    const __m512d low = _mm512_castps_pd(pair[k]), high = _mm512_castps_pd(pair[k + 1]);
    const __m512d next_low = _mm512_castps_pd(pair[k + 2]), next_high = _mm512_castps_pd(pair[k + 3]);
    in[k] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, next_low));
    in[k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, next_low));
    in[k + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, next_high));
    in[k + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, next_high));
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 even_low = _mm512_shuffle_f32x4(in[j], in[j + 4], 0x88), even_high = _mm512_shuffle_f32x4(in[j + 8], in[j + 12], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(in[j], in[j + 4], 0xdd), odd_high = _mm512_shuffle_f32x4(in[j + 8], in[j + 12], 0xdd);
    _mm512_storeu_ps(columns + (i + j) * key_block, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
    _mm512_storeu_ps(columns + (i + j + 4) * key_block, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_ps(columns + (i + j + 8) * key_block, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
    _mm512_storeu_ps(columns + (i + j + 12) * key_block, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
  }
}

#endif

// floats [64][head_dim] -> columns [head_dim][64], four by four
inline void transpose(const float* const* rows, int64_t head_dim, float* columns) {
  for (int64_t key = 0; key < key_block; key += 4) {
    for (int64_t i = 0; i < head_dim; i += 4) {
#if PYSERVE_X86
      __m128 a = _mm_loadu_ps(rows[key] + i), b = _mm_loadu_ps(rows[key + 1] + i);
      __m128 c = _mm_loadu_ps(rows[key + 2] + i), d = _mm_loadu_ps(rows[key + 3] + i);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_store_ps(columns + i * key_block + key, a);
      _mm_store_ps(columns + (i + 1) * key_block + key, b);
      _mm_store_ps(columns + (i + 2) * key_block + key, c);
      _mm_store_ps(columns + (i + 3) * key_block + key, d);
#else
      for (int64_t j = 0; j < 4; ++j) {
        for (int64_t k = 0; k < 4; ++k) columns[(i + j) * key_block + key + k] = rows[key + k][i + j];
      }
#endif
    }
  }
}

// Rows of floats [64][padded(head_dim)] of the cells; the pool's own where they are floats already.
inline void as_floats(const Tile& tile, const uint8_t* const* cells, float* floats, const float** rows) {
  const int64_t stride = padded(tile.head_dim);
  for (int64_t key = 0; key < key_block; ++key) {
    if (cells[key] == no_cell) {
      rows[key] = zeros;
    } else if (tile.type == DType::f32 && stride == tile.head_dim) {
      rows[key] = reinterpret_cast<const float*>(cells[key]);
    } else {
      widen(cells[key], tile.type, tile.head_dim, floats + key * stride);
      rows[key] = floats + key * stride;
    }
  }
}

inline void load_keys(const Tile& tile, const uint8_t* const* cells, Scratch& scratch) {
#if PYSERVE_SIMD == 512
  if (tile.head_dim % 16 == 0) {
    for (int64_t key = 0; key < key_block; key += 16) {
      for (int64_t i = 0; i < tile.head_dim; i += 16) transpose_16(cells + key, tile.type, i, scratch.columns + key);
    }
    return;
  }
#endif
  const float* rows[key_block];
  as_floats(tile, cells, scratch.floats, rows);
  transpose(rows, tile.head_dim, scratch.columns);
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

// cells: the block's K; the next block's, or null, are asked for ahead.
inline void take_block(const Tile& tile, Scratch& scratch, int64_t block, const uint8_t** cells, const uint8_t* const* next_cells) {
  const int64_t stride = padded(tile.head_dim), num_rows = tile.num_tokens * tile.num_heads;
  const float *rows[key_block], *columns[max_head_dim];
  load_keys(tile, cells, scratch);
  for (int64_t i = 0; i < tile.head_dim; ++i) columns[i] = scratch.columns + i * key_block;
  for (int64_t key = 0; key < key_block; ++key) cells[key] += cells[key] == no_cell ? 0 : tile.value_offset;
  tile.prefetch(cells);  // V arrives while the scores are computed
  std::memset(scratch.scores, 0, static_cast<size_t>(num_rows * key_block) * sizeof(float));
  multiply(scratch.queries, stride, columns, scratch.scores, key_block, num_rows, key_block, 0, tile.head_dim);
  for (int64_t row = 0; row < num_rows; ++row) {
    const Range keys = tile.keys(row / tile.num_heads, block);
    if (keys.first >= keys.last) continue;  // nothing here for this row: it must look as if the block had never been
    const float factor = soften(tile, scratch.scores + row * key_block, keys.first, keys.last, scratch.state[row]);
    if (factor != 1.0f) shrink(scratch.sums + row * stride, stride, factor);
  }
  if (next_cells != nullptr) tile.prefetch(next_cells);
  as_floats(tile, cells, scratch.floats, rows);
  add_values(tile, scratch, rows, block);
}

void attend(const Tile& tile, Scratch& scratch) {
  const int64_t stride = padded(tile.head_dim), num_rows = tile.num_tokens * tile.num_heads;
  std::memset(scratch.sums, 0, static_cast<size_t>(num_rows * stride) * sizeof(float));
  std::memset(scratch.floats, 0, static_cast<size_t>(key_block * stride) * sizeof(float));  // the padding beside narrow heads
  for (int64_t row = 0; row < num_rows; ++row) {
    scratch.state[row] = RowState{-INFINITY, 0.0f};
    const float* query = tile.query(row);
    for (int64_t i = 0; i < tile.head_dim; ++i) scratch.queries[row * stride + i] = query[i] * tile.scale;
  }
  const int64_t last = tile.last_block();
  const uint8_t* cells[2][key_block];  // of this block and the next, in turn
  tile.find_cells(tile.first_block(), cells[tile.first_block() % 2]);
  for (int64_t block = tile.first_block(); block <= last; ++block) {
    if (block < last) tile.find_cells(block + 1, cells[(block + 1) % 2]);
    take_block(tile, scratch, block, cells[block % 2], block < last ? cells[(block + 1) % 2] : nullptr);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    float* out = tile.out(row);
    for (int64_t i = 0; i < tile.head_dim; ++i) out[i] = scratch.sums[row * stride + i] / scratch.state[row].sum;
  }
}
