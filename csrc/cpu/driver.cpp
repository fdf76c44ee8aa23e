#include "driver.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "../check.h"

namespace pyserve {
namespace {

constexpr size_t max_jobs = 2;

}  // namespace

Driver::Driver() {
  if (pipe(pipe_) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  for (const int end : pipe_) fcntl(end, F_SETFD, FD_CLOEXEC);
  fcntl(pipe_[0], F_SETFL, O_NONBLOCK);
  thread_ = std::thread([this] { work(); });
}

Driver::~Driver() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return next() == nullptr; });
    is_closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (const int end : pipe_) close(end);
}

void Driver::start(std::function<void()> job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check(jobs_.size() < max_jobs, "a step is running or waits to be collected, and another one is behind it: two at a time");
    jobs_.push_back({std::move(job), nullptr});
  }
  changed_.notify_all();
}

void Driver::collect() {
  Job job;  // destroyed here, in the caller's thread, with all that it holds
  {
    std::unique_lock<std::mutex> lock(mutex_);
    check(!jobs_.empty(), "no step was started");
    changed_.wait(lock, [this] { return jobs_.front().is_done; });
    job = std::move(jobs_.front());
    jobs_.pop_front();
  }
  if (job.error) std::rethrow_exception(job.error);
}

Driver::Job* Driver::next() {
  for (Job& job : jobs_)
    if (!job.is_done) return &job;
  return nullptr;
}

void Driver::work() {
  for (;;) {
    Job* job = nullptr;  // stays where it is: only those before it are taken away
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return (job = next()) != nullptr || is_closing_; });
      if (job == nullptr) return;
    }
    std::exception_ptr error;
    try {
      job->run();
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job->error = error;
      job->is_done = true;
    }
    changed_.notify_all();
    const char byte = 1;
    while (write(pipe_[1], &byte, 1) < 0 && errno == EINTR) {
    }
  }
}

}  // namespace pyserve
