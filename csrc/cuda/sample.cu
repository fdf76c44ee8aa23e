// Greedy sampling: the most probable token of each row.
//
// One block a row. Each thread looks at its columns in ascending order, then pairs are compared over lanes and warps. The better of two is the larger logit,
// of equal ones the lower id; that has one answer whatever the order. NaN is never better; a row of nothing else gives token 0, as csrc/cpu/sample.cpp does.
//
// Layout: logits f32 [num_rows, vocab_size], rows `stride` elements apart; tokens int32 [num_rows].
// Not handled here: temperature, top-k, top-p, min-p; those rows go to the sampler as logits.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "rows.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kNone = 0x7fffffff;

struct Best {
  float logit;
  int id;

  __device__ __forceinline__ void see(float other, int other_id) {
    if (other > logit || (other == logit && other_id < id)) logit = other, id = other_id;
  }
};

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, best.logit, step);
    best.see(other, __shfl_xor_sync(kAllLanes, best.id, step));
  }
  return best;
}

__global__ void __launch_bounds__(kThreads) argmax_kernel(const float* logits, int64_t stride, int vocab_size, int32_t* tokens) {
  PYSERVE_SHARED(float, best_logits, [kWarps]);
  PYSERVE_SHARED(int, best_ids, [kWarps]);
  const float* row = logits + blockIdx.x * stride;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  Best best = {-INFINITY, kNone};
  for (int id = threadIdx.x; id < vocab_size; id += kThreads) best.see(row[id], id);
  best = warp_best(best);
  if (lane == 0) best_logits[warp] = best.logit, best_ids[warp] = best.id;
  __syncthreads();
  if (warp != 0) return;
  best = {lane < kWarps ? best_logits[lane] : -INFINITY, lane < kWarps ? best_ids[lane] : kNone};
  best = warp_best(best);
  if (lane == 0) tokens[blockIdx.x] = best.id == kNone ? 0 : best.id;
}

}  // namespace

extern "C" int pyserve_cuda_argmax(const float* logits, int64_t stride, int64_t vocab_size, int64_t num_rows, int32_t* tokens, void* stream) {
  if (num_rows == 0) return 0;
  if (vocab_size <= 0 || stride < vocab_size || vocab_size >= kNone) return kInvalid;
  return launch(argmax_kernel, dim3(static_cast<unsigned>(num_rows)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), logits, stride,
                static_cast<int>(vocab_size), tokens);
}

}  // namespace pyserve::cuda
