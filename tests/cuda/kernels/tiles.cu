// csrc/cuda/tiles.h for the tests: plain C++, no kernel.
#include "tiles.h"

#include <chrono>

#include "portable.cuh"

namespace pyserve::cuda {

// Shares of one decode step, as plan_kernel and walk_kernel compute them: writes the places of each block (`warps` workers each), returns the total.
extern "C" int64_t tiles_shares(const int32_t* positions, int num_rows, int num_pairs, int window, int num_blocks, int warps, int32_t* places) {
  int total = 0;
  for (int row = 0; row < num_rows; ++row) total += units_of(positions[row], window).count * num_pairs;
  const int num_workers = num_blocks * warps;
  for (int block = 0; block < num_blocks; ++block)
    places[block] = share_start((block + 1) * warps, num_workers, total) - share_start(block * warps, num_workers, total);
  return total;
}

// Microseconds that the assignment of all rows and workers takes.
extern "C" double tiles_time_us(const int32_t* positions, int num_rows, int num_pairs, int num_workers) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<int> places(static_cast<size_t>(num_rows) + 1), rows(static_cast<size_t>(num_workers));
  for (int row = 0; row < num_rows; ++row) places[row + 1] = places[row] + units_of(positions[row], 0).count * num_pairs;
  for (int worker = 0; worker < num_workers; ++worker) {
    const int start = share_start(worker, num_workers, places[num_rows]);
    rows[worker] = static_cast<int>(std::upper_bound(places.begin(), places.end(), start) - places.begin());
  }
  volatile int used = rows[num_workers / 2];
  (void)used;
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

// Places whose worker is not the one whose share holds them.
extern "C" int64_t tiles_wrong_workers(int num_workers, int total) {
  int64_t wrong = 0;
  for (int worker = 0; worker < num_workers; ++worker)
    for (int place = share_start(worker, num_workers, total); place < share_start(worker + 1, num_workers, total); ++place)
      wrong += worker_at(place, num_workers, total) != worker;
  return wrong + (share_start(num_workers, num_workers, total) != total);
}

extern "C" int64_t tiles_wrong_quotients(int divisor) {
  int64_t wrong = 0;
  const Divider by = divider(divisor);
  for (int64_t base : {int64_t{0}, int64_t{1} << 20, int64_t{0x7fffffff} - 5000})
    for (int64_t i = 0; i < 5000; ++i) wrong += divide(static_cast<int>(base + i), by) != static_cast<int>((base + i) / divisor);
  return wrong;
}

}  // namespace pyserve::cuda
