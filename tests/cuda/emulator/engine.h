// The state of a launch on the emulator, and how its threads are scheduled.
//
// Purpose: run a plain CUDA C++ kernel on the CPU so that its mistakes show. Each CUDA thread is a fiber with its own stack; blocks run one after another, and
// a fiber gives way at barriers and warp collectives only. The policy picks who goes on, from a seed, so a failure can be repeated.
//
// What is promised: a block's shared memory is fresh and filled with NaN bytes; a shuffle or vote orders no memory (TSan sees that), __syncwarp,
// __syncthreads and __threadfence do; a cp.async lands at the wait that covers it and not before; a barrier that not all threads reach, a mask that lies, a
// collective that mixes call sites, a copy that nobody waited for and a deadlock are errors that name block, thread and line.
//
// What is not: speed, bank conflicts, rounding of special functions, tensor-core accumulation order, memory-model effects beyond happens-before, blocks that
// wait for one another (spinning hangs), mbarrier, TMA, wgmma, clusters.
//
// One launch runs at a time (launch_lock); stream threads of the runtime take turns. An error ends the launch and drops its fibers where they stand, so a
// kernel must own no heap objects.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "keywords.h"

namespace emulator {

struct Site {  // where the kernel called
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class State : uint8_t { ready, waiting, done };
enum Policy : int { in_order = 0, reverse = 1, random_order = 2, random_priorities = 3 };  // the last: of warps and threads, changed now and then (PCT)

struct AsyncCopy {  // one cp.async; past source_bytes the destination is zeroed
  void* to;
  const void* from;
  int num_bytes, source_bytes, group;
};

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxAsyncCopies = 256;  // in flight in one thread
constexpr int kNumBarriers = 16;

struct Warp;
struct Thread {
  void* stack_pointer;
  char* stack;
  State state;
  uint3 index;
  unsigned linear, lane;
  Warp* warp;
  const void* waits_for;  // a barrier, or null
  const char* what;       // what it does while it waits
  Site site;
  int num_copies, copy_group;
  unsigned first_copy;
  AsyncCopy copies[kMaxAsyncCopies];
  void* asan_stack;
  void* tsan_fiber;
};

struct Meeting {  // lanes of one mask in one collective
  uint32_t mask, arrived;
  const char* what;
  Site site;
  unsigned number;
};

constexpr int kMaxMeetings = 8;
struct Warp {
  Thread* lanes[kWarpSize];
  void* payloads[kWarpSize];
  uint32_t live, existing;  // masks
  Meeting meetings[kMaxMeetings];
  int num_meetings;
  unsigned next_number;
};

struct Barrier {
  unsigned arrived, phase;
  int tally, result;  // of __syncthreads_count and its like
  Site site;
};

struct Config {
  int policy = random_order;
  uint64_t seed = 1;
  bool is_strict = true;              // divergent barriers, and exits before barriers, are errors even where hardware gets away with them
  int skipped_line = 0;               // barriers and cp.async waits on this line do nothing: for tests that each is needed
  const char* skipped_file = nullptr; // ends like this; null: any
  size_t shared_limit = 232448;       // 227 KiB: opt-in limit of sm_90 (sm_80: 166912)
  size_t static_shared_limit = 49152;
};

struct Engine {
  Config config;
  Thread* current = nullptr;  // null: the host
  Thread* threads = nullptr;
  Warp* warps = nullptr;
  unsigned capacity = 0, num_threads = 0, num_live = 0;
  dim3 grid, block;
  uint3 block_index{};
  Barrier barriers[kNumBarriers];
  size_t dynamic_bytes = 0, stack_bytes = 0;
  char* dynamic_shared = nullptr;
  char* sync_points = nullptr;  // TSan: addresses that stand for this block's barriers
  const char* error = nullptr;
  uint64_t num_switches = 0, num_threads_run = 0;
};
extern Engine engine;

// --- engine.cpp
uint64_t random_number();
[[gnu::format(printf, 1, 2)]] void fail(const char* format, ...);  // ends the launch with an error; does not return to a CUDA thread
void wait_here(const char* what, Site site, const void* waits_for = nullptr);
void yield();
void make_ready(Thread* thread);
bool is_skipped(Site site);
// Runs the kernel now, on the calling host thread. cudaErrorInvalidConfiguration for a bad shape, cudaErrorLaunchFailure for an error in the kernel.
cudaError_t run_kernel(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);
cudaError_t check_shape(dim3 grid, dim3 block, size_t shared_bytes);
void exit_checks(Thread* thread);  // sync.cpp: what a thread that ends leaves behind

// --- runtime.cpp: in stream order; on the null stream at once
cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, std::function<void()> body);

// --- shared_memory.cpp
void* shared_variable(const void* key, size_t num_bytes);
void* dynamic_shared();
void begin_shared(size_t dynamic_bytes);
void end_shared();
void free_shared();  // TSan frees at the end of a launch only
void start_async_copy(const AsyncCopy& copy, Site site);
void commit_async_copies();
bool take_async_copy(int num_groups_left, AsyncCopy* copy);  // the oldest of those that the wait covers

// --- sync.cpp
enum class Tally { none, count, all, any };
int block_barrier(int predicate, Tally tally, Site site);
using Finish = void (*)(Warp&, uint32_t mask);  // the last lane to arrive runs it for all
void meet(uint32_t mask, void* payload, Finish finish, bool orders_memory, const char* what, Site site);
void shuffle(uint32_t mask, const void* in, void* out, int num_bytes, int source_lane, const char* what, Site site);
uint32_t vote(uint32_t mask, bool predicate, const char* what, Site site);
enum class Reduction { add, min, max, bit_and, bit_or, bit_xor };
int64_t reduce(uint32_t mask, int64_t value, Reduction reduction, const char* what, Site site);
uint32_t match_any(uint32_t mask, uint64_t value, Site site);

// --- matrix.cpp
void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, bool is_bf16, Site site);
void mma_m16n8k32_s8(int32_t* d, const uint32_t* a, const uint32_t* b, Site site);
void load_matrices(uint32_t* out, const void* row, int num_matrices, bool is_transposed, const void** sources /* [2 * num_matrices] */, Site site);

}  // namespace emulator
