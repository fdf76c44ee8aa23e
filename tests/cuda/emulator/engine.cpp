// The order in which threads and blocks run, and launches.
#include "engine.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fiber.h"

#ifdef EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace emulator {

Engine engine;

namespace {

struct ReadyList {  // a ring of thread numbers
  unsigned* items = nullptr;
  unsigned head = 0, count = 0, capacity = 0;
  unsigned& at(unsigned i) { return items[(head + i) % capacity]; }
  void push(unsigned id) { at(count++) = id; }
  unsigned take(unsigned i) {
    const unsigned id = at(i);
    if (i == 0) {
      head = (head + 1) % capacity;
    } else {
      at(i) = at(count - 1);
    }
    --count;
    return id;
  }
} ready;

uint32_t warp_priority[kMaxThreads / kWarpSize], thread_priority[kMaxThreads];

// Not a std::mutex: TSan would take it for an order between streams that CUDA does not give.
class LaunchLock {
 public:
  LaunchLock() {  // kernels take milliseconds: who spins takes their core
    while (__atomic_test_and_set(&is_held, __ATOMIC_ACQUIRE)) usleep(100);
  }
  ~LaunchLock() { __atomic_clear(&is_held, __ATOMIC_RELEASE); }

 private:
  static bool is_held;
};
bool LaunchLock::is_held = false;

void grow(unsigned num_threads) {
  num_threads = (num_threads + kWarpSize - 1) / kWarpSize * kWarpSize;
  if (num_threads <= engine.capacity) return;
  Thread* threads = static_cast<Thread*>(std::calloc(num_threads, sizeof(Thread)));
  for (unsigned i = 0; i < engine.capacity; ++i) threads[i].stack = engine.threads[i].stack;
  std::free(engine.threads);
  std::free(engine.warps);
  std::free(ready.items);
  engine.threads = threads;
  give_stacks(engine.capacity, num_threads);
  engine.warps = static_cast<Warp*>(std::calloc(num_threads / kWarpSize, sizeof(Warp)));
  ready.items = static_cast<unsigned*>(std::calloc(num_threads, sizeof(unsigned)));
  engine.capacity = ready.capacity = num_threads;
}

void prepare_threads(unsigned num_threads) {
  const dim3 block = engine.block;
  for (unsigned i = 0; i < num_threads; ++i) {
    Thread& thread = engine.threads[i];
    thread.linear = i;
    thread.lane = i % kWarpSize;
    thread.warp = &engine.warps[i / kWarpSize];
    thread.warp->lanes[thread.lane] = &thread;
    thread.index = uint3{i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    thread.num_copies = thread.copy_group = 0;
    thread.first_copy = 0;
    prepare_stack(&thread);
    make_ready(&thread);
  }
}

void prepare_block(uint3 index, unsigned turn) {
  const unsigned num_threads = engine.num_threads = engine.num_live = engine.block.x * engine.block.y * engine.block.z;
  engine.block_index = index;
  for (Barrier& barrier : engine.barriers) barrier.arrived = 0;
  for (unsigned i = 0; i * kWarpSize < num_threads; ++i) {
    Warp& warp = engine.warps[i];
    const unsigned rest = num_threads - i * kWarpSize;
    warp.num_meetings = 0;
    warp.live = warp.existing = rest >= kWarpSize ? 0xffffffffu : (1u << rest) - 1;
  }
  ready.head = ready.count = 0;
  give_fibers(turn, num_threads);
  prepare_threads(num_threads);
  begin_shared(engine.dynamic_bytes);
#ifdef EMULATOR_TSAN
  __tsan_release(host.begin);  // after the block's memory was prepared; the host has acquired nothing from other blocks
#endif
  for (uint32_t& priority : warp_priority) priority = static_cast<uint32_t>(random_number() >> 32);
  for (unsigned i = 0; i < num_threads; ++i) thread_priority[i] = static_cast<uint32_t>(random_number() >> 32);
}

unsigned highest_priority() {
  if (random_number() % 256 == 0) warp_priority[random_number() % (kMaxThreads / kWarpSize)] = static_cast<uint32_t>(random_number() >> 32);
  unsigned best = 0;
  uint64_t best_priority = 0;
  for (unsigned i = 0; i < ready.count; ++i) {
    const unsigned id = ready.at(i);
    const uint64_t priority = static_cast<uint64_t>(warp_priority[id / kWarpSize]) << 32 | thread_priority[id];
    if (priority < best_priority) continue;
    best_priority = priority;
    best = i;
  }
  return best;
}

unsigned pick() {
  switch (engine.config.policy) {
    case in_order: return 0;
    case reverse: return ready.count - 1;
    case random_order: return static_cast<unsigned>(random_number() % ready.count);
    default: return highest_priority();
  }
}

void report_deadlock() {
  for (unsigned i = 0; i < engine.num_threads; ++i) {
    const Thread& thread = engine.threads[i];
    if (thread.state == State::done) continue;
    fail("deadlock in block (%u,%u,%u): thread (%u,%u,%u) waits in %s at %s:%d, %u of %u threads still alive", engine.block_index.x, engine.block_index.y,
         engine.block_index.z, thread.index.x, thread.index.y, thread.index.z, thread.what, thread.site.file, thread.site.line, engine.num_live,
         engine.num_threads);
    return;
  }
}

void run_block(uint3 index, unsigned turn) {
  prepare_block(index, turn);
  while (ready.count > 0 && engine.error == nullptr) to_thread(&engine.threads[ready.take(pick())]);
  if (engine.error == nullptr) report_deadlock();
  end_shared();
}

uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
  while (b != 0) {
    const uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

struct BlockWalk {  // every block once: first + i * stride, the stride coprime to their number
  uint64_t first = 0, stride = 1;
  explicit BlockWalk(uint64_t num_blocks) {
    if (engine.config.policy == in_order || num_blocks == 1) return;
    if (engine.config.policy == reverse) {
      first = stride = num_blocks - 1;
      return;
    }
    first = random_number() % num_blocks;
    do {
      stride = 1 + random_number() % num_blocks;
    } while (greatest_common_divisor(stride, num_blocks) != 1);
  }
};

}  // namespace

uint64_t random_number() {
  uint64_t& x = host.random_state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

void make_ready(Thread* thread) {
  thread->state = State::ready;
  ready.push(thread->linear);
}

void fail(const char* format, ...) {
  if (engine.error == nullptr) {
    int length = 0;
    if (engine.current != nullptr) {
      const uint3 block = engine.block_index, thread = engine.current->index;
      length = std::snprintf(host.error_text, sizeof host.error_text, "block (%u,%u,%u) thread (%u,%u,%u): ", block.x, block.y, block.z, thread.x, thread.y, thread.z);
    }
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(host.error_text + length, sizeof host.error_text - static_cast<size_t>(length), format, arguments);
    va_end(arguments);
    engine.error = host.error_text;
#ifdef EMULATOR_TSAN
    if (host.end != nullptr) __tsan_release(host.end);
#endif
  }
  if (engine.current == nullptr) return;
  engine.current->state = State::waiting;
  to_host(false);
  __builtin_trap();  // a failed launch resumes nobody
}

void wait_here(const char* what, Site site, const void* waits_for) {
  Thread* thread = engine.current;
  thread->state = State::waiting;
  thread->what = what;
  thread->site = site;
  thread->waits_for = waits_for;
  to_host(false);
}

void yield() {
  make_ready(engine.current);
  to_host(false);
}

bool is_skipped(Site site) {
  const Config& config = engine.config;
  if (config.skipped_line == 0 || site.line != config.skipped_line) return false;
  if (config.skipped_file == nullptr) return true;
  const size_t have = std::strlen(site.file), want = std::strlen(config.skipped_file);
  return have >= want && std::strcmp(site.file + have - want, config.skipped_file) == 0;
}

namespace {
bool is_good_shape(dim3 grid, dim3 block, size_t shared_bytes) {
  const uint64_t num_threads = uint64_t{block.x} * block.y * block.z;
  return num_threads >= 1 && num_threads <= kMaxThreads && block.z <= 64 && grid.x >= 1 && grid.x <= 0x7fffffffu && grid.y >= 1 && grid.y <= 65535 &&
         grid.z >= 1 && grid.z <= 65535 && shared_bytes <= engine.config.shared_limit;
}
}  // namespace

// Does not wait for a kernel that runs, as posting does not.
cudaError_t check_shape(dim3 grid, dim3 block, size_t shared_bytes) {
  if (is_good_shape(grid, block, shared_bytes)) return cudaSuccess;
  LaunchLock lock;
  std::snprintf(host.error_text, sizeof host.error_text, "bad launch: grid (%u,%u,%u) block (%u,%u,%u) with %zu bytes of dynamic shared memory", grid.x,
                grid.y, grid.z, block.x, block.y, block.z, shared_bytes);
  engine.error = host.error_text;
  return cudaErrorInvalidConfiguration;
}

cudaError_t run_kernel(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  LaunchLock lock;
  engine.error = nullptr;
  const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  const unsigned num_threads = block.x * block.y * block.z;
  grow(num_threads);
  host.random_state = engine.config.seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  host.body = &body;
  engine.grid = grid;
  engine.block = block;
  engine.dynamic_bytes = shared_bytes;
  engine.num_threads_run += num_threads * num_blocks;
#ifdef EMULATOR_TSAN
  char* sync = static_cast<char*>(std::malloc(64));
  host.begin = sync;
  host.end = sync + 32;
  host.tsan_fiber = __tsan_get_current_fiber();
#endif
  const BlockWalk walk(num_blocks);
  for (uint64_t i = 0; i < num_blocks && engine.error == nullptr; ++i) {
    const uint64_t b = (walk.first + i * walk.stride) % num_blocks;
    const uint64_t rows = b / grid.x;
    run_block(uint3{static_cast<unsigned>(b % grid.x), static_cast<unsigned>(rows % grid.y), static_cast<unsigned>(rows / grid.y)}, static_cast<unsigned>(i));
  }
#ifdef EMULATOR_TSAN
  __tsan_acquire(host.end);
  free_shared();
  std::free(sync);
  host.begin = host.end = nullptr;
#endif
  if (engine.error == nullptr) return cudaSuccess;
  std::fprintf(stderr, "emulated kernel failed: %s\n", engine.error);
  return cudaErrorLaunchFailure;
}

}  // namespace emulator

// --- for the tests, through ctypes
extern "C" {
void emulator_configure(int policy, uint64_t seed, int is_strict) {
  emulator::engine.config.policy = policy;
  emulator::engine.config.seed = seed;
  emulator::engine.config.is_strict = is_strict != 0;
}
void emulator_skip(const char* file, int line) {  // line 0: skip nothing
  static char name[256];
  std::snprintf(name, sizeof name, "%s", file);
  emulator::engine.config.skipped_file = name;
  emulator::engine.config.skipped_line = line;
}
const char* emulator_error() { return emulator::engine.error == nullptr ? "" : emulator::engine.error; }
uint64_t emulator_num_switches() { return emulator::engine.num_switches; }
uint64_t emulator_num_threads_run() { return emulator::engine.num_threads_run; }
}
