// Copies of pages between the pool and the host on a stream of their own, with events of the same meaning as csrc/cpu/stream.h's.
//
// Order: a copy comes after the copies posted before it and, on the device, after the step collected last, which may have written its pages (R15). Steps that are not
// collected must not touch its pages: so whoever is left out of a step is parked beside it, and whoever finds room beside it comes back (pyserve/beside.py).
// Lifetime (R20): a copy holds `keep_alive` until its end
// has been noticed, by a query, a wait, the next post or `close`, and gives it up before its event turns done.
//
// Hashes (R23b): of pages that are marked, the device hashes what lies in the pool, before the copy out of it and after the copy into it;
// whoever notices the end keeps the hashes, or compares them. Failure is the event's own.
//
// Memory that is not pinned is copied all the same (R17), but CUDA then makes the one who posts the copy wait for it. Such copies, those that find no pinned memory
// for their hashes, and whatever is posted behind them, are posted by a thread of the stream's own, which also waits for their end: nobody else ever waits.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../cpu/page_copy.h"
#include "device.h"

namespace pyserve::cuda {

class CopyStream;

class CopyEvent {
 public:
  bool query();                                           // never waits; throws std::runtime_error when the copy failed
  bool wait(std::optional<double> timeout_s);             // false: the time is over
  bool is_mismatch() const;
  double copy_s() const;                                  // without the time behind other copies; 0 until it is done

 private:
  friend class CopyStream;
  using Clock = std::chrono::steady_clock;
  bool poll();  // with mutex_ held
  void finish(std::optional<std::string> error, const uint64_t* hashes);
  void compare(const uint64_t* hashes);
  bool result() const;

  mutable std::mutex mutex_;
  std::shared_ptr<CopyStream> stream_;  // for its hash memory, until the end
  Handle event_{pyserve_cuda_event_destroy};
  std::shared_ptr<void> keep_alive_;
  std::vector<int64_t> hashed_;         // places in `hashes_` of the pages that are hashed
  std::unique_ptr<Memory> found_;       // uint64 [hashed_.size()]: pinned, or the device's where nothing can be pinned
  int64_t* hashes_ = nullptr;
  bool to_host_ = false, is_done_ = false, is_mismatch_ = false;
  bool is_worked_on_ = false;           // the stream's thread sees to it: no event says when it is done
  std::optional<std::string> error_;
  Clock::time_point posted_;
  double copy_s_ = 0;
};

class CopyStream : public std::enable_shared_from_this<CopyStream> {
 public:
  explicit CopyStream(std::shared_ptr<DeviceContext> device);
  ~CopyStream();

  // Throws std::invalid_argument, with nothing posted, when the copy does not fit or the stream is closed; std::runtime_error when the device fails.
  std::shared_ptr<CopyEvent> post(const PageCopy& copy, std::shared_ptr<void> keep_alive);
  int64_t num_outstanding();
  void close();  // waits for the copies posted; idempotent
  // Measures the ways of copying with the pool, which stays as it is, and host memory of its own; what it found is used from then on. Throws std::runtime_error
  // when it fails or takes longer than `limit_us`; the defaults stay.
  CopyTuning calibrate(void* pool, int64_t num_pages, int64_t page_bytes, int64_t limit_us);

 private:
  friend class CopyEvent;
  struct Job {  // what is to be posted
    PageCopy copy;
    std::vector<int32_t> table, marked;
    std::shared_ptr<CopyEvent> event;
  };
  void launch(const Job& job);
  void hand_over(Job job);
  void work();
  void carry_out(const Job& job);
  bool is_working();
  void notice();
  std::unique_ptr<Memory> take_found(int64_t count);  // null: there is none that large
  std::unique_ptr<Memory> make_found(int64_t count);
  void give_found(std::unique_ptr<Memory> memory);
  CopyEvent::Clock::time_point ended(CopyEvent::Clock::time_point now);  // notes an end; returns the one before

  const std::shared_ptr<DeviceContext> device_;
  Handle stream_{pyserve_cuda_stream_destroy};
  CopyTuning tuning_ = kDefaultTuning;
  std::mutex posting_, mutex_;
  std::deque<std::shared_ptr<CopyEvent>> outstanding_;  // guarded by posting_
  bool is_closed_ = false;
  std::vector<std::unique_ptr<Memory>> idle_found_;  // guarded by mutex_
  CopyEvent::Clock::time_point last_end_{};

  std::mutex working_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // guarded by working_, as what follows; the first is being carried out
  bool is_ending_ = false;
  std::thread worker_;    // begun by the first job
};

}  // namespace pyserve::cuda
