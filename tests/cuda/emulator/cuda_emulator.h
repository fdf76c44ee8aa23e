// What a kernel sees of CUDA when a host compiler builds it: the built-in variables, shared memory, launches. See engine.h for what the emulator promises.
#pragma once
#include "engine.h"
#include "intrinsics.h"
#include "runtime.h"

#define threadIdx (emulator::engine.current->index)
#define blockIdx (emulator::engine.block_index)
#define blockDim (emulator::engine.block)
#define gridDim (emulator::engine.grid)
constexpr int warpSize = emulator::kWarpSize;

// PYSERVE_SHARED(float, tile, [4][64]);  PYSERVE_SHARED(int, flag, );
#define PYSERVE_SHARED(type, name, dims)  \
  static char name##_key_;                \
  using name##_type_ = type dims;         \
  name##_type_& name = *static_cast<name##_type_*>(emulator::shared_variable(&name##_key_, sizeof(name##_type_)))
// PYSERVE_DYN_SHARED(float, scratch): a pointer to all of the launch's dynamic shared memory
#define PYSERVE_DYN_SHARED(type, name) type* name = static_cast<type*>(emulator::dynamic_shared())

namespace emulator {

// What lands when a wait covers the copy. In this header, hence in the kernel's own instrumented code: the sanitizers see the access.
[[gnu::noinline]] inline void land(const AsyncCopy& copy) {
  if (copy.num_bytes == 16 && copy.source_bytes == 16) {
    *static_cast<uint4*>(copy.to) = *static_cast<const uint4*>(copy.from);
    return;
  }
  for (int i = 0; i < copy.num_bytes; ++i) static_cast<char*>(copy.to)[i] = i < copy.source_bytes ? static_cast<const char*>(copy.from)[i] : 0;
}

inline void async_copy(void* to, const void* from, int num_bytes, int source_bytes, Site site) {
  if (source_bytes > 0) {  // a bad source address shows at the call, not at the wait
    [[maybe_unused]] volatile char first = static_cast<const char*>(from)[0], last = static_cast<const char*>(from)[source_bytes - 1];
  }
  for (int i = 0; i < num_bytes; ++i) static_cast<volatile char*>(to)[i] = static_cast<char>(0xff);  // until it has landed
  start_async_copy(AsyncCopy{to, from, num_bytes, source_bytes, 0}, site);
}

inline void wait_async_copies(int num_groups_left, Site site) {
  if (is_skipped(site)) return;
  AsyncCopy copy;
  while (take_async_copy(num_groups_left, &copy)) land(copy);
}

template <int count, bool is_transposed>
inline void load_matrices(uint32_t* out, const void* row, Site site) {
  const void* sources[2 * count];
  load_matrices(out, row, count, is_transposed, sources, site);
#ifdef EMULATOR_TSAN
  for (const void* source : sources) {  // as the lane's own reads
    [[maybe_unused]] volatile uint16_t value = *static_cast<const uint16_t*>(source);
  }
#endif
}

}  // namespace emulator
