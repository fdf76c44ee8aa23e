// The K of a block, dimension by dimension, [4][head_dim][16 keys]: what a product of queries with 64 keys at a time reads. Included by attention.cpp only,
// once per instruction set, after attention_simd.h (see there).

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

// Rows of floats [64][padded(head_dim)] of the cells; the pool's own where they are floats already.
inline void as_floats(const Tile& tile, const uint8_t* const* cells, float* floats, const uint8_t** rows) {
  const int64_t stride = padded(tile.head_dim);
  for (int64_t key = 0; key < key_block; ++key) {
    if (cells[key] == no_cell) {
      rows[key] = no_cell;
    } else if (tile.type == DType::f32 && stride == tile.head_dim) {
      rows[key] = cells[key];
    } else {
      widen(cells[key], tile.type, tile.head_dim, floats + key * stride);
      rows[key] = reinterpret_cast<const uint8_t*>(floats + key * stride);
    }
  }
}

#if PYSERVE_SIMD == 512

// 16 float cells' dimensions [i, i + 16) -> columns i.. of these 16 keys: transposed in registers, in pairs, fours, and the four quarters.
inline __attribute__((always_inline)) void transpose_16(const uint8_t* const* cells, int64_t i, float* columns) {
  __m512 in[16], pair[16];
  for (int k = 0; k < 16; ++k) in[k] = _mm512_loadu_ps(reinterpret_cast<const float*>(cells[k]) + i);
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
    _mm512_storeu_ps(columns + (i + j) * 16, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
    _mm512_storeu_ps(columns + (i + j + 4) * 16, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_ps(columns + (i + j + 8) * 16, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
    _mm512_storeu_ps(columns + (i + j + 12) * 16, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
  }
}

// The same for 16 cells of 16-bit floats, 32 dimensions from `i` on, left as they are: half the shuffles, and what is read is converted on the way. The
// dimensions end up in the order of place_of.
inline void transpose_halves(const uint8_t* const* cells, int64_t i, uint16_t* columns) {
  __m512i in[16], pair[16];
  for (int k = 0; k < 16; ++k) in[k] = _mm512_loadu_si512(cells[k] + 2 * i);
  for (int k = 0; k < 16; k += 2) {  // dimensions 0..3 of each quarter's 8, and 4..7
    pair[k] = _mm512_unpacklo_epi16(in[k], in[k + 1]);
    pair[k + 1] = _mm512_unpackhi_epi16(in[k], in[k + 1]);
  }
  for (int k = 0; k < 16; k += 4) {  // dimensions 2j and 2j + 1, of keys k..k+3
    in[k] = _mm512_unpacklo_epi32(pair[k], pair[k + 2]);
    in[k + 1] = _mm512_unpackhi_epi32(pair[k], pair[k + 2]);
    in[k + 2] = _mm512_unpacklo_epi32(pair[k + 1], pair[k + 3]);
    in[k + 3] = _mm512_unpackhi_epi32(pair[k + 1], pair[k + 3]);
  }
  for (int k = 0; k < 16; k += 8) {  // dimension j of keys k..k+7
    for (int j = 0; j < 4; ++j) {
      pair[k + 2 * j] = _mm512_unpacklo_epi64(in[k + j], in[k + 4 + j]);
      pair[k + 2 * j + 1] = _mm512_unpackhi_epi64(in[k + j], in[k + 4 + j]);
    }
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int j = 0; j < 8; ++j) {
    _mm512_storeu_si512(columns + (i / 2 + j) * 32, _mm512_permutex2var_epi64(pair[j], low, pair[8 + j]));
    _mm512_storeu_si512(columns + (i / 2 + 8 + j) * 32, _mm512_permutex2var_epi64(pair[j], high, pair[8 + j]));
  }
}

#endif

// floats [64][head_dim] -> columns, four by four
inline void transpose(const uint8_t* const* cells, int64_t head_dim, float* all_columns) {
  for (int64_t key = 0; key < key_block; key += 4) {
    const float* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = reinterpret_cast<const float*>(cells[key + i]);
    float* columns = all_columns + key / 16 * head_dim * 16 + key % 16;
    for (int64_t i = 0; i < head_dim; i += 4) {
#if PYSERVE_X86
      __m128 a = _mm_loadu_ps(rows[0] + i), b = _mm_loadu_ps(rows[1] + i);
      __m128 c = _mm_loadu_ps(rows[2] + i), d = _mm_loadu_ps(rows[3] + i);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_store_ps(columns + i * 16, a);
      _mm_store_ps(columns + (i + 1) * 16, b);
      _mm_store_ps(columns + (i + 2) * 16, c);
      _mm_store_ps(columns + (i + 3) * 16, d);
#else
      for (int64_t j = 0; j < 4; ++j) {
        for (int64_t k = 0; k < 4; ++k) columns[(i + j) * 16 + k] = rows[k][i + j];
      }
#endif
    }
  }
}
