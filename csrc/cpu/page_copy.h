// Copies between pages of the pool and a host buffer in which they stand one after the other.
#pragma once
#include <cstdint>
#include <stdexcept>
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
  // One for each page of the host buffer, or null. Of the pages copied, those whose entry is 0 are not looked at. Out of the pool the others' entries become
  // their hashes; into the pool they must be their hashes.
  int64_t* hashes = nullptr;
};

// A page of the host buffer is not what its hash says (R23b).
struct PageMismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

int64_t num_pages(const PageCopy& copy);
// Throws std::invalid_argument when nothing would be copied, or a comb reaches past the pool or the host buffer (R18).
void check_copy(const PageCopy& copy);
// Only for a copy that passed check_copy. Writes the combs' own pages and nothing else. Throws PageMismatch, with some of the pages written.
void page_copy(const PageCopy& copy);

}  // namespace pyserve
