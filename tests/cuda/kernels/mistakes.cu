// Small kernels, each with one planted mistake, or none ("good"): what the emulator must say, and must not. 64 threads a block, in[64], out[n * 64].
#include "ptx.cuh"

namespace {

using namespace pyserve::cuda;

#define KERNEL(name) __global__ void name(float* out, const float* in, int n)

KERNEL(good_warp_order) {
  PYSERVE_SHARED(float, s, [64]);
  s[threadIdx.x] = in[threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}
KERNEL(bad_warp_order) {  // a shuffle is no fence
  PYSERVE_SHARED(float, s, [64]);
  s[threadIdx.x] = in[threadIdx.x];
  const float v = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 1);
  out[threadIdx.x] = s[threadIdx.x ^ 1] + v;
}
KERNEL(bad_missing_barrier) {
  PYSERVE_SHARED(float, s, [64]);
  s[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = s[63 - threadIdx.x];
}
KERNEL(bad_divergent_barrier) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = in[threadIdx.x];
}
KERNEL(bad_missing_threads) {
  if (threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}
KERNEL(bad_early_exit) {
  if (threadIdx.x == 63) return;
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}
KERNEL(bad_shuffle_mask) {  // half of the lanes that the mask names never call
  float v = in[threadIdx.x];
  if (threadIdx.x & 1) v = __shfl_sync(0xffffffffu, v, 0);
  out[threadIdx.x] = v;
}
KERNEL(bad_shuffle_source) {  // from a lane outside the mask
  float v = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) v = __shfl_sync(0x0000ffffu, v, 20);
  out[threadIdx.x] = v;
}
KERNEL(bad_mask_without_caller) { out[threadIdx.x] = __shfl_sync(0x1u, in[threadIdx.x], 0); }
KERNEL(bad_two_collectives) {
  float v = in[threadIdx.x];
  if (threadIdx.x & 16) {
    v = __shfl_sync(0xffffffffu, v, 0);
  } else {
    v = static_cast<float>(__ballot_sync(0xffffffffu, 1));
  }
  out[threadIdx.x] = v;
}
KERNEL(good_split_masks) {
  float v = in[threadIdx.x];
  if (threadIdx.x & 1) {
    v += __shfl_xor_sync(0xaaaaaaaau, v, 2);
  } else {
    v += static_cast<float>(__popc(__ballot_sync(0x55555555u, 1)));
  }
  out[threadIdx.x] = v;  // lane 0: 1 + 16, lane 1: 2 + 4
}
KERNEL(bad_deadlock) {
  if (threadIdx.x & 16) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = in[threadIdx.x];
}
KERNEL(bad_block_race) { out[threadIdx.x] = in[threadIdx.x] + static_cast<float>(blockIdx.x); }
KERNEL(good_block_atomic) { atomicAdd(out + threadIdx.x, in[threadIdx.x]); }
KERNEL(bad_misaligned) { out[threadIdx.x] = reinterpret_cast<const float4*>(in + 1)->x; }
KERNEL(bad_global_bounds) { out[threadIdx.x] = in[threadIdx.x + 1]; }
KERNEL(bad_uninitialised) {
  PYSERVE_SHARED(float, s, [64]);
  if (threadIdx.x < 32) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
KERNEL(bad_two_arrays) {  // off the end of one shared array into the next
  PYSERVE_SHARED(float, a, [64]);
  PYSERVE_SHARED(float, b, [64]);
  float* p = &a[0];
  b[threadIdx.x] = 0;
  p[threadIdx.x + n] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = b[threadIdx.x];
}
KERNEL(bad_dynamic_bounds) {
  PYSERVE_DYN_SHARED(float, s);
  s[threadIdx.x + 1] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
KERNEL(bad_local_bounds) {
  float a[4] = {1, 2, 3, 4};
  for (int i = 0; i <= n / 16; ++i) a[i] += in[i];
  out[threadIdx.x] = a[threadIdx.x & 3];
}
template <bool has_fence>
__device__ void last_block(float* out, const float* in) {  // out[0] is the ticket; the last block adds up what the others left
  PYSERVE_SHARED(int, is_last, );
  out[1 + blockIdx.x * blockDim.x + threadIdx.x] = in[threadIdx.x];
  if (has_fence) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(reinterpret_cast<int*>(out), 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!is_last) return;
  if (has_fence) __threadfence();
  float sum = 0;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += out[1 + block * blockDim.x + threadIdx.x];
  out[1 + threadIdx.x] = sum;
}
KERNEL(good_last_block) { last_block<true>(out, in); }
KERNEL(bad_last_block) { last_block<false>(out, in); }
KERNEL(good_counts) {
  const int count = __syncthreads_count(in[threadIdx.x] > 10.f);
  const unsigned odd = __ballot_sync(0xffffffffu, threadIdx.x & 1);
  out[threadIdx.x] = static_cast<float>(count) + (odd == 0xaaaaaaaau ? 1.f : 0.f);  // 54 + 1
}
KERNEL(good_async_copy) {
  PYSERVE_SHARED(float4, s, [64]);
  cp_async16(&s[threadIdx.x], in + threadIdx.x % 16 * 4);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x].x;  // in[60], in[56], ...
}
KERNEL(bad_async_copy_wait) {
  PYSERVE_SHARED(float4, s, [64]);
  cp_async16(&s[threadIdx.x], in);
  cp_async_commit();
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x].x;
  cp_async_wait<0>();
}
KERNEL(bad_async_copy_group) {  // waits for all but the group that it needs
  PYSERVE_SHARED(float4, s, [64]);
  cp_async16(&s[threadIdx.x], in);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x].x;
  cp_async_wait<0>();
}
KERNEL(bad_async_copy_forgotten) {
  PYSERVE_SHARED(float4, s, [64]);
  cp_async16(&s[threadIdx.x], in);
  cp_async_commit();
  out[threadIdx.x] = 0;
}
KERNEL(bad_async_copy_alignment) {
  PYSERVE_SHARED(float4, s, [64]);
  cp_async16(&s[threadIdx.x], in + 1);
  cp_async_commit();
  cp_async_wait<0>();
  out[threadIdx.x] = s[threadIdx.x].x;
}
KERNEL(bad_ldmatrix_alignment) {
  PYSERVE_SHARED(uint4, s, [65]);
  uint32_t r[4];
  ldmatrix_x4(r, reinterpret_cast<const char*>(&s[threadIdx.x]) + 2);
  out[threadIdx.x] = static_cast<float>(r[0]);
}
#ifdef __CUDACC__
constexpr int kTooMuch = 64;  // ptxas refuses more than 48 KiB itself
#else
constexpr int kTooMuch = 13000;
#endif
KERNEL(bad_static_size) {
  PYSERVE_SHARED(float, s, [kTooMuch]);
  s[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = s[threadIdx.x];
}

struct Entry {
  const char* name;
  void (*kernel)(float*, const float*, int);
};
#define ENTRY(name) {#name, name}
const Entry kAll[] = {
    ENTRY(good_warp_order), ENTRY(bad_warp_order), ENTRY(bad_missing_barrier), ENTRY(bad_divergent_barrier), ENTRY(bad_missing_threads),
    ENTRY(bad_early_exit), ENTRY(bad_shuffle_mask), ENTRY(bad_shuffle_source), ENTRY(bad_mask_without_caller), ENTRY(bad_two_collectives),
    ENTRY(good_split_masks), ENTRY(bad_deadlock), ENTRY(bad_block_race), ENTRY(good_block_atomic), ENTRY(bad_misaligned), ENTRY(bad_global_bounds),
    ENTRY(bad_uninitialised), ENTRY(bad_two_arrays), ENTRY(bad_dynamic_bounds), ENTRY(bad_local_bounds), ENTRY(good_last_block), ENTRY(bad_last_block),
    ENTRY(good_counts), ENTRY(good_async_copy), ENTRY(bad_async_copy_wait), ENTRY(bad_async_copy_group), ENTRY(bad_async_copy_forgotten),
    ENTRY(bad_async_copy_alignment), ENTRY(bad_ldmatrix_alignment), ENTRY(bad_static_size),
};

}  // namespace

extern "C" const char* mistake_name(int64_t i) { return i < static_cast<int64_t>(sizeof kAll / sizeof *kAll) ? kAll[i].name : nullptr; }
extern "C" int mistake_run(int64_t i, float* out, const float* in, int64_t n, int64_t num_blocks, cudaStream_t stream) {
  return launch(kAll[i].kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(64), 64 * sizeof(float), stream, out, in, n);
}
extern "C" int mistake_shape(int64_t grid_y, int64_t num_threads, int64_t shared_bytes, cudaStream_t stream) {
  return launch(good_counts, dim3(1, static_cast<unsigned>(grid_y)), dim3(static_cast<unsigned>(num_threads)), static_cast<size_t>(shared_bytes), stream,
                static_cast<float*>(nullptr), static_cast<const float*>(nullptr), 0);
}
