// CUDA's keywords for a host compiler, and which sanitizer this build is for.
//
// The build helper defines EMULATOR_ASAN or EMULATOR_TSAN. For TSan the emulator's own .cpp files are compiled without instrumentation: only the kernel's
// accesses are to be seen, ordered by nothing but CUDA's own barriers.
#pragma once
#include <vector_functions.h>
#include <vector_types.h>

#include <driver_types.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDACC__
#error "the emulator is for host compilers: kernels include portable.cuh"
#endif

#undef __shared__
#define __shared__ static  // one block runs at a time; not poisoned, so kernels use PYSERVE_SHARED
#ifndef __global__
#define __global__
#endif
#ifndef __device__
#define __device__
#endif
#ifndef __host__
#define __host__
#endif
#ifndef __constant__
#define __constant__
#endif
#undef __launch_bounds__
#define __launch_bounds__(...)
#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif
#undef __noinline__  // the C++ library writes __attribute__((__noinline__)); a kernel writes [[gnu::noinline]]
#ifndef __grid_constant__
#define __grid_constant__
#endif
