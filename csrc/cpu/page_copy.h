// Copies between pages of the pool and a host buffer in which they stand one after the other.
#pragma once
#include <cstdint>
#include <vector>

namespace pyserve {

// `count` runs of `run_pages` adjacent pages each, their starts `stride_pages` apart (negative: downwards). The first page of run i is page
// list_offset + i * run_pages of the host buffer.
struct Comb {
  int64_t start_page, run_pages, stride_pages, count, list_offset;
};

struct PageCopy {
  uint8_t* pool;
  int64_t num_pages, page_bytes;  // of the pool
  uint8_t* host;
  int64_t host_bytes;
  std::vector<Comb> combs;
  bool to_host;
};

int64_t num_pages(const PageCopy& copy);
// Throws std::invalid_argument when nothing would be copied, or a comb reaches past the pool or the host buffer (R18).
void check_copy(const PageCopy& copy);
// Only for a copy that passed check_copy. Writes the comb's own pages and nothing else.
void page_copy(const PageCopy& copy);

}  // namespace pyserve
