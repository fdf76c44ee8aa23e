// A persistent team of threads that run one function together, each with its Share.
//
// A step is some 300 kernel calls of 5-50 us, so starting threads, or waking them per call, would cost more than the work. `run` wakes the team once; inside,
// members `wait` for what others do. Both spin for some 20 us, the time that the others usually take, then sleep: an idle or outnumbered team costs no CPU.
// Meanwhile they offer their processor to whoever else wants it.
//
// The caller is member 0. The first exception of any member stops the run: the others leave at their next wait, and `run` throws it again in the caller.
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
  // Only inside a run. Until `is_ready()`, which reads atomics that other members change; who makes it true calls `wake` afterwards.
  template <class Ready>
  void wait(Ready is_ready) {
    if (!is_ready()) wait_until([&] { return is_ready() || has_failed_.load(); });
    if (has_failed_) throw Stopped();
  }
  void wake() {
    if (num_sleeping_.load() != 0) wake_sleepers();
  }

 private:
  struct Stopped {};  // thrown out of a wait when another member failed

  void close();
  void work(int index);
  void take_part(int index);
  void wait_until(const std::function<bool()>& is_ready);
  void wake_sleepers();

  const int num_threads_;
  const std::function<void(Share)>* function_ = nullptr;
  std::atomic<uint64_t> run_id_{0};
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
