// A persistent team of threads that run one function together, each with its Share.
//
// A step is some 300 kernel calls of 5-50 us, so starting threads, or waking them per call, would cost more than the work. `run` wakes the team once; inside,
// `barrier` separates kernels. Both spin for some 20 us, the time that a barrier usually takes, then sleep: an idle or outnumbered team costs no CPU.
//
// The caller is member 0. The first exception of any member stops the run: the others leave at their next barrier, and `run` throws it again in the caller.
// One run at a time; a team of one has no threads. The destructor joins; it must not be called during a run.
#pragma once
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "../ops.h"

namespace pyserve {

class Team {
 public:
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int num_threads() const { return num_threads_; }
  void run(const std::function<void(Share)>& function);
  void barrier();  // only inside a run, by every member

 private:
  struct Stopped {};  // thrown out of a barrier when another member failed

  void close();
  void work(int index);
  void take_part(int index);
  template <class Ready>
  void wait_until(Ready is_ready);
  void wake_sleepers();

  const int num_threads_;
  const std::function<void(Share)>* function_ = nullptr;
  std::atomic<uint64_t> run_id_{0};
  std::atomic<uint64_t> barrier_id_{0};
  std::atomic<int> num_arrived_{0};
  std::atomic<int> num_done_{0};
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_closing_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace pyserve
