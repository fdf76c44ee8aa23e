// The vector operations that the kernel templates need, over 256-bit registers: 8 rows of a tile in one.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace pyserve {

struct Avx2 {
  static constexpr int lanes = 8;
  static constexpr int groups = 1;
  static constexpr int tile_m = 4;
  // Products are summed in 16 bits for as long as the largest weights times 127 leave room: 8 registers of 4-bit weights (30,480), 4 of 5 bits
  // (31,496), 2 of 6 bits (32,004). 8-bit weights go as magnitudes against activations that take the sign (one register, 32,512).
  template <int bits>
  static constexpr int step = bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
  static constexpr bool subtracts_offset = true;  // `dot` of 8-bit weights takes the offset of 128 off by itself
  using Float = __m256;
  using Int = __m256i;
  using Bytes = __m256i;

#define PYSERVE_OP static inline __attribute__((always_inline))
  PYSERVE_OP Float load(const float* p) { return _mm256_loadu_ps(p); }
  PYSERVE_OP void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  PYSERVE_OP Float all(float x) { return _mm256_set1_ps(x); }
  PYSERVE_OP Int all_int(int32_t x) { return _mm256_set1_epi32(x); }
  PYSERVE_OP Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  PYSERVE_OP Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  PYSERVE_OP Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
  PYSERVE_OP Int round(Float x) { return _mm256_cvtps_epi32(x); }
  PYSERVE_OP Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
  PYSERVE_OP Int bits_of(Float x) { return _mm256_castps_si256(x); }
  PYSERVE_OP Float from_bits(Int x) { return _mm256_castsi256_ps(x); }
  PYSERVE_OP Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
  PYSERVE_OP Int and_int(Int a, Int b) { return _mm256_and_si256(a, b); }
  PYSERVE_OP Int max_int(Int a, Int b) { return _mm256_max_epi32(a, b); }
  PYSERVE_OP Int exponent(Int n) { return _mm256_slli_epi32(n, 23); }
  PYSERVE_OP void store_int8(int8_t* p, Int x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
  }
  PYSERVE_OP int32_t max_lane(Int x) {
    int32_t lane[8], result;
    _mm256_storeu_si256((__m256i*)lane, x);
    result = lane[0];
    for (int i = 1; i < 8; ++i) result = lane[i] > result ? lane[i] : result;
    return result;
  }
  PYSERVE_OP int32_t sum_lanes(Int x) {
    int32_t lane[8], result = 0;
    _mm256_storeu_si256((__m256i*)lane, x);
    for (int i = 0; i < 8; ++i) result += lane[i];
    return result;
  }

  PYSERVE_OP Float load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  PYSERVE_OP Float load_bf16(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
  }
  PYSERVE_OP Float load_uint8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
  PYSERVE_OP Float load_int8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }

  PYSERVE_OP Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  PYSERVE_OP Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  PYSERVE_OP Bytes high_nibbles(Bytes x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
  template <int left>
  PYSERVE_OP Bytes with_high_bits(Bytes x, Bytes high, int mask) {
    const Bytes moved = left >= 0 ? _mm256_slli_epi16(high, left >= 0 ? left : 0) : _mm256_srli_epi16(high, left < 0 ? -left : 0);
    return _mm256_or_si256(x, _mm256_and_si256(moved, _mm256_set1_epi8(mask)));
  }

  template <int bits, int count>
  PYSERVE_OP Int dot(Int sum, const Bytes* q, const int8_t* a) {
    static_assert(count <= step<bits>);
    Int words = products<bits>(q[0], a);
#pragma GCC unroll 8
    for (int i = 1; i < count; ++i) words = _mm256_add_epi16(words, products<bits>(q[i], a + 4 * i));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
  }
  template <int bits>
  PYSERVE_OP Int products(Bytes q, const int8_t* a) {
    const Bytes four = _mm256_set1_epi32(*(const int32_t*)a);
    if (bits < 8) return _mm256_maddubs_epi16(q, four);
    const Bytes value = _mm256_xor_si256(q, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(four, value));
  }
  PYSERVE_OP void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // into the second-level cache
#undef PYSERVE_OP
};

}  // namespace pyserve
