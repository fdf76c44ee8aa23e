// The one header with which every kernel source starts. Under nvcc it is CUDA itself; under a host compiler it is the emulator of tests/cuda, which runs the
// same source and finds its mistakes. Kernels therefore keep to what both know: shared memory through the two macros, launches through `launch`, inline PTX
// through ptx.cuh, and no #if on __CUDA_ARCH__ outside of that file.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// PYSERVE_SHARED(float, tile, [4][64]);  PYSERVE_SHARED(int, flag, );
#define PYSERVE_SHARED(type, name, dims) __shared__ type name dims
// PYSERVE_DYN_SHARED(float, scratch): a pointer to all of the launch's dynamic shared memory, 128-byte aligned
#define PYSERVE_DYN_SHARED(type, name)                                         \
  extern __shared__ __align__(128) unsigned char pyserve_dynamic_shared_[];    \
  type* name = reinterpret_cast<type*>(pyserve_dynamic_shared_)

namespace pyserve::cuda {

constexpr size_t kDefaultSharedBytes = 48 * 1024;  // more must be asked for, function by function

// Returns what the launch itself said, 0 when all is well. Neither reads nor clears an error that was pending before (R14).
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  if (shared_bytes > kDefaultSharedBytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace pyserve::cuda

#else

#include "cuda_emulator.h"

namespace pyserve::cuda {

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  return static_cast<int>(emulator::launch(grid, block, shared_bytes, stream, [=] { kernel(static_cast<Parameters>(arguments)...); }));
}

}  // namespace pyserve::cuda

#endif
