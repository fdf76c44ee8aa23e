// The arithmetic of a tile whose K and V are bfloat16, where the processor multiplies pairs of them and adds both products to a float: twice the
// multiplications of float32. Included by attention.cpp only, after attention_columns.h and attention_product.h; heads are whole blocks of 32 dimensions.
//
// Queries, scaled, are rounded to bfloat16 once, and so is each weight, before it is summed: what divides the sum of weighted values is the sum of the weights
// that went into it. Everything else is float32. Scores are in powers of two. K is paired by dimensions as it lies in the pool, V by keys, 2p with 2p + 1; of a
// pair of which a row sees one key, the other's V is zero. A pair of bfloat16 travels as the bits of one float.

struct Pairs {
  __m512i v;
};
inline Vec fma(Vec factor, Pairs in, Vec sum) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(factor.v), (__m512bh)in.v)}; }
inline Vec rounded(Vec low, Vec high) { return {_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high.v, low.v))}; }

constexpr int64_t block_pairs = key_block / 2;
constexpr float log2_e = 1.44269504088896341f;

// 2^x for x <= 0, exactly 1 at 0; 0 below -126. Minimax to degree 4 over |r| <= 1/2: 3e-6 relative, a thousandth of what rounding to bfloat16 adds.
inline Vec weight_of(Vec x) {
  const Vec shifted = add(x, set(12582912.0f));  // 1.5 * 2^23: the lowest bits are x rounded
  const Vec r = sub(x, sub(shifted, set(12582912.0f)));
  Vec y = set(0.00958285213f);
  y = fma(y, r, set(0.0559064295f));
  y = fma(y, r, set(0.240240987f));
  y = fma(y, r, set(0.693124193f));
  y = fma(y, r, set(1.0f));
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(is_normal, _mm512_castps_si512(y.v), power))};
}

inline Vec capped(const Tile& tile, Vec score) { return tile.softcap > 0 ? mul(soft_capped(score, tile.softcap), set(log2_e)) : score; }

inline Vec keep_weights(float* scores, const Vec (&weights)[4], Vec total, float factor) {
  const Vec first = rounded(weights[0], weights[1]), second = rounded(weights[2], weights[3]);
  store(scores, first);
  store(scores + 16, second);
  const Pairs ones{_mm512_set1_epi32(0x3f803f80)};
  return fma(second, ones, fma(first, ones, mul(total, set(factor))));
}

// Left sides: rows of pairs.
struct PairRows {
  const float* at;
  int64_t stride;
  float operator()(int64_t i, int64_t k) const { return at[i * stride + k]; }
  PairRows from(int64_t row) const { return {at + row * stride, stride}; }
};

// Right sides: 16 columns, the j-th from `col` on, of line `k` of pairs. See attention_tile.h for what is asked for ahead.
template <bool asks_ahead>
struct PairColumns {  // K: [4][head_dim / 2][16 keys]
  const float* at;
  int64_t num_lines;
  Ahead ahead;
  Pairs operator()(int64_t k, int64_t j) const {
    if (asks_ahead && j == 0 && k < block_pairs) {
      for (int64_t key = 2 * k; key < 2 * k + 2; ++key) {
        ahead.ask_line(key, 0);
        ahead.ask_line(key, 64);
      }
    }
    return {_mm512_loadu_si512(at + (j * num_lines + k) * 16)};
  }
  PairColumns from(int64_t col) const { return {at + col * num_lines, num_lines, ahead}; }
};

struct PairLines {  // V: [32 pairs of keys][head_dim]
  const float* at;
  int64_t width;
  Pairs operator()(int64_t k, int64_t j) const { return {_mm512_loadu_si512(at + k * width + 16 * j)}; }
  PairLines from(int64_t col) const { return {at + col, width}; }
};

