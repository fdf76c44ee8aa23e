// A copy stream: one thread that carries out posted copies in order, and events that say how far it is. The same meaning as a CUDA stream with events, so that
// whatever orders copies behind steps is exercised without a GPU.
//
// Order: a copy starts after the copies posted before it, and after its fence if it has one (the step that last wrote or read its pages). Lifetime (R20): a
// copy holds `keep_alive` until it ended, and gives it up before its event turns done, so "done" means that nothing of it is left. Closing waits for every
// copy posted; a stream that goes away closes. Failure is the event's own: it is thrown by that event's query and wait, and by no other.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "page_copy.h"

namespace pyserve {

class Event {
 public:
  bool query() const;                                         // never waits; throws std::runtime_error when what it stands for failed
  bool wait(std::optional<double> timeout_s = {}) const;      // false: the time is over. Throws as query does
  void finish(std::optional<std::string> error = {}, bool is_mismatch = false, double copy_s = 0);  // once; a later call changes nothing
  bool is_mismatch() const;                                   // it failed because a page was not what its hash says
  double copy_s() const;                                      // how long it took, without the time in the queue; 0 until it is done

 private:
  bool result() const;  // with mutex_ held

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_done_ = false;
  std::optional<std::string> error_;
  bool is_mismatch_ = false;
  double copy_s_ = 0;
};

// Signalled by whoever runs the step. One that goes away without a signal fails what waits for it, so that nothing waits for ever.
class Fence {
 public:
  Fence() : event_(std::make_shared<Event>()) {}
  ~Fence() { event_->finish("the step that the copy waits for never ended"); }
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  void signal() { event_->finish(); }
  std::shared_ptr<Event> event() const { return event_; }

 private:
  std::shared_ptr<Event> event_;
};

class CopyStream {
 public:
  // Knobs for tests: wait delay_ms before each copy; let copies fail after fail_after of them went well (none given: never).
  explicit CopyStream(double delay_ms = 0, std::optional<int64_t> fail_after = {});
  ~CopyStream() { close(); }
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // Throws std::invalid_argument, with nothing posted, when the copy does not fit or the stream is closed.
  std::shared_ptr<Event> post(PageCopy copy, std::shared_ptr<Event> fence, std::shared_ptr<void> keep_alive);
  void pause();   // for tests: hold back copies that have not started
  void resume();
  int64_t num_outstanding() const;
  void close();  // waits for the copies posted; idempotent

 private:
  struct Job {
    PageCopy copy;
    std::shared_ptr<Event> fence;
    std::shared_ptr<void> keep_alive;
    std::shared_ptr<Event> event;
  };
  void work();
  double carry_out(const Job& job);

  const double delay_ms_;
  const std::optional<int64_t> fail_after_;
  int64_t num_good_ = 0;  // the thread's own
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  int64_t num_outstanding_ = 0;
  bool is_paused_ = false, is_closing_ = false;
  std::mutex closing_;  // held by the one that joins
  std::thread thread_;
};

}  // namespace pyserve
