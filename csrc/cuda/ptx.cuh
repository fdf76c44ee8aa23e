// One function for each PTX instruction that CUDA C++ has no name for, and a software body for the emulator. Each wraps one instruction and nothing else, so
// that a test on a GPU can compare the two bodies.
#pragma once
#include "portable.cuh"

namespace pyserve::cuda {

// For compute capability 10 and later the compiler moves what is read of shared memory further ahead of its use than for those before.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kReadsFarAhead = true;
#else
constexpr bool kReadsFarAhead = false;
#endif

#ifdef __CUDACC__

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// d[16, 8] += a[16, 16] x b[8, 16] transposed; layouts of the registers: PTX ISA, mma.m16n8k16
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d[16, 8] += a[16, 32] x b[8, 32] transposed, of int8
__device__ __forceinline__ void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 8 x 8 matrices of 16-bit values in shared memory; lane l gives the address of row l % 8 of matrix l / 8
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&out)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&out)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(shared_address(row)) : "memory");
}

// 16 bytes from global to shared memory; zeros when not is_wanted (`from` must be a valid address all the same)
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool is_wanted = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(is_wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's copies, all but the newest `groups_left` groups.
template <int groups_left>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups_left) : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#else

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATOR_SITE) { emulator::mma_m16n8k16(d, a, b, true, site); }
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATOR_SITE) { emulator::mma_m16n8k16(d, a, b, false, site); }
inline void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATOR_SITE) { emulator::mma_m16n8k32_s8(d, a, b, site); }
inline void ldmatrix_x4(uint32_t (&out)[4], const void* row, EMULATOR_SITE) { emulator::load_matrices<4, false>(out, row, site); }
inline void ldmatrix_x4_trans(uint32_t (&out)[4], const void* row, EMULATOR_SITE) { emulator::load_matrices<4, true>(out, row, site); }
inline void ldmatrix_x2(uint32_t (&out)[2], const void* row, EMULATOR_SITE) { emulator::load_matrices<2, false>(out, row, site); }
inline void ldmatrix_x2_trans(uint32_t (&out)[2], const void* row, EMULATOR_SITE) { emulator::load_matrices<2, true>(out, row, site); }
inline void cp_async16(void* to, const void* from, bool is_wanted = true, EMULATOR_SITE) { emulator::async_copy(to, from, 16, is_wanted ? 16 : 0, site); }
inline void cp_async_commit() { emulator::commit_async_copies(); }
template <int groups_left>
inline void cp_async_wait(EMULATOR_SITE) {
  emulator::wait_async_copies(groups_left, site);
}
inline float exp2_approx(float x) { return std::exp2(x); }

#endif

}  // namespace pyserve::cuda