// Even keys' 16-bit values in the lower halves, the odd ones' in the upper, of the lower and upper 16 dimensions of 32.
inline __m512i interleaved(__m512i even, __m512i odd, int half) {
  const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_add_epi32(_mm512_mullo_epi32(step, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(0x200000 + half * 0x100010));
  return _mm512_permutex2var_epi16(even, at, odd);
}

struct PairCells {  // V as it lies in the pool
  const uint8_t* const* lines;
  Ahead ahead;
  int64_t col;
  Pairs operator()(int64_t k, int64_t j) const {
    const int64_t byte = 2 * col + 32 * j;
    if (j % 2 == 0) {
      ahead.ask_line(2 * k, byte);
      ahead.ask_line(2 * k + 1, byte);
    }
    return {interleaved(half_line(lines[2 * k] + byte), half_line(lines[2 * k + 1] + byte), 0)};
  }
  static __m512i half_line(const uint8_t* x) { return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
  PairCells from(int64_t at) const { return {lines, ahead, col + at}; }
};

template <class Lines>
struct OneOfEach {  // pairs of which one half counts, the other being zero
  Lines lines;
  uint32_t mask;
  Pairs operator()(int64_t k, int64_t j) const { return {_mm512_and_si512(lines(k, j).v, _mm512_set1_epi32(static_cast<int>(mask)))}; }
  OneOfEach from(int64_t col) const { return {lines.from(col), mask}; }
};

// queries [rows][head_dim / 2], scaled: for scores in powers of two unless they are to be capped first
inline void scale_queries(const Tile& tile, float* queries) {
  const Vec scale = set(tile.softcap > 0 ? tile.scale : tile.scale * log2_e);
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const float* query = tile.query(row);
    for (int64_t i = 0; i < tile.head_dim; i += 32, queries += 16) store(queries, rounded(mul(load(query + i), scale), mul(load(query + i + 16), scale)));
  }
}

inline void score_keys(const Tile& tile, const uint8_t* const* cells, const Ahead& ahead, Range chunks, Scratch& scratch) {
  const int64_t num_lines = tile.head_dim / 2;
  const bool asks_in_product = is_small(tile) && num_lines >= block_pairs;
  if (!asks_in_product) ahead.ask_all();
  for (int64_t key = chunks.first; key < chunks.last; key += 16) {
    for (int64_t i = 0; i < num_lines; i += 16) {
      if (asks_in_product && i >= block_pairs && i % 32 == 0) ahead.ask_lines(key, 4 * i);
      transpose_16(cells + key, i, scratch.columns + key * num_lines);
    }
  }
  const Product product{scratch.scores, key_block, tile.num_rows(), chunks, {0, num_lines}, true};
  const PairRows queries{scratch.queries, num_lines};
  if (asks_in_product) return multiply(product, queries, PairColumns<true>{scratch.columns, num_lines, ahead});
  multiply(product, queries, PairColumns<false>{scratch.columns, num_lines, ahead});
}

template <class Lines>
void add_lines(const Tile& tile, Scratch& scratch, const Lines& lines, int64_t block, const Sums& sums) {
  const int64_t width = tile.head_dim;
  for_rows_alike(tile, block, [&](int64_t row, int64_t num_rows, Range keys) {
    const auto add = [&](Range pairs, const auto& right) {
      const Product product{sums.values + row * width, width, num_rows, {0, width}, pairs, false};
      multiply(product, PairRows{scratch.scores + row * key_block, key_block}, right);
    };
    const int64_t first = (keys.first + 1) / 2, last = keys.last / 2;
    if (keys.first % 2 != 0) add({first - 1, first}, OneOfEach<Lines>{lines, 0xffff0000u});
    if (first < last) add({first, last}, lines);
    if (keys.last % 2 != 0) add({last, last + 1}, OneOfEach<Lines>{lines, 0x0000ffffu});
  });
}

inline void add_values(const Tile& tile, const uint8_t* const* cells, const Ahead& ahead, int64_t block, Scratch& scratch, const Sums& sums) {
  if (is_small(tile)) return add_lines(tile, scratch, PairCells{cells, ahead, 0}, block, sums);
  ahead.ask_all();
  float* line = scratch.columns;
  for (int64_t key = 0; key < key_block; key += 2) {
    for (int64_t i = 0; i < tile.head_dim; i += 32, line += 32) {
      const __m512i even = _mm512_loadu_si512(cells[key] + 2 * i), odd = _mm512_loadu_si512(cells[key + 1] + 2 * i);
      _mm512_storeu_si512(line, interleaved(even, odd, 0));
      _mm512_storeu_si512(line + 16, interleaved(even, odd, 1));
    }
  }
  add_lines(tile, scratch, PairLines{scratch.columns, tile.head_dim}, block, sums);
}
