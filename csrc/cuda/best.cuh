// The most probable token of a row, by a whole block.
#pragma once
#include "rows.cuh"

namespace pyserve::cuda {

constexpr int kSampleThreads = 512, kSampleWarps = kSampleThreads / 32;
constexpr int kNoToken = 0x7fffffff;

struct Best {
  float logit;
  int id;

  __device__ __forceinline__ void see(float other, int other_id) {
    if (other > logit || (other == logit && other_id < id)) logit = other, id = other_id;
  }
  __device__ __forceinline__ void see_logit(float other, int other_id) {
    if (other != other) other = INFINITY, other_id = kBrokenRow;  // a NaN beats everything, so that it reaches the end
    see(other, other_id);
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

// The larger logit, of equal ones the lower id: one answer whatever the order, for every thread. The id is kBrokenRow where a logit is NaN, or the largest is not
// finite.
__device__ __forceinline__ Best best_of_row(const float* row, int vocab_size) {
  PYSERVE_SHARED(float, best_logits, [kSampleWarps]);
  PYSERVE_SHARED(int, best_ids, [kSampleWarps]);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  Best best = {-INFINITY, kNoToken};
  for (int id = threadIdx.x; id < vocab_size; id += kSampleThreads) best.see_logit(row[id], id);
  best = warp_best(best);
  if (lane == 0) best_logits[warp] = best.logit, best_ids[warp] = best.id;
  __syncthreads();
  best = {lane < kSampleWarps ? best_logits[lane] : -INFINITY, lane < kSampleWarps ? best_ids[lane] : kNoToken};
  best = warp_best(best);
  if (fabsf(best.logit) == INFINITY) best.id = kBrokenRow;
  return best;
}

}  // namespace pyserve::cuda
