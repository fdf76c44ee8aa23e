// Device and pinned memory, and copies.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <vector>

#include "quiet.h"
#include "runtime.h"

namespace emulator {

namespace {

struct Block {
  size_t num_bytes;
  Place place;
  bool is_owned;  // allocated here
};

struct Memory {
  std::mutex mutex;
  std::map<const char*, Block> blocks;  // by first byte
  int64_t num_blocked = 0;              // copies that had to wait for pageable memory
  int64_t num_calls = 0;                // copy calls posted
  int64_t device_bytes = 0;             // allocated here
};
Memory& memory() {
  static Memory* all = new Memory;
  return *all;
}

// Where [begin, begin + num_bytes) lies; false when it starts in a known block and leaves it.
bool find(const void* begin, size_t num_bytes, Place* place) {
  const char* first = static_cast<const char*>(begin);
  Quiet quiet;
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto& blocks = memory().blocks;
  auto after = blocks.upper_bound(first);
  *place = Place::pageable;
  if (after != blocks.end() && after->first < first + num_bytes) return false;  // runs into a block from below
  if (after == blocks.begin()) return true;
  const auto& [start, block] = *std::prev(after);
  if (first >= start + block.num_bytes) return true;
  *place = block.place;
  return first + num_bytes <= start + block.num_bytes;
}

cudaError_t add_block(void* begin, size_t num_bytes, Place place, bool is_owned) {
  Place found;
  const bool is_inside = find(begin, num_bytes, &found);
  if (!is_inside || found != Place::pageable) return cudaErrorHostMemoryAlreadyRegistered;
  Quiet quiet;
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks[static_cast<const char*>(begin)] = Block{num_bytes, place, is_owned};
  if (place == Place::device && is_owned) memory().device_bytes += static_cast<int64_t>(num_bytes);
  return cudaSuccess;
}

cudaError_t remove_block(void* begin, Place place, bool is_owned) {
  Quiet quiet;
  std::unique_lock<std::mutex> lock(memory().mutex);
  const auto at = memory().blocks.find(static_cast<const char*>(begin));
  if (at == memory().blocks.end() || at->second.place != place || at->second.is_owned != is_owned) return cudaErrorInvalidValue;
  const Range range{at->first, at->second.num_bytes};
  lock.unlock();
  if (is_in_use(range)) {
    fail("memory at %p of %zu bytes is given up while a copy of it is outstanding", begin, range.num_bytes);
    return cudaErrorInvalidValue;
  }
  lock.lock();
  memory().blocks.erase(range.begin);
  if (place == Place::device && is_owned) memory().device_bytes -= static_cast<int64_t>(range.num_bytes);
  return cudaSuccess;
}

bool counts_down(int64_t* left) {  // true when the time has come
  if (*left < 0) return false;
  return (*left)-- == 0;
}

struct Piece {
  char* to;
  const char* from;
  size_t num_bytes;
};

void carry_out(const Piece* pieces, size_t num_pieces) {
  for (size_t i = 0; i < num_pieces; ++i) std::memcpy(pieces[i].to, pieces[i].from, pieces[i].num_bytes);
}

// Is what CUDA calls `kind` true of the two ends?
bool fits_kind(cudaMemcpyKind kind, Place to, Place from) {
  switch (kind) {
    case cudaMemcpyHostToDevice: return to == Place::device && from != Place::device;
    case cudaMemcpyDeviceToHost: return to != Place::device && from == Place::device;
    case cudaMemcpyDeviceToDevice: return to == Place::device && from == Place::device;
    default: return true;
  }
}

struct Ends {
  Range to, from;
};

// One operation of the copy engines for each of `ends`.
cudaError_t post_copy(std::vector<Piece> pieces, const std::vector<Ends>& ends, cudaMemcpyKind kind, cudaStream_t stream) {
  bool is_pageable = false;
  std::vector<Range> uses;
  for (const Ends& end : ends) {
    Place to, from;
    if (!find(end.to.begin, end.to.num_bytes, &to) || !find(end.from.begin, end.from.num_bytes, &from)) return cudaErrorInvalidValue;
    if (!fits_kind(kind, to, from)) return cudaErrorInvalidValue;
    if (to == Place::pageable && from == Place::pageable) return cudaErrorInvalidValue;  // neither is memory that the device knows
    is_pageable |= to == Place::pageable || from == Place::pageable;
    uses.push_back(end.to);
    uses.push_back(end.from);
  }
  if (counts_down(&knobs.posts_until_failure)) return cudaErrorUnknown;
  memory().num_calls += 1;
  memory().num_blocked += is_pageable;
  if (is_pageable) count_wait();
  auto work = [pieces = std::move(pieces), num_operations = ends.size()] {
    if (knobs.delay_us > 0) usleep(static_cast<useconds_t>(static_cast<size_t>(knobs.delay_us) * num_operations));
    if (counts_down(&knobs.runs_until_failure)) return cudaErrorIllegalAddress;
    carry_out(pieces.data(), pieces.size());
    return cudaSuccess;
  };
  return post(stream, work, uses.data(), static_cast<int>(uses.size()), is_pageable);
}

}  // namespace

Knobs knobs;

static std::atomic<int64_t> num_slow_calls{0};
void count_slow_call() { ++num_slow_calls; }

}  // namespace emulator

