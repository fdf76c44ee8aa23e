#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

namespace pyserve {
namespace {

constexpr size_t huge_page = size_t{2} << 20, chunk_bytes = size_t{32} << 20, line = 64;

struct Chunks {
  std::mutex mutex;
  std::weak_ptr<uint8_t> last;  // its pieces keep it
  size_t used = 0, size = 0;
};

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

std::shared_ptr<uint8_t> map_memory(size_t num_bytes) {
  const size_t size = round_up(std::max<size_t>(num_bytes, 1), huge_page) + huge_page;  // room to begin at a huge page
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* start = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(mapped), huge_page));
#ifdef MADV_HUGEPAGE
  madvise(start, size - huge_page, MADV_HUGEPAGE);  // advice: a system without huge pages goes on with small ones
#endif
  return {start, [mapped, size](uint8_t*) { munmap(mapped, size); }};
}

std::shared_ptr<uint8_t> share_memory(size_t num_bytes) {
  static Chunks chunks;
  const size_t needed = round_up(num_bytes, line);
  std::lock_guard<std::mutex> lock(chunks.mutex);
  std::shared_ptr<uint8_t> chunk = chunks.last.lock();
  if (!chunk || chunks.size - chunks.used < needed) {
    chunks.size = std::max(round_up(needed, huge_page), chunk_bytes);
    chunks.used = 0;
    chunk = map_memory(chunks.size);
    chunks.last = chunk;
  }
  uint8_t* piece = chunk.get() + chunks.used;
  chunks.used += needed;
  return {chunk, piece};
}

}  // namespace pyserve
