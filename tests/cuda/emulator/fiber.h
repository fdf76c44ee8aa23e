// One stack for each CUDA thread, and switches between them and the host. Used by engine.cpp alone.
#pragma once
#include "engine.h"

namespace emulator {

struct Host {  // the side that called launch
  void* stack_pointer = nullptr;
  const std::function<void()>* body = nullptr;
  uint64_t random_state = 1;
  char error_text[768];
  char* begin = nullptr;  // TSan: addresses of this launch's own start and end, so that launches of different streams are not ordered
  char* end = nullptr;
  void* asan_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  void* tsan_fiber = nullptr;
};
extern Host host;


// Gives the engine's threads their stacks: new ones from `first` on, or under TSan those of this turn.
void give_stacks(unsigned first, unsigned num_threads);
void give_fibers(unsigned turn, unsigned num_threads);
void prepare_stack(Thread* thread);  // to start at the kernel's beginning
void to_thread(Thread* thread);      // the host's side: returns when the thread gives way
void to_host(bool is_last);          // the thread's side

}  // namespace emulator
