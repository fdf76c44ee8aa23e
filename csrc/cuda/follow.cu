// A step behind another one whose tokens the host has not seen: they are fetched where they lie.
//
// tokens int32 [num_rows]: an entry -1 - i becomes picked[i]; others stay. Behind a broken row it becomes 0: nobody wants what comes of it.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "kernels.h"
#include "portable.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void follow_kernel(int32_t* tokens, int num_rows, const int32_t* picked) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row < num_rows && tokens[row] < 0) tokens[row] = max(picked[-1 - tokens[row]], 0);
}

}  // namespace

extern "C" int pyserve_cuda_follow(int32_t* tokens, int64_t num_rows, const int32_t* picked, void* stream) {
  if (num_rows == 0) return 0;
  return launch(follow_kernel, dim3(static_cast<unsigned>((num_rows + kThreads - 1) / kThreads)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), tokens,
                static_cast<int>(num_rows), picked);
}

}  // namespace pyserve::cuda
