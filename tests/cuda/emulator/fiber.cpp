// Stacks and switches; the sanitizers are told of each.
#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>

#ifdef EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

#ifndef __x86_64__
#error "switch_stack is written for x86-64; add this machine's"
#endif

// Saves the callee-saved registers and the stack pointer at *save, and goes on where `to` was saved.
extern "C" __attribute__((visibility("hidden"))) void emulator_switch_stack(void** save, void* to);
asm(R"(
.text
.hidden emulator_switch_stack
.globl emulator_switch_stack
.type emulator_switch_stack,@function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack,.-emulator_switch_stack
)");

namespace emulator {

Host host;

namespace {

constexpr size_t kStackBytes =
#if defined(EMULATOR_ASAN) || defined(EMULATOR_TSAN)
    256 << 10;
#else
    128 << 10;
#endif
constexpr size_t kGuardPage = 4096;

char* new_stack() {
  void* memory = mmap(nullptr, kStackBytes + kGuardPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  mprotect(memory, kGuardPage, PROT_NONE);
  return static_cast<char*>(memory) + kGuardPage;
}

#ifdef EMULATOR_TSAN
// A TSan fiber and its stack stay together. Each block of a launch gets fibers that no earlier block of it had, for as long as there are any: program order
// would link the blocks and hide races between them. Each host thread has its own, for the same reason.
struct FiberPool {
  static constexpr unsigned kSize = 2048;
  void* fibers[kSize] = {};
  char* stacks[kSize] = {};
  ~FiberPool() {
    for (unsigned i = 0; i < kSize; ++i) {
      if (fibers[i] == nullptr) continue;
      __tsan_destroy_fiber(fibers[i]);
      munmap(stacks[i] - kGuardPage, kStackBytes + kGuardPage);
    }
  }
  void give(unsigned turn, unsigned num_threads) {
    const unsigned num_sets = kSize / num_threads;
    for (unsigned i = 0; i < num_threads; ++i) {
      const unsigned k = turn % num_sets * num_threads + i;
      if (fibers[k] == nullptr) {
        fibers[k] = __tsan_create_fiber(0);
        stacks[k] = new_stack();
      }
      engine.threads[i].tsan_fiber = fibers[k];
      engine.threads[i].stack = stacks[k];
    }
  }
};
thread_local FiberPool fiber_pool;
#endif

}  // namespace

void to_host([[maybe_unused]] bool is_last) {
  Thread* thread = engine.current;
#ifdef EMULATOR_ASAN
  __sanitizer_start_switch_fiber(is_last ? nullptr : &thread->asan_stack, host.stack_bottom, host.stack_bytes);
#endif
#ifdef EMULATOR_TSAN
  __tsan_switch_to_fiber(host.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
  emulator_switch_stack(&thread->stack_pointer, host.stack_pointer);
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(engine.current->asan_stack, &host.stack_bottom, &host.stack_bytes);
#endif
}

void to_thread(Thread* thread) {
  engine.current = thread;
  ++engine.num_switches;
#ifdef EMULATOR_ASAN
  __sanitizer_start_switch_fiber(&host.asan_stack, thread->stack, kStackBytes);
#endif
#ifdef EMULATOR_TSAN
  __tsan_switch_to_fiber(thread->tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
  emulator_switch_stack(&host.stack_pointer, thread->stack_pointer);
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(host.asan_stack, nullptr, nullptr);
#endif
  engine.current = nullptr;
}

namespace {
void thread_main() {
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &host.stack_bottom, &host.stack_bytes);
#endif
#ifdef EMULATOR_TSAN
  __tsan_acquire(host.begin);
#endif
  (*host.body)();
  exit_checks(engine.current);
#ifdef EMULATOR_TSAN
  __tsan_release(host.end);
#endif
  to_host(true);
  __builtin_trap();
}
}  // namespace

void prepare_stack(Thread* thread) {
#ifdef EMULATOR_ASAN
  __asan_unpoison_memory_region(thread->stack, kStackBytes);  // frames that a failed launch left
#endif
  void** top = reinterpret_cast<void**>(thread->stack + kStackBytes);
  *--top = nullptr;  // in place of a return address: keeps the stack aligned as at a call
  *--top = reinterpret_cast<void*>(&thread_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread->stack_pointer = top;
  thread->asan_stack = nullptr;
}

void give_stacks([[maybe_unused]] unsigned first, [[maybe_unused]] unsigned num_threads) {
#ifndef EMULATOR_TSAN
  for (unsigned i = first; i < num_threads; ++i) engine.threads[i].stack = new_stack();
#endif
}

void give_fibers([[maybe_unused]] unsigned turn, [[maybe_unused]] unsigned num_threads) {
#ifdef EMULATOR_TSAN
  fiber_pool.give(turn, num_threads);
#endif
}

}  // namespace emulator
