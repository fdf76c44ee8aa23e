#include "page_copy.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../check.h"
#include "page_hash.h"

namespace pyserve {
namespace {

// Small enough to be in the first-level cache still when it is hashed, so that memory is read once.
constexpr int64_t kPiece = 4096;

uint64_t copy_and_hash(uint8_t* to, const uint8_t* from, int64_t num_bytes) {
  PageHash hash;
  for (int64_t done = 0; done < num_bytes; done += kPiece) {
    const size_t piece = static_cast<size_t>(std::min(kPiece, num_bytes - done));
    std::memcpy(to + done, from + done, piece);
    hash.update(from + done, piece);
  }
  return hash.result();
}

// Adjacent pages, `first` the first one's place in the host buffer. Pages without a hash in between are copied together.
void copy_hashed(const PageCopy& copy, uint8_t* to, const uint8_t* from, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count;) {
    int64_t* hash = copy.hashes + first + i;
    const int64_t offset = i * copy.page_bytes;
    if (*hash) {
      const auto found = static_cast<int64_t>(copy_and_hash(to + offset, from + offset, copy.page_bytes));
      if (!copy.to_host && found != *hash) throw PageMismatch("page " + std::to_string(first + i) + " of the parked state is not what was parked");
      *hash = found;
      ++i;
      continue;
    }
    int64_t plain = 1;
    while (i + plain < count && !hash[plain]) ++plain;
    std::memcpy(to + offset, from + offset, static_cast<size_t>(plain * copy.page_bytes));
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
  for (const Comb& comb : copy.combs) {
    const int64_t run_bytes = comb.run_pages * copy.page_bytes;
    for (int64_t run = 0; run < comb.count; ++run) {
      uint8_t* in_pool = copy.pool + (comb.start_page + run * comb.stride_pages) * copy.page_bytes;
      uint8_t* in_host = copy.host + (comb.list_offset + run * comb.run_pages) * copy.page_bytes;
      uint8_t* to = copy.to_host ? in_host : in_pool;
      const uint8_t* from = copy.to_host ? in_pool : in_host;
      if (copy.hashes) {
        copy_hashed(copy, to, from, comb.list_offset + run * comb.run_pages, comb.run_pages);
      } else {
        std::memcpy(to, from, static_cast<size_t>(run_bytes));
      }
    }
  }
}

}  // namespace pyserve
