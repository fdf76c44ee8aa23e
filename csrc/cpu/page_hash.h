// A 64-bit hash of a page, taken while the page is copied, so that parked state is checked before it is used again (R23b).
//
// Eight lanes take eight words at a time: lane = rotate((lane ^ word) * odd). Each lane is a chain of its own, so the multiplications overlap and the hash of
// data in the cache costs less than the copy that brings it there. Every operation can be undone, on the lanes and where they are joined: two pages that
// differ in one word only, a flipped bit for example, always have different hashes. Other differences go unseen with a probability of about 2^-64. Not a
// cryptographic hash: it is there for broken memory and disks, not for an adversary.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pyserve {

class PageHash {
 public:
  static constexpr size_t kStripe = 64;

  PageHash() {
    for (size_t i = 0; i < kLanes; ++i) lanes_[i] = kOdd * (2 * i + 1);
  }

  // The next bytes. Only the last call may pass a number of them that is no multiple of kStripe.
  void update(const uint8_t* data, size_t num_bytes) {
    update(data, num_bytes, [](const uint8_t*) {});
  }

  // The same; `each` is called with every whole stripe, so that a copy can be made of it while it is at hand.
  template <class Each>
  void update(const uint8_t* data, size_t num_bytes, Each each) {
    num_bytes_ += num_bytes;
    uint64_t lanes[kLanes];
    std::memcpy(lanes, lanes_, sizeof lanes);
    for (; num_bytes >= kStripe; data += kStripe, num_bytes -= kStripe) {
      each(data);
      take(lanes, data);
    }
    if (num_bytes) {
      uint8_t last[kStripe] = {};
      std::memcpy(last, data, num_bytes);
      take(lanes, last);
    }
    std::memcpy(lanes_, lanes, sizeof lanes);
  }

  // Never 0, which stands for "no hash".
  uint64_t result() const {
    uint64_t hash = num_bytes_ * kOdd;
    for (uint64_t lane : lanes_) {
      hash = (hash ^ lane) * kOdd;
      hash ^= hash >> 32;
    }
    return hash ? hash : 1;
  }

 private:
  static constexpr size_t kLanes = 8;
  static constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio: its bits are spread evenly

  static void take(uint64_t (&lanes)[kLanes], const uint8_t* stripe) {
    for (size_t i = 0; i < kLanes; ++i) {
      uint64_t word;
      std::memcpy(&word, stripe + 8 * i, 8);
      const uint64_t product = (lanes[i] ^ word) * kOdd;
      lanes[i] = product << 29 | product >> 35;
    }
  }

  uint64_t lanes_[kLanes];
  uint64_t num_bytes_ = 0;
};

}  // namespace pyserve
