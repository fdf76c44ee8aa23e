// The vector operations that the kernel templates need, over 512-bit registers: a tile in two.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace pyserve {

struct Avx512 {
  static constexpr int lanes = 16;
  static constexpr int groups = 2;  // registers of rows that a pass over a tile serves
  static constexpr int tile_m = 6;  // two registers for each row and group, of 32
  template <int bits>
  static constexpr int step = 1;  // registers of weights that one `dot` takes
  static constexpr bool subtracts_offset = false;
  using Float = __m512;
  using Int = __m512i;
  using Bytes = __m512i;

#define PYSERVE_OP static inline __attribute__((always_inline))
  PYSERVE_OP Float load(const float* p) { return _mm512_loadu_ps(p); }
  PYSERVE_OP void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  PYSERVE_OP Float all(float x) { return _mm512_set1_ps(x); }
  PYSERVE_OP Int all_int(int32_t x) { return _mm512_set1_epi32(x); }
  PYSERVE_OP Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  PYSERVE_OP Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  PYSERVE_OP Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  PYSERVE_OP Int round(Float x) { return _mm512_cvtps_epi32(x); }
  PYSERVE_OP Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
  PYSERVE_OP Int bits_of(Float x) { return _mm512_castps_si512(x); }
  PYSERVE_OP Float from_bits(Int x) { return _mm512_castsi512_ps(x); }
  PYSERVE_OP Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
  PYSERVE_OP Int and_int(Int a, Int b) { return _mm512_and_si512(a, b); }
  PYSERVE_OP Int max_int(Int a, Int b) { return _mm512_max_epi32(a, b); }
  PYSERVE_OP Int exponent(Int n) { return _mm512_slli_epi32(n, 23); }
  PYSERVE_OP void store_int8(int8_t* p, Int x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
  PYSERVE_OP int32_t max_lane(Int x) { return _mm512_reduce_max_epi32(x); }
  PYSERVE_OP int32_t sum_lanes(Int x) { return _mm512_reduce_add_epi32(x); }

  PYSERVE_OP Float load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  PYSERVE_OP Float load_bf16(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
  }
  PYSERVE_OP Float load_uint8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
  PYSERVE_OP Float load_int8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }

  PYSERVE_OP Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  PYSERVE_OP Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  PYSERVE_OP Bytes high_nibbles(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
  // x | (high moved left by `left` bits & mask)
  template <int left>
  PYSERVE_OP Bytes with_high_bits(Bytes x, Bytes high, int mask) {
    const Bytes moved = left >= 0 ? _mm512_slli_epi16(high, left >= 0 ? left : 0) : _mm512_srli_epi16(high, left < 0 ? -left : 0);
    return _mm512_or_si512(x, _mm512_and_si512(moved, _mm512_set1_epi8(mask)));
  }

  // sum + the dot product of `count` registers of unsigned weights with the 4 * count activations at `a`, row by row
  template <int bits, int count>
  PYSERVE_OP Int dot(Int sum, const Bytes* q, const int8_t* a) {
#pragma GCC unroll 8
    for (int j = 0; j < count; ++j) sum = _mm512_dpbusd_epi32(sum, q[j], _mm512_set1_epi32(((const int32_t*)a)[j]));
    return sum;
  }
  PYSERVE_OP void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // into the second-level cache
#undef PYSERVE_OP
};

}  // namespace pyserve
