#include "page_copy.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../check.h"
#include "isa.h"
#include "page_hash.h"

#if PYSERVE_X86
#include <emmintrin.h>
#endif

namespace pyserve {
namespace {

// Large copies are written past the caches, a line at a time: nobody reads them soon, a store into the cache would read each line first, and the pages that
// the decoding steps work on stay where they are. One sequence of a small model is far beyond this size.
constexpr int64_t kLargeBytes = 1 << 20;
// Small enough to be in the first-level cache still when it is hashed, so that memory is read once.
constexpr int64_t kPiece = 4096;

#if PYSERVE_X86
constexpr bool kCanStream = true;

bool is_aligned(const uint8_t* data) { return reinterpret_cast<uintptr_t>(data) % sizeof(__m128i) == 0; }

// One stripe of PageHash, 64 bytes, to an aligned place.
void stream_line(uint8_t* to, const uint8_t* from) {
  for (size_t i = 0; i < PageHash::kStripe; i += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
}

// Orders the streamed lines before whatever tells others that the copy is done, or has failed.
struct StreamEnd {
  ~StreamEnd() { _mm_sfence(); }
};
#else
constexpr bool kCanStream = false;
bool is_aligned(const uint8_t*) { return false; }
void stream_line(uint8_t* to, const uint8_t* from) { std::memcpy(to, from, PageHash::kStripe); }
struct StreamEnd {};
#endif

class Mover {
 public:
  explicit Mover(int64_t copy_bytes) : is_streamed_(kCanStream && copy_bytes >= kLargeBytes) {}

  void copy(uint8_t* to, const uint8_t* from, int64_t num_bytes) const {
    int64_t done = 0;
    if (is_streamed_ && is_aligned(to)) {
      for (; done + kLine <= num_bytes; done += kLine) stream_line(to + done, from + done);
    }
    std::memcpy(to + done, from + done, static_cast<size_t>(num_bytes - done));
  }

  uint64_t copy_and_hash(uint8_t* to, const uint8_t* from, int64_t num_bytes) const {
    PageHash hash;
    if (is_streamed_ && is_aligned(to)) {
      hash.update(from, static_cast<size_t>(num_bytes), [to, from](const uint8_t* line) { stream_line(to + (line - from), line); });
      const int64_t whole = num_bytes / kLine * kLine;
      std::memcpy(to + whole, from + whole, static_cast<size_t>(num_bytes - whole));
      return hash.result();
    }
    for (int64_t done = 0; done < num_bytes; done += kPiece) {
      const size_t piece = static_cast<size_t>(std::min(kPiece, num_bytes - done));
      std::memcpy(to + done, from + done, piece);
      hash.update(from + done, piece);
    }
    return hash.result();
  }

 private:
  static constexpr int64_t kLine = PageHash::kStripe;
  const bool is_streamed_;
  const StreamEnd end_{};
};

// Adjacent pages, `first` the first one's place in the host buffer. Pages without a hash in between are copied together.
void copy_hashed(const PageCopy& copy, const Mover& mover, uint8_t* to, const uint8_t* from, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count;) {
    int64_t* hash = copy.hashes + first + i;
    const int64_t offset = i * copy.page_bytes;
    if (*hash) {
      const auto found = static_cast<int64_t>(mover.copy_and_hash(to + offset, from + offset, copy.page_bytes));
      if (!copy.to_host && found != *hash) throw PageMismatch("page " + std::to_string(first + i) + " of the parked state is not what was parked");
      *hash = found;
      ++i;
      continue;
    }
    int64_t plain = 1;
    while (i + plain < count && !hash[plain]) ++plain;
    mover.copy(to + offset, from + offset, plain * copy.page_bytes);
    i += plain;
  }
}

}  // namespace

int64_t num_pages(const PageCopy& copy) {
  int64_t total = 0;
  for (const Comb& comb : copy.combs) total += comb.run_pages * comb.count;
  return total;
}

void check_copy(const PageCopy& copy) {
  check(copy.page_bytes > 0, "pool: a page must have at least one byte");
  check(!copy.combs.empty(), "combs: a copy of zero pages");
  const int64_t host_pages = copy.host_bytes / copy.page_bytes;
  for (size_t i = 0; i < copy.combs.size(); ++i) {
    const Comb& comb = copy.combs[i];
    check(comb.run_pages > 0 && comb.count > 0, "combs[", i, "]: a copy of zero pages");
    const int64_t last_start = comb.start_page + comb.stride_pages * (comb.count - 1);
    const int64_t lowest = std::min(comb.start_page, last_start), highest = std::max(comb.start_page, last_start) + comb.run_pages - 1;
    check(lowest >= 0 && highest < copy.num_pages, "combs[", i, "]: pages ", lowest, "..", highest, " are not all in the pool of ", copy.num_pages);
    const int64_t end = comb.list_offset + comb.run_pages * comb.count;
    check(comb.list_offset >= 0 && end <= host_pages, "combs[", i, "]: needs pages ", comb.list_offset, "..", end - 1, " of host, which holds ", host_pages);
  }
}

void page_copy(const PageCopy& copy) {
  const Mover mover(num_pages(copy) * copy.page_bytes);
  for (const Comb& comb : copy.combs) {
    const int64_t run_bytes = comb.run_pages * copy.page_bytes;
    for (int64_t run = 0; run < comb.count; ++run) {
      uint8_t* in_pool = copy.pool + (comb.start_page + run * comb.stride_pages) * copy.page_bytes;
      uint8_t* in_host = copy.host + (comb.list_offset + run * comb.run_pages) * copy.page_bytes;
      uint8_t* to = copy.to_host ? in_host : in_pool;
      const uint8_t* from = copy.to_host ? in_pool : in_host;
      if (copy.hashes) {
        copy_hashed(copy, mover, to, from, comb.list_offset + run * comb.run_pages, comb.run_pages);
      } else {
        mover.copy(to, from, run_bytes);
      }
    }
  }
}

}  // namespace pyserve
