// CUDA's device functions: synchronisation, warp collectives, atomics, loads, arithmetic.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "engine.h"

#ifdef EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
namespace emulator {
inline char fence_point;  // fences order through one place, as a total order would
}
#endif

#define EMULATOR_SITE emulator::Site site = emulator::Site::here()

// --- barriers and fences
inline void __syncthreads(EMULATOR_SITE) {
  if (!emulator::is_skipped(site)) emulator::block_barrier(0, emulator::Tally::none, site);
}
inline int __syncthreads_count(int predicate, EMULATOR_SITE) { return emulator::block_barrier(predicate, emulator::Tally::count, site); }
inline int __syncthreads_and(int predicate, EMULATOR_SITE) { return emulator::block_barrier(predicate, emulator::Tally::all, site); }
inline int __syncthreads_or(int predicate, EMULATOR_SITE) { return emulator::block_barrier(predicate, emulator::Tally::any, site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
  if (!emulator::is_skipped(site)) emulator::meet(mask, nullptr, nullptr, true, "__syncwarp", site);
}
inline void __threadfence() {
#ifdef EMULATOR_TSAN
  __tsan_acquire(&emulator::fence_point);
  __tsan_release(&emulator::fence_point);
#endif
}
inline void __threadfence_block() { __threadfence(); }
inline void __nanosleep(unsigned) { emulator::yield(); }
inline void __trap(EMULATOR_SITE) { emulator::fail("__trap at %s:%d", site.file, site.line); }

// --- warp collectives. `width` cuts the warp into groups; a source outside the own group means the own value.
namespace emulator {
template <class T>
T shuffled(uint32_t mask, T value, int source, const char* what, Site site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  T result{};
  shuffle(mask, &value, &result, static_cast<int>(sizeof(T)), source, what, site);
  return result;
}
inline int lane() { return static_cast<int>(engine.current->lane); }
}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE) {
  return emulator::shuffled(mask, value, (emulator::lane() & ~(width - 1)) | (source & (width - 1)), "__shfl_sync", site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATOR_SITE) {
  const int lane = emulator::lane(), source = lane ^ lanes;
  return emulator::shuffled(mask, value, (source & ~(width - 1)) > (lane & ~(width - 1)) ? lane : source, "__shfl_xor_sync", site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  const int lane = emulator::lane(), source = lane + static_cast<int>(delta);
  return emulator::shuffled(mask, value, (source & ~(width - 1)) != (lane & ~(width - 1)) ? lane : source, "__shfl_down_sync", site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  const int lane = emulator::lane(), source = lane - static_cast<int>(delta);
  return emulator::shuffled(mask, value, source < (lane & ~(width - 1)) ? lane : source, "__shfl_up_sync", site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) { return emulator::vote(mask, predicate != 0, "__ballot_sync", site); }
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) { return emulator::vote(mask, predicate != 0, "__any_sync", site) != 0; }
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) { return emulator::vote(mask, predicate == 0, "__all_sync", site) == 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value, EMULATOR_SITE) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return emulator::match_any(mask, bits, site);
}
#define EMULATOR_REDUCE(name, reduction)                                                                                                       \
  template <class T>                                                                                                                            \
  T name(unsigned mask, T value, EMULATOR_SITE) {                                                                                               \
    return static_cast<T>(emulator::reduce(mask, static_cast<int64_t>(value), emulator::Reduction::reduction, #name, site));                    \
  }
EMULATOR_REDUCE(__reduce_add_sync, add)
EMULATOR_REDUCE(__reduce_min_sync, min)
EMULATOR_REDUCE(__reduce_max_sync, max)
EMULATOR_REDUCE(__reduce_and_sync, bit_and)
EMULATOR_REDUCE(__reduce_or_sync, bit_or)
EMULATOR_REDUCE(__reduce_xor_sync, bit_xor)
#undef EMULATOR_REDUCE

// --- atomics: relaxed, as on the device
template <class T, class Change>
T emulator_atomic(T* place, Change change) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  Bits* bits = reinterpret_cast<Bits*>(place);
  Bits old_bits = __atomic_load_n(bits, __ATOMIC_RELAXED), new_bits;
  T value;
  do {
    std::memcpy(&value, &old_bits, sizeof(T));
    const T changed = change(value);
    std::memcpy(&new_bits, &changed, sizeof(T));
  } while (!__atomic_compare_exchange_n(bits, &old_bits, new_bits, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return value;
}
template <class T> T atomicAdd(T* place, std::common_type_t<T> value) { return emulator_atomic(place, [=](T old) { return static_cast<T>(old + value); }); }
template <class T> T atomicSub(T* place, std::common_type_t<T> value) { return emulator_atomic(place, [=](T old) { return static_cast<T>(old - value); }); }
template <class T> T atomicMax(T* place, std::common_type_t<T> value) { return emulator_atomic(place, [=](T old) { return old < value ? value : old; }); }
template <class T> T atomicMin(T* place, std::common_type_t<T> value) { return emulator_atomic(place, [=](T old) { return value < old ? value : old; }); }
template <class T> T atomicExch(T* place, std::common_type_t<T> value) { return emulator_atomic(place, [=](T) { return value; }); }
template <class T> T atomicOr(T* place, std::common_type_t<T> value) { return emulator_atomic(place, [=](T old) { return old | value; }); }
template <class T> T atomicAnd(T* place, std::common_type_t<T> value) { return emulator_atomic(place, [=](T old) { return old & value; }); }
template <class T> T atomicXor(T* place, std::common_type_t<T> value) { return emulator_atomic(place, [=](T old) { return old ^ value; }); }
template <class T> T atomicCAS(T* place, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return emulator_atomic(place, [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* place, unsigned last) {
  return emulator_atomic(place, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}

// --- loads and stores with cache hints
template <class T> T __ldg(const T* place) { return *place; }
template <class T> T __ldcg(const T* place) { return *place; }
template <class T> T __ldca(const T* place) { return *place; }
template <class T> T __ldcs(const T* place) { return *place; }
template <class T> T __ldcv(const T* place) { return *place; }
template <class T> void __stcg(T* place, std::common_type_t<T> value) { *place = value; }
template <class T> void __stcs(T* place, std::common_type_t<T> value) { *place = value; }
template <class T> void __stwt(T* place, std::common_type_t<T> value) { *place = value; }

// --- arithmetic
inline float __expf(float x) { return std::exp(x); }
inline float __exp2f(float x) { return std::exp2(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return 1.f / std::sqrt(a); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x < 0.f ? 0.f : x > 1.f ? 1.f : x == x ? x : 0.f; }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
template <class To, class From>
To emulator_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int v) { return emulator_bits<float>(v); }
inline float __uint_as_float(unsigned v) { return emulator_bits<float>(v); }
inline int __float_as_int(float v) { return emulator_bits<int>(v); }
inline unsigned __float_as_uint(float v) { return emulator_bits<unsigned>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v != 0 ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v != 0 ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __brev(unsigned v) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (v >> i & 1) << (31 - i);
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return sum;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
  return sum;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> 4 * i & 15;
    const unsigned byte = static_cast<unsigned>(bytes >> 8 * (pick & 7) & 0xff);
    result |= ((pick & 8) != 0 ? ((byte & 0x80) != 0 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
template <class A, class B>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
