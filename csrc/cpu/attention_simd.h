// Sixteen floats at a time, the same names on every instruction set. Included by attention.cpp only, once per set, inside that set's namespace and target
// region, so it has no include guard and includes nothing. PYSERVE_SIMD says which: 512, 256, or 0 for plain loops.

#if PYSERVE_SIMD == 512

struct Vec {
  __m512 v;
};
inline Vec load(const float* x) { return {_mm512_loadu_ps(x)}; }
inline Vec load_f16(const uint16_t* x) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))}; }
inline Vec load_bf16(const uint16_t* x) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* out, Vec x) { _mm512_storeu_ps(out, x.v); }
inline Vec set(float x) { return {_mm512_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec larger(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n, n whole and in -126..127
inline Vec power_of_two(Vec n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))}; }
// x < limit ? 0 : value
// lanes [first, last) of x, `other` in the rest; the bounds may lie outside 0..16
inline Vec within(Vec x, int64_t first, int64_t last, float other) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 from = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(static_cast<int>(first)));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), _mm512_mask_cmplt_epi32_mask(from, lane, _mm512_set1_epi32(static_cast<int>(last))), x.v)};
}
inline float first_of(Vec x) { return _mm512_cvtss_f32(x.v); }
inline float largest_of(Vec x) { return _mm512_reduce_max_ps(x.v); }
inline Vec zero_below(Vec x, Vec limit, Vec value) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), value.v)}; }

#elif PYSERVE_SIMD == 256

struct Vec {
  __m256 a, b;
};
inline Vec load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline Vec load_f16(const uint16_t* x) {
  const __m128i* in = reinterpret_cast<const __m128i*>(x);
  return {_mm256_cvtph_ps(_mm_loadu_si128(in)), _mm256_cvtph_ps(_mm_loadu_si128(in + 1))};
}
inline __m256 widen_bf16(const uint16_t* x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
}
inline Vec load_bf16(const uint16_t* x) { return {widen_bf16(x), widen_bf16(x + 8)}; }
inline void store(float* out, Vec x) {
  _mm256_storeu_ps(out, x.a);
  _mm256_storeu_ps(out + 8, x.b);
}
inline Vec set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Vec larger(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline __m256 round_half(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec round(Vec x) { return {round_half(x.a), round_half(x.b)}; }
inline __m256 power_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec power_of_two(Vec n) { return {power_half(n.a), power_half(n.b)}; }
inline __m256 within_half(__m256 x, int64_t first, int64_t last, float other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(first)), lane);
  const __m256i inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(last)), lane));
  return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(inside));
}
inline Vec within(Vec x, int64_t first, int64_t last, float other) {
  return {within_half(x.a, first, last, other), within_half(x.b, first - 8, last - 8, other)};
}
inline float first_of(Vec x) { return _mm256_cvtss_f32(x.a); }
inline float largest_of(Vec x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline Vec zero_below(Vec x, Vec limit, Vec value) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), value.a), _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), value.b)};
}

#else

struct Vec {
  float v[16];
};
#define PYSERVE_EACH(expression)                \
  Vec out;                                      \
  for (int i = 0; i < 16; ++i) out.v[i] = (expression); \
  return out
inline Vec load(const float* x) { PYSERVE_EACH(x[i]); }
inline Vec load_f16(const uint16_t* x) { PYSERVE_EACH(f16_to_float(x[i])); }
inline Vec load_bf16(const uint16_t* x) { PYSERVE_EACH(bf16_to_float(x[i])); }
inline void store(float* out, const Vec& x) {
  for (int i = 0; i < 16; ++i) out[i] = x.v[i];
}
inline Vec set(float x) { PYSERVE_EACH(x); }
inline Vec add(const Vec& a, const Vec& b) { PYSERVE_EACH(a.v[i] + b.v[i]); }
inline Vec sub(const Vec& a, const Vec& b) { PYSERVE_EACH(a.v[i] - b.v[i]); }
inline Vec mul(const Vec& a, const Vec& b) { PYSERVE_EACH(a.v[i] * b.v[i]); }
inline Vec div(const Vec& a, const Vec& b) { PYSERVE_EACH(a.v[i] / b.v[i]); }
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) { PYSERVE_EACH(a.v[i] * b.v[i] + c.v[i]); }  // two roundings: there is no fused one to call
inline Vec larger(const Vec& a, const Vec& b) { PYSERVE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vec round(const Vec& a) { PYSERVE_EACH((a.v[i] + 12582912.0f) - 12582912.0f); }  // 1.5 * 2^23 leaves no room for a fraction
inline Vec power_of_two(const Vec& n) { PYSERVE_EACH(float_from_bits(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23)); }
inline Vec within(const Vec& x, int64_t first, int64_t last, float other) { PYSERVE_EACH(i >= first && i < last ? x.v[i] : other); }
inline float first_of(const Vec& x) { return x.v[0]; }
inline float largest_of(const Vec& x) {
  float largest = x.v[0];
  for (int i = 1; i < 16; ++i) largest = largest > x.v[i] ? largest : x.v[i];
  return largest;
}
inline Vec zero_below(const Vec& x, const Vec& limit, const Vec& value) { PYSERVE_EACH(x.v[i] < limit.v[i] ? 0.0f : value.v[i]); }
#undef PYSERVE_EACH

#endif

// e^x for x <= 0 and a little above; 0 below -87, e^-inf = 0. Taylor to degree 7 over |r| <= ln(2)/2: some 2e-7 relative.
inline Vec exp(Vec x) {
  const Vec lowest = set(-87.0f);
  const Vec bounded = larger(lowest, x);  // in this order a NaN stays one
  const Vec n = round(mul(bounded, set(1.44269504088896341f)));
  Vec r = fma(n, set(-0.693359375f), bounded);  // ln 2 in two parts, the first exact in few bits
  r = fma(n, set(2.12194440e-4f), r);
  Vec y = set(1.0f / 5040.0f);
  y = fma(y, r, set(1.0f / 720.0f));
  y = fma(y, r, set(1.0f / 120.0f));
  y = fma(y, r, set(1.0f / 24.0f));
  y = fma(y, r, set(1.0f / 6.0f));
  y = fma(y, r, set(0.5f));
  y = fma(y, r, set(1.0f));
  y = fma(y, r, set(1.0f));
  return zero_below(x, lowest, mul(y, power_of_two(n)));
}

// limit * tanh(x / limit), from tanh(|t|) = 1 - 2 / (e^(2|t|) + 1) written with e^(-2|t|), which cannot overflow
inline Vec soft_capped(Vec x, float limit) {
  const Vec t = mul(x, set(1.0f / limit));
  const Vec magnitude = larger(t, sub(set(0.0f), t));
  const Vec small = exp(mul(magnitude, set(-2.0f)));
  const Vec value = mul(set(limit), div(sub(set(1.0f), small), add(set(1.0f), small)));
  const Vec zero = set(0.0f);
  return sub(zero_below(t, zero, value), zero_below(sub(zero, t), zero, value));
}
