// What one core can do at most: int8 dot products out of registers (AVX-512 VNNI, else AVX2). Prints GMAC/s.
#include <immintrin.h>

#include <chrono>
#include <cstdio>

__attribute__((target("avx512f,avx512vnni"))) static void dots_avx512(long count) {
  __m512i s0 = _mm512_setzero_si512(), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0, a = s0, b = s0;
  for (long i = 0; i < count; ++i) {
#define DOT(s) asm volatile("vpdpbusd %2, %1, %0" : "+v"(s) : "v"(a), "v"(b))
    DOT(s0); DOT(s1); DOT(s2); DOT(s3); DOT(s4); DOT(s5); DOT(s6); DOT(s7);
#undef DOT
  }
}

__attribute__((target("avx2"))) static void dots_avx2(long count) {
  __m256i s[4], a = _mm256_setzero_si256(), b = a, ones = a;
  for (long i = 0; i < 2 * count; ++i)
    for (int j = 0; j < 4; ++j) {
      __m256i words;
      asm volatile("vpmaddubsw %2, %1, %0" : "=x"(words) : "x"(a), "x"(b));
      asm volatile("vpmaddwd %2, %1, %0" : "=x"(s[j]) : "x"(words), "x"(ones));
    }
}

int main() {
  constexpr long count = 2000000;
  double best = 1e9;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    const bool has_avx512 = __builtin_cpu_supports("avx512vnni");
    has_avx512 ? dots_avx512(count) : dots_avx2(count);
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = s < best ? s : best;
  }
  const double macs = __builtin_cpu_supports("avx512vnni") ? 8. * 64 * count : 2. * 4 * 32 * count;
  std::printf("%.1f\n", macs / best / 1e9);
}
