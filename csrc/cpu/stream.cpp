#include "stream.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

#include "../check.h"

namespace pyserve {

bool Event::result() const {
  if (error_) throw std::runtime_error(*error_);
  return is_done_;
}

bool Event::query() const {
  std::lock_guard<std::mutex> lock(mutex_);  // held by others for a few instructions only
  return result();
}

bool Event::wait(std::optional<double> timeout_s) const {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_done = [this] { return is_done_; };
  if (timeout_s) {
    changed_.wait_for(lock, std::chrono::duration<double>(std::min(std::max(*timeout_s, 0.0), 1e8)), is_done);
  } else {
    changed_.wait(lock, is_done);
  }
  return result();
}

bool Event::is_mismatch() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_mismatch_;
}

double Event::copy_s() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return copy_s_;
}

void Event::finish(std::optional<std::string> error, bool is_mismatch, double copy_s) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_done_) return;
    is_done_ = true;
    error_ = std::move(error);
    is_mismatch_ = is_mismatch;
    copy_s_ = copy_s;
  }
  changed_.notify_all();
}

CopyStream::CopyStream(double delay_ms, std::optional<int64_t> fail_after) : delay_ms_(delay_ms), fail_after_(fail_after) {
  check(delay_ms >= 0 && delay_ms < 1e9, "delay_ms must not be negative");
  check(!fail_after || *fail_after >= 0, "fail_after must not be negative");
  thread_ = std::thread([this] { work(); });
}

std::shared_ptr<Event> CopyStream::post(PageCopy copy, std::shared_ptr<Event> fence, std::shared_ptr<void> keep_alive) {
  check_copy(copy);
  auto event = std::make_shared<Event>();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check(!is_closing_, "the copy stream is closed");
    jobs_.push_back(Job{std::move(copy), std::move(fence), std::move(keep_alive), event});
    ++num_outstanding_;
  }
  changed_.notify_all();
  return event;
}

void CopyStream::pause() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_paused_ = true;
}

void CopyStream::resume() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_paused_ = false;
  }
  changed_.notify_all();
}

int64_t CopyStream::num_outstanding() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_outstanding_;
}

void CopyStream::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  std::lock_guard<std::mutex> lock(closing_);
  if (thread_.joinable()) thread_.join();
}

void CopyStream::work() {
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return is_closing_ || (!jobs_.empty() && !is_paused_); });
      if (jobs_.empty()) return;  // closing, and all is done; a pause does not hold back a close
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    std::optional<std::string> error;
    bool is_mismatch = false;
    double copy_s = 0;
    try {
      copy_s = carry_out(job);
    } catch (const PageMismatch& mismatch) {
      error = mismatch.what();
      is_mismatch = true;
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    job.keep_alive.reset();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      --num_outstanding_;
    }
    job.event->finish(std::move(error), is_mismatch, copy_s);
  }
}

// Returns how long the copy itself took. Throws what went wrong.
double CopyStream::carry_out(const Job& job) {
  if (job.fence) job.fence->wait();
  if (delay_ms_ > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(delay_ms_));
  if (fail_after_ && num_good_ >= *fail_after_) {
    throw std::runtime_error("copy failed: the stream was told to fail after " + std::to_string(*fail_after_) + " copies");
  }
  const auto started = std::chrono::steady_clock::now();
  page_copy(job.copy);
  ++num_good_;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

}  // namespace pyserve
