// Order that TSan sees, and locks that it does not.
#pragma once
#include <condition_variable>
#include <mutex>

#ifdef EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreSyncBegin(const char* file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char* file, int line);
#endif

namespace emulator {

struct Quiet {  // while one exists, this thread's locking is no order to TSan
#ifdef EMULATOR_TSAN
  Quiet() { AnnotateIgnoreSyncBegin(__FILE__, __LINE__); }
  ~Quiet() { AnnotateIgnoreSyncEnd(__FILE__, __LINE__); }
#else
  Quiet() {}
  ~Quiet() {}
#endif
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};

inline void happens_before([[maybe_unused]] void* what) {
#ifdef EMULATOR_TSAN
  __tsan_release(what);
#endif
}

inline void happens_after([[maybe_unused]] void* what) {
#ifdef EMULATOR_TSAN
  __tsan_acquire(what);
#endif
}

}  // namespace emulator
