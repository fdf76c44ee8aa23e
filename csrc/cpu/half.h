// float <-> 16-bit floats, round to nearest even; the same bits as the hardware's conversion, NaN payloads aside.
#pragma once
#include <cstdint>
#include <cstring>

namespace pyserve {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bf16_to_float(uint16_t value) { return float_from_bits(static_cast<uint32_t>(value) << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // rounding could carry a NaN to infinity
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t rest = value & 0x7fffu;
  if (rest >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x0400u) return float_from_bits(sign | ((rest << 13) + 0x38000000u));
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;  // subnormal: exact
  return float_from_bits(sign | bits_of_float(magnitude));
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (rest < 0x38800000u) {                                              // below 2^-14: the sum's last place is 2^-24, so the addition rounds
    const float rounded = float_from_bits(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of_float(rounded) - bits_of_float(0.5f)));
  }
  return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

}  // namespace pyserve
