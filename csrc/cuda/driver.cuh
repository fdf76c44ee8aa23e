// What every host-side file here needs: driver functions, and errors that stay ours.
#pragma once
#include "cuda_ops.h"
#include "portable.cuh"

#ifdef __CUDACC__
#include <dlfcn.h>
#endif

namespace pyserve::cuda {

// A function of the driver by its first version's name, null where it has none. Driver functions neither set nor read the runtime's last error.
template <class Function>
Function driver_function(const char* name) {
#ifdef __CUDACC__
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return driver == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(driver, name));
#else
  return reinterpret_cast<Function>(emulator::driver_symbol(name));
#endif
}

// Around runtime calls whose errors we return: takes them out of the thread's last error, but never one that was pending before.
class OwnErrors {
 public:
  OwnErrors() : was_clean_(cudaPeekAtLastError() == cudaSuccess) {}
  ~OwnErrors() {
    if (was_clean_) (void)cudaGetLastError();
  }
  OwnErrors(const OwnErrors&) = delete;
  OwnErrors& operator=(const OwnErrors&) = delete;

 private:
  const bool was_clean_;
};

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
inline cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace pyserve::cuda