using namespace emulator;

extern "C" {

cudaError_t cudaMalloc(void** result, size_t num_bytes) {
  count_slow_call();
  if (spoils_recording()) return remember(cudaErrorStreamCaptureUnsupported);
  if (device_error() != cudaSuccess) return device_error();
  size_t free = 0, total = 0;
  (void)cudaMemGetInfo(&free, &total);
  if (num_bytes > free) return remember(cudaErrorMemoryAllocation);
  if (posix_memalign(result, 512, num_bytes + (num_bytes == 0)) != 0) return remember(cudaErrorMemoryAllocation);
  std::memset(*result, 0xff, num_bytes);
  return remember(add_block(*result, num_bytes, Place::device, true));
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(memory().mutex);
  *total = static_cast<size_t>(knobs.device_bytes);
  *free = static_cast<size_t>(std::max<int64_t>(0, knobs.device_bytes - memory().device_bytes));
  return device_error();
}

cudaError_t cudaMallocManaged(void** result, size_t num_bytes, unsigned) { return cudaMalloc(result, num_bytes); }

cudaError_t cudaFree(void* begin) {
  count_slow_call();
  if (spoils_recording()) return remember(cudaErrorStreamCaptureUnsupported);
  if (begin == nullptr) return cudaSuccess;
  const cudaError_t error = remove_block(begin, Place::device, true);
  if (error == cudaSuccess) std::free(begin);
  return remember(error);
}

cudaError_t cudaHostAlloc(void** result, size_t num_bytes, unsigned) {
  count_slow_call();
  if (spoils_recording()) return remember(cudaErrorStreamCaptureUnsupported);
  if (device_error() != cudaSuccess) return device_error();
  if (knobs.are_pins_refused || counts_down(&knobs.pins_until_failure)) return remember(cudaErrorMemoryAllocation);
  if (knobs.pin_delay_us > 0) usleep(static_cast<useconds_t>(knobs.pin_delay_us));
  if (posix_memalign(result, 4096, num_bytes + (num_bytes == 0)) != 0) return remember(cudaErrorMemoryAllocation);
  return remember(add_block(*result, num_bytes, Place::pinned, true));
}

cudaError_t cudaFreeHost(void* begin) {
  count_slow_call();
  if (spoils_recording()) return remember(cudaErrorStreamCaptureUnsupported);
  if (begin == nullptr) return cudaSuccess;
  const cudaError_t error = remove_block(begin, Place::pinned, true);
  if (error == cudaSuccess) std::free(begin);
  return remember(error);
}

cudaError_t cudaHostRegister(void* begin, size_t num_bytes, unsigned) {
  count_slow_call();
  if (spoils_recording()) return remember(cudaErrorStreamCaptureUnsupported);
  if (device_error() != cudaSuccess) return device_error();
  if (begin == nullptr || num_bytes == 0) return remember(cudaErrorInvalidValue);
  if (knobs.are_pins_refused || counts_down(&knobs.pins_until_failure)) return remember(cudaErrorMemoryAllocation);
  if (knobs.pin_delay_us > 0) usleep(static_cast<useconds_t>(knobs.pin_delay_us));
  return remember(add_block(begin, num_bytes, Place::pinned, false));
}

cudaError_t cudaHostUnregister(void* begin) {
  count_slow_call();
  const cudaError_t error = remove_block(begin, Place::pinned, false);
  return remember(error == cudaErrorInvalidValue && emulator::engine.error == nullptr ? cudaErrorHostMemoryNotRegistered : error);
}

cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* begin, unsigned) {
  Place place;
  if (!find(begin, 1, &place) || place != Place::pinned) return remember(cudaErrorInvalidValue);
  *device_pointer = begin;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Place place;
  find(pointer, 1, &place);
  *attributes = cudaPointerAttributes{};
  attributes->type = place == Place::device ? cudaMemoryTypeDevice : place == Place::pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (num_bytes == 0) return remember(device_error());
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  return remember(post_copy({Piece{target, source, num_bytes}}, {Ends{{target, num_bytes}, {source, num_bytes}}}, kind, stream));
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  constexpr size_t kMaxPitch = 0x7fffffff;
  if (width > to_pitch || width > from_pitch || to_pitch > kMaxPitch || from_pitch > kMaxPitch) return remember(cudaErrorInvalidPitchValue);
  if (width == 0 || height == 0) return remember(device_error());
  std::vector<Piece> pieces;
  for (size_t row = 0; row < height; ++row) {
    pieces.push_back(Piece{static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width});
  }
  const Ends ends{{pieces.front().to, (height - 1) * to_pitch + width}, {pieces.front().from, (height - 1) * from_pitch + width}};
  return remember(post_copy(std::move(pieces), {ends}, kind, stream));
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t num_bytes, cudaStream_t stream) {
  Place place;
  if (!find(to, num_bytes, &place) || place == Place::pageable) return remember(cudaErrorInvalidValue);
  const Range uses{static_cast<char*>(to), num_bytes};
  auto work = [=] {
    std::memset(to, value, num_bytes);
    return cudaSuccess;
  };
  return remember(post(stream, work, &uses, 1, false));
}

