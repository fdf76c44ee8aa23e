// Which instruction set the kernels use, found once at run time. PYSERVE_CPU_ISA=generic|avx2|avx512|avx512_bf16 lowers it (tests, comparisons), never raises it.
//
// A kernel file that uses intrinsics wraps them in PYSERVE_TARGET_BEGIN(...) / PYSERVE_TARGET_END, below its #include lines: what a header defines inline
// must not be compiled for a machine that the process may not run on.
#pragma once

namespace pyserve {

// avx2: with FMA and F16C; avx512: F, BW, DQ, VL and VNNI; avx512_bf16: also products of bfloat16, which attention over such K and V uses
enum class Isa { generic = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

Isa isa();
const char* isa_name(Isa isa);

}  // namespace pyserve

#if defined(__x86_64__)
#define PYSERVE_X86 1
#else
#define PYSERVE_X86 0
#endif

#define PYSERVE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define PYSERVE_TARGET_BEGIN(features) PYSERVE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define PYSERVE_TARGET_END PYSERVE_PRAGMA(clang attribute pop)
#else
#define PYSERVE_TARGET_BEGIN(features) PYSERVE_PRAGMA(GCC push_options) PYSERVE_PRAGMA(GCC target(features))
#define PYSERVE_TARGET_END PYSERVE_PRAGMA(GCC pop_options)
#endif
#define PYSERVE_AVX2 "avx2,fma,f16c"
#define PYSERVE_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#define PYSERVE_AVX512_BF16 PYSERVE_AVX512 ",avx512bf16"
