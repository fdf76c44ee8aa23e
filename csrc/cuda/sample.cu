// Greedy sampling, and what changes logits before any sampling.
//
// One block a row. Each thread looks at its columns in ascending order, then pairs are compared over lanes and warps. A broken row gives kBrokenRow, as csrc/cpu/sample.cpp
// does.
//
// Changes: one thread for each (row, token), so no two threads touch one logit; the arithmetic of a change is csrc/cpu/sample.cpp's, in its order. What the step
// before picked, and the host has not seen, counts in a row's window: each of the row's changes looks whether it is of that token, and where none is, the first
// one of the row stands for it; a warp finds that out, 32 changes at a time.
//
// Layout: logits f32 [num_rows, vocab_size], rows `stride` elements apart; tokens int32 [num_rows]. Rows with a temperature: draw.cu.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "best.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kChangeThreads = 128;

__global__ void __launch_bounds__(kSampleThreads) argmax_kernel(const float* logits, int64_t stride, int vocab_size, int32_t* tokens) {
  const Best best = best_of_row(logits + blockIdx.x * stride, vocab_size);
  if (threadIdx.x == 0) tokens[blockIdx.x] = best.id;
}

// Whether one of the changes of `row` from `first` on is of the token. Asked by a whole warp at once.
__device__ bool is_changed(const LogitChange* changes, int64_t first, int64_t num_changes, int row, int token) {
  const int lane = threadIdx.x & 31;
  for (int64_t at = first + lane;; at += 32) {
    const bool is_of_row = at < num_changes && changes[at].row == row;
    if (__any_sync(kAllLanes, is_of_row && changes[at].token == token)) return true;
    if (!__all_sync(kAllLanes, is_of_row)) return false;  // the row ends here
  }
}

__global__ void __launch_bounds__(kChangeThreads) change_kernel(float* logits, int64_t stride, const LogitChange* changes, int64_t num_changes,
                                                                const int32_t* picked) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kChangeThreads + threadIdx.x;
  bool is_wanted = i < num_changes;
  LogitChange change = is_wanted ? changes[i] : LogitChange{};
  const bool is_unknown = change.token < 0;
  if (is_unknown) {
    change.token = picked[-1 - change.token];
  } else if (change.after < 0 && picked[-1 - change.after] == change.token) {
    change.count += 1.f;
  }
  // The lanes that have such a change take turns, and all lanes look for each of them.
  for (unsigned left = __ballot_sync(kAllLanes, is_unknown); left != 0; left &= left - 1) {
    const int asker = __ffs(static_cast<int>(left)) - 1;
    const int row = __shfl_sync(kAllLanes, change.row, asker), token = __shfl_sync(kAllLanes, change.token, asker);
    const bool is_there = is_changed(changes, i - (threadIdx.x & 31) + asker + 1, num_changes, row, token);
    if ((threadIdx.x & 31) == asker) is_wanted = !is_there;
  }
  if (!is_wanted || change.token < 0) return;  // behind a broken row there is no token
  float* place = logits + change.row * stride + change.token;
  float logit = __fadd_rn(*place, change.bias);
  if (change.count > 0.f) {
    if (change.repeat != 1.f) logit = logit > 0.f ? __fdiv_rn(logit, change.repeat) : __fmul_rn(logit, change.repeat);
    logit = __fsub_rn(__fsub_rn(logit, __fmul_rn(change.count, change.frequency)), change.presence);
  }
  *place = change.is_banned != 0 ? -INFINITY : logit;
}

}  // namespace

extern "C" int pyserve_cuda_argmax(const float* logits, int64_t stride, int64_t vocab_size, int64_t num_rows, int32_t* tokens, void* stream) {
  if (num_rows == 0) return 0;
  if (vocab_size <= 0 || stride < vocab_size || vocab_size >= kNoToken) return kInvalid;
  return launch(argmax_kernel, dim3(static_cast<unsigned>(num_rows)), dim3(kSampleThreads), 0, static_cast<cudaStream_t>(stream), logits, stride,
                static_cast<int>(vocab_size), tokens);
}

extern "C" int pyserve_cuda_change_logits(float* logits, int64_t stride, const LogitChange* changes, int64_t num_changes, const int32_t* picked,
                                          void* stream) {
  if (num_changes == 0) return 0;
  const dim3 grid(static_cast<unsigned>((num_changes + kChangeThreads - 1) / kChangeThreads));
  return launch(change_kernel, grid, dim3(kChangeThreads), 0, static_cast<cudaStream_t>(stream), logits, stride, changes, num_changes, picked);
}

}  // namespace pyserve::cuda
