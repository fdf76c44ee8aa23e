// A block's shared memory, and the copies on their way into it (cp.async).
//
// Each variable is a heap block of exactly its size under ASan; else it stands between guard bytes that are checked when the block ends. All is filled with
// 0xff bytes, NaN in every float type. Under TSan the variables lie in one arena that the host allocates before the block starts (allocating counts as
// writing), and memory is freed only when the launch is over, so that no address means two things in one launch.
#include <cstdlib>

#include "engine.h"

namespace emulator {

namespace {

constexpr unsigned char kGuardByte = 0xa5, kFreshByte = 0xff;
#ifdef EMULATOR_ASAN
constexpr size_t kGuardBytes = 0;
#else
constexpr size_t kGuardBytes = 256;
#endif
constexpr int kMaxVariables = 64;
constexpr size_t kSyncPointBytes = 4096;

struct Variable {
  const void* key;
  char* data;
  size_t num_bytes;
};
Variable variables[kMaxVariables];
int num_variables = 0;
size_t static_bytes = 0;

#ifdef EMULATOR_TSAN
char* arena = nullptr;
constexpr size_t kMaxKept = 1 << 16;
void* kept[kMaxKept];
size_t num_kept = 0;
#endif

char* new_memory(size_t num_bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, num_bytes + 2 * kGuardBytes + (num_bytes == 0)) != 0) std::abort();
  volatile unsigned char* bytes = static_cast<unsigned char*>(memory);  // volatile: must not become a memset, which TSan intercepts
  for (size_t i = 0; i < num_bytes + 2 * kGuardBytes; ++i) bytes[i] = i < kGuardBytes || i >= num_bytes + kGuardBytes ? kGuardByte : kFreshByte;
  return static_cast<char*>(memory) + kGuardBytes;
}

void delete_memory(char* data, size_t num_bytes, const char* what) {
  const volatile unsigned char* bytes = reinterpret_cast<unsigned char*>(data) - kGuardBytes;
  for (size_t i = 0; i < kGuardBytes; ++i) {
    if (bytes[i] == kGuardByte && bytes[num_bytes + kGuardBytes + i] == kGuardByte) continue;
    fail("block (%u,%u,%u) wrote outside %s of %zu bytes", engine.block_index.x, engine.block_index.y, engine.block_index.z, what, num_bytes);
    break;
  }
  void* memory = data - kGuardBytes;
#ifdef EMULATOR_TSAN
  if (num_kept < kMaxKept) {
    kept[num_kept++] = memory;
    return;
  }
#endif
  std::free(memory);
}

}  // namespace

void begin_shared(size_t dynamic_bytes) {
  if (dynamic_bytes > 0) engine.dynamic_shared = new_memory(dynamic_bytes);
#ifdef EMULATOR_TSAN
  arena = new_memory(engine.config.static_shared_limit);
  engine.sync_points = new_memory(kSyncPointBytes);
#endif
}

void end_shared() {
  if (engine.dynamic_shared != nullptr) delete_memory(engine.dynamic_shared, engine.dynamic_bytes, "the dynamic shared memory");
  engine.dynamic_shared = nullptr;
#ifdef EMULATOR_TSAN
  delete_memory(arena, engine.config.static_shared_limit, "the shared variables");
  delete_memory(engine.sync_points, kSyncPointBytes, "the emulator's own memory");
#else
  for (int i = 0; i < num_variables; ++i) delete_memory(variables[i].data, variables[i].num_bytes, "a shared variable");
#endif
  num_variables = 0;
  static_bytes = 0;
}

void free_shared() {
#ifdef EMULATOR_TSAN
  for (size_t i = 0; i < num_kept; ++i) std::free(kept[i]);
  num_kept = 0;
#endif
}

void* shared_variable(const void* key, size_t num_bytes) {
  for (int i = 0; i < num_variables; ++i) {
    if (variables[i].key == key) return variables[i].data;
  }
  if (num_variables == kMaxVariables) fail("more than %d shared variables", kMaxVariables);
  [[maybe_unused]] const size_t offset = static_bytes;
  static_bytes += (num_bytes + 127) / 128 * 128;
  if (static_bytes > engine.config.static_shared_limit) {
    fail("static shared memory of %zu bytes is over the limit of %zu", static_bytes, engine.config.static_shared_limit);
  }
#ifdef EMULATOR_TSAN
  char* data = arena + offset;
#else
  char* data = new_memory(num_bytes);
#endif
  variables[num_variables++] = Variable{key, data, num_bytes};
  return data;
}

void* dynamic_shared() { return engine.dynamic_shared; }

void start_async_copy(const AsyncCopy& copy, Site site) {
  const auto is_aligned = [&](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(copy.num_bytes) == 0; };
  if (!is_aligned(copy.to) || (copy.source_bytes > 0 && !is_aligned(copy.from))) {
    fail("cp.async of %d bytes at %s:%d: misaligned address (to %p, from %p)", copy.num_bytes, site.file, site.line, copy.to, copy.from);
  }
  Thread* thread = engine.current;
  if (thread->num_copies == kMaxAsyncCopies) fail("cp.async at %s:%d: more than %d copies in flight", site.file, site.line, kMaxAsyncCopies);
  AsyncCopy& place = thread->copies[(thread->first_copy + static_cast<unsigned>(thread->num_copies++)) % kMaxAsyncCopies];
  place = copy;
  place.group = thread->copy_group;
}

void commit_async_copies() { ++engine.current->copy_group; }

bool take_async_copy(int num_groups_left, AsyncCopy* copy) {
  Thread* thread = engine.current;
  const AsyncCopy& oldest = thread->copies[thread->first_copy % kMaxAsyncCopies];
  if (thread->num_copies == 0 || oldest.group >= thread->copy_group - num_groups_left) return false;
  *copy = oldest;
  ++thread->first_copy;
  --thread->num_copies;
  return true;
}

}  // namespace emulator
