// The vector operations that the kernel templates need, in the compiler's own vectors of 4: any machine.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace pyserve {

struct Generic {
  static constexpr int lanes = 4;
  static constexpr int groups = 1;
  static constexpr int tile_m = 2;
  template <int bits>
  static constexpr int step = 8;
  static constexpr bool subtracts_offset = false;
  typedef float Float __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));
  typedef uint32_t Bytes __attribute__((vector_size(16)));

#define PYSERVE_OP static inline __attribute__((always_inline))
  template <class T>
  PYSERVE_OP T read(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  PYSERVE_OP Float load(const float* p) { return read<Float>(p); }
  PYSERVE_OP void store(float* p, Float x) { std::memcpy(p, &x, sizeof x); }
  PYSERVE_OP Float all(float x) { return Float{x, x, x, x}; }
  PYSERVE_OP Int all_int(int32_t x) { return Int{x, x, x, x}; }
  PYSERVE_OP Float fma(Float a, Float b, Float c) { return a * b + c; }
  PYSERVE_OP Float max(Float a, Float b) { return a > b ? a : b; }
  PYSERVE_OP Float min(Float a, Float b) { return a < b ? a : b; }
  PYSERVE_OP Int round(Float x) { return Int{nearest(x[0]), nearest(x[1]), nearest(x[2]), nearest(x[3])}; }
  PYSERVE_OP int32_t nearest(float x) { return x > -2147483648.f && x < 2147483648.f ? int32_t(std::nearbyint(x)) : INT32_MIN; }
  PYSERVE_OP Float to_float(Int x) { return __builtin_convertvector(x, Float); }
  PYSERVE_OP Int bits_of(Float x) { return (Int)x; }
  PYSERVE_OP Float from_bits(Int x) { return (Float)x; }
  PYSERVE_OP Int add_int(Int a, Int b) { return a + b; }
  PYSERVE_OP Int and_int(Int a, Int b) { return a & b; }
  PYSERVE_OP Int max_int(Int a, Int b) { return a > b ? a : b; }
  PYSERVE_OP Int exponent(Int n) { return (Int)((Bytes)n << 23); }
  PYSERVE_OP void store_int8(int8_t* p, Int x) {
    for (int i = 0; i < 4; ++i) p[i] = int8_t(x[i]);
  }
  PYSERVE_OP int32_t max_lane(Int x) {
    int32_t result = x[0];
    for (int i = 1; i < 4; ++i) result = x[i] > result ? x[i] : result;
    return result;
  }
  PYSERVE_OP int32_t sum_lanes(Int x) { return x[0] + x[1] + x[2] + x[3]; }

  PYSERVE_OP Float load_half(const uint8_t* p) {
    return Float{half(p), half(p + 2), half(p + 4), half(p + 6)};
  }
  PYSERVE_OP float half(const uint8_t* p) { return f16_to_float(read<uint16_t>(p)); }
  PYSERVE_OP Float load_bf16(const uint8_t* p) {
    return Float{bf16(p), bf16(p + 2), bf16(p + 4), bf16(p + 6)};
  }
  PYSERVE_OP float bf16(const uint8_t* p) { return bf16_to_float(read<uint16_t>(p)); }
  PYSERVE_OP Float load_uint8(const uint8_t* p) { return Float{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
  PYSERVE_OP Float load_int8(const uint8_t* p) {
    return Float{float(int8_t(p[0])), float(int8_t(p[1])), float(int8_t(p[2])), float(int8_t(p[3]))};
  }

  // One lane is the four columns of a row as a little-endian number.
  PYSERVE_OP Bytes load_bytes(const uint8_t* p) { return read<Bytes>(p); }
  PYSERVE_OP Bytes low_nibbles(Bytes x) { return x & 0x0f0f0f0fu; }
  PYSERVE_OP Bytes high_nibbles(Bytes x) { return (x >> 4) & 0x0f0f0f0fu; }
  template <int left>
  PYSERVE_OP Bytes with_high_bits(Bytes x, Bytes high, int mask) {
    return x | ((left >= 0 ? high << (left >= 0 ? left : 0) : high >> (left < 0 ? -left : 0)) & (0x01010101u * uint32_t(mask)));
  }
  template <int bits, int count>
  PYSERVE_OP Int dot(Int sum, const Bytes* q, const int8_t* a) {
    for (int j = 0; j < count; ++j)
      for (int c = 0; c < 4; ++c) sum += (Int)((q[j] >> (8 * c)) & 255u) * int32_t(a[4 * j + c]);
    return sum;
  }
  PYSERVE_OP void prefetch(const uint8_t*) {}
#undef PYSERVE_OP
};

}  // namespace pyserve
