#include "page_copy.h"

#include <algorithm>
#include <cstring>

#include "../check.h"

namespace pyserve {

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
      std::memcpy(copy.to_host ? in_host : in_pool, copy.to_host ? in_pool : in_host, static_cast<size_t>(run_bytes));
    }
  }
}

}  // namespace pyserve
