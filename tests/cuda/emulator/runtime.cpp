#include "runtime.h"

namespace emulator {

cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, std::function<void()> body) {
  return run_kernel(grid, block, shared_bytes, body);
}

}  // namespace emulator
