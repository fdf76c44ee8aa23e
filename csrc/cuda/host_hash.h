// The hash of page_move.cuh on the host, for pages that were parked without one and are to leave memory: the device checks it when it has them back (R23b).
#pragma once
#include <cstdint>
#include <cstring>

namespace pyserve::cuda {

// `num_bytes` is a multiple of 16, as for the device. Never 0, which stands for "no hash".
inline uint64_t host_page_hash(const uint8_t* page, int64_t num_bytes) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
  };
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_bytes / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, page + 8 * i, 8);
    sum += mix(word + static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15ull);
  }
  return sum == 0 ? 1 : sum;
}

}  // namespace pyserve::cuda
