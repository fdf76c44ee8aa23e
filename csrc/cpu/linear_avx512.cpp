// The AVX-512 kernels. What lies below TARGET_BEGIN may use its instructions, so every header with code that other files share stands above it: the linker
// keeps one copy of an inline function, and it must be one that every machine can run.
#include "isa.h"

#if PYSERVE_X86
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "half.h"
#include "linear_kernels.h"

PYSERVE_TARGET_BEGIN(PYSERVE_AVX512)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // said of the compiler's own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "linear_vector_avx512.h"
//
#include "linear_table.h"

namespace pyserve {

const LinearKernels kAvx512Kernels = make_linear_kernels<Avx512>("avx512");

}  // namespace pyserve

PYSERVE_TARGET_END
#endif
