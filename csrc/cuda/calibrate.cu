// Measures once at start what the choice between the ways of copying goes by (page_copy.cu).
//
// Scattered pieces of a few sizes are copied from the pool to the host by each way: the pool stays as it is, the host buffer is overwritten. Of three tries the
// shortest counts. Nothing of it is exact, nor need be: ways that are nearly as good as each other may be taken for each other. The time is looked at between
// copies, of 16 MiB at most; a calibration that is cut short leaves the defaults.
#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "driver.cuh"

namespace pyserve::cuda {

namespace {

constexpr int64_t kSizes[] = {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20};
constexpr int64_t kMaxPieces = 64;
constexpr int kTries = 3;
constexpr double kChunkUs = 300;  // how long another stream's small copy may wait for ours
constexpr double kNearly = 1.1;

struct Times {
  double post_us = std::numeric_limits<double>::infinity();   // the host's
  double total_us = std::numeric_limits<double>::infinity();  // until the copy was there
  int64_t num_pieces = 0;
};

using Deadline = std::chrono::steady_clock::time_point;

double us_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

int measure(const PoolCopy& memory, int64_t piece_bytes, CopyWay way, Deadline deadline, void* stream, Times* times) {
  const int64_t pool_pieces = memory.num_pages * memory.page_bytes / piece_bytes;
  times->num_pieces = std::min({kMaxPieces, pool_pieces / 2, memory.host_bytes / piece_bytes});
  if (times->num_pieces < 2) return kRefused;
  std::vector<int32_t> combs;
  for (int64_t i = 0; i < times->num_pieces; ++i) {
    const int32_t from_the_end = static_cast<int32_t>(2 * (times->num_pieces - 1 - i));  // so that nothing coalesces
    for (const int32_t value : {from_the_end, 1, 1, 1, static_cast<int32_t>(i)}) combs.push_back(value);
  }
  PoolCopy copy = memory;
  copy.num_pages = pool_pieces;
  copy.page_bytes = piece_bytes;
  copy.combs = combs.data();
  copy.num_combs = times->num_pieces;
  copy.to_host = 1;
  copy.way = static_cast<int64_t>(way);
  copy.tuning = kDefaultTuning;
  copy.hashes = nullptr;
  for (int i = 0; i < kTries + 1; ++i) {  // the first warms up
    if (std::chrono::steady_clock::now() >= deadline) return kNotReady;
    const auto start = std::chrono::steady_clock::now();
    int error = pyserve_cuda_page_copy(&copy, stream, nullptr, 0);
    const double post_us = us_since(start);
    if (error == 0) error = pyserve_cuda_stream_synchronize(stream);
    if (error != 0) return error;
    if (i == 0) continue;
    times->post_us = std::min(times->post_us, post_us);
    times->total_us = std::min(times->total_us, us_since(start));
  }
  return 0;
}

int calibrate(const PoolCopy* memory, CopyTuning* tuning, Deadline deadline, void* stream) {
  const bool can_batch = pyserve_cuda_can_batch() != 0;
  tuning->min_batch_bytes = std::numeric_limits<int64_t>::max();
  bool is_largest = true, is_batch_good = can_batch;
  for (size_t i = std::size(kSizes); i-- > 0;) {  // downwards, for as long as batched is no worse than the kernel
    Times calls, batched, kernel;
    int error = measure(*memory, kSizes[i], CopyWay::calls, deadline, stream, &calls);
    if (error == 0) error = measure(*memory, kSizes[i], CopyWay::kernel, deadline, stream, &kernel);
    if (error == 0 && can_batch) error = measure(*memory, kSizes[i], CopyWay::batched, deadline, stream, &batched);
    if (error == kRefused && i > 0) continue;  // the memory given is too small for this size
    if (error != 0) return error;
    is_batch_good = is_batch_good && batched.total_us <= kNearly * kernel.total_us;
    if (is_batch_good) tuning->min_batch_bytes = kSizes[i];
    if (is_largest) {
      const double bytes_a_us = static_cast<double>(calls.num_pieces * kSizes[i]) / calls.total_us;
      tuning->chunk_bytes = std::clamp<int64_t>(static_cast<int64_t>(bytes_a_us * kChunkUs), 4 << 20, 64 << 20) >> 20 << 20;
      is_largest = false;
    }
    if (i == 0) {
      const double one_call_us = calls.post_us / static_cast<double>(calls.num_pieces);
      tuning->max_calls = std::clamp<int64_t>(static_cast<int64_t>(std::min(batched.post_us, kernel.post_us) / one_call_us), 4, 64);
    }
  }
  return 0;
}

}  // namespace

extern "C" int pyserve_cuda_calibrate(const PoolCopy* memory, CopyTuning* tuning, int64_t limit_us, void* stream) {
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(limit_us);
  CopyTuning found = kDefaultTuning;
  const int error = calibrate(memory, &found, deadline, stream);
  *tuning = error == 0 ? found : kDefaultTuning;
  return error;
}

}  // namespace pyserve::cuda
