// The AVX2 kernels. What lies below TARGET_BEGIN may use its instructions, so every header with code that other files share stands above it: the linker
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

PYSERVE_TARGET_BEGIN(PYSERVE_AVX2)

#include "linear_vector_avx2.h"
//
#include "linear_table.h"

namespace pyserve {

const LinearKernels kAvx2Kernels = make_linear_kernels<Avx2>("avx2");

}  // namespace pyserve

PYSERVE_TARGET_END
#endif
