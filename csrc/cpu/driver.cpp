#include "driver.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "../check.h"

namespace pyserve {

Driver::Driver() {
  if (pipe(pipe_) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  for (const int end : pipe_) fcntl(end, F_SETFD, FD_CLOEXEC);
  fcntl(pipe_[0], F_SETFL, O_NONBLOCK);
  thread_ = std::thread([this] { work(); });
}

Driver::~Driver() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return state_ != State::posted; });
    state_ = State::closing;
  }
  changed_.notify_all();
  thread_.join();
  for (const int end : pipe_) close(end);
}

void Driver::start(std::function<void()> job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check(state_ == State::idle, "a step is running or waits to be collected: one at a time");
    job_ = std::move(job);
    state_ = State::posted;
  }
  changed_.notify_all();
}

void Driver::collect() {
  std::function<void()> job;  // destroyed here, in the caller's thread, with all that it holds
  std::exception_ptr error;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    check(state_ != State::idle, "no step was started");
    changed_.wait(lock, [this] { return state_ == State::done; });
    state_ = State::idle;
    job.swap(job_);
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void Driver::work() {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return state_ == State::posted || state_ == State::closing; });
      if (state_ == State::closing) return;
    }
    std::exception_ptr error;
    try {
      job_();
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = error;
      state_ = State::done;
    }
    changed_.notify_all();
    const char byte = 1;
    while (write(pipe_[1], &byte, 1) < 0 && errno == EINTR) {
    }
  }
}

}  // namespace pyserve