// The driver's batched copy (12.8): entries in any order, none at all when one is bad.
int emulator_cuMemcpyBatchAsync(const uintptr_t* to, const uintptr_t* from, const size_t* sizes, size_t count, const void* attributes,
                                const size_t* attribute_starts, size_t num_attributes, size_t* failed, cudaStream_t stream) {
  constexpr int kInvalidValue = 1;
  const bool is_good = count > 0 && stream != nullptr && attributes != nullptr && num_attributes > 0 && num_attributes <= count && attribute_starts[0] == 0;
  if (failed != nullptr) *failed = SIZE_MAX;
  if (!is_good) return kInvalidValue;
  std::vector<Piece> pieces;
  std::vector<Ends> ends;
  for (size_t i = 0; i < count; ++i) {
    char* target = reinterpret_cast<char*>(to[i]);
    const char* source = reinterpret_cast<const char*>(from[i]);
    if (sizes[i] == 0) return kInvalidValue;
    pieces.push_back(Piece{target, source, sizes[i]});
    ends.push_back(Ends{{target, sizes[i]}, {source, sizes[i]}});
  }
  std::reverse(pieces.begin(), pieces.end());
  return static_cast<int>(post_copy(std::move(pieces), ends, cudaMemcpyDefault, stream));
}

// --- knobs
void emulator_slow_copies(int delay_us) { knobs.delay_us = delay_us; }
void emulator_fail_posts(int64_t after) { knobs.posts_until_failure = after; }
void emulator_fail_runs(int64_t after) { knobs.runs_until_failure = after; }
void emulator_fail_pins(int64_t after) { knobs.pins_until_failure = after; }
void emulator_refuse_pins(int are_refused) { knobs.are_pins_refused = are_refused != 0; }
void emulator_slow_pins(int delay_us) { knobs.pin_delay_us = delay_us; }
void emulator_set_device_bytes(int64_t num_bytes) { knobs.device_bytes = num_bytes; }
void emulator_set_driver_version(int version) { knobs.driver_version = version; }
// Makes memory of the test device memory (0) or pinned memory (1).
int emulator_register(void* begin, size_t num_bytes, int is_pinned) {
  return static_cast<int>(add_block(begin, num_bytes, is_pinned ? Place::pinned : Place::device, false));
}
int emulator_unregister(void* begin, int is_pinned) { return static_cast<int>(remove_block(begin, is_pinned ? Place::pinned : Place::device, false)); }
int64_t emulator_num_copy_calls() { return memory().num_calls; }
int64_t emulator_num_blocking_copies() { return memory().num_blocked; }
int64_t emulator_num_slow_calls() { return num_slow_calls; }
int64_t emulator_num_blocks(int is_pinned) {  // known pieces of memory
  Quiet quiet;
  std::lock_guard<std::mutex> lock(memory().mutex);
  return std::count_if(memory().blocks.begin(), memory().blocks.end(),
                       [&](const auto& entry) { return (entry.second.place == Place::pinned) == (is_pinned != 0); });
}
}
