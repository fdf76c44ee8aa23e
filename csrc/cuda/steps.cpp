#include "steps.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "../check.h"

namespace pyserve::cuda {
namespace {

constexpr size_t kMaxSteps = 2;
constexpr std::chrono::milliseconds kLook(200);

template <class Action>
std::exception_ptr caught(const Action& action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

Steps::Steps(std::shared_ptr<DeviceContext> device) : device_(std::move(device)) {
  device_->use();
  must(pyserve_cuda_stream_create(&notices_.value, 1), "making a stream");
  if (pipe(pipe_) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  for (const int end : pipe_) fcntl(end, F_SETFD, FD_CLOEXEC);
  fcntl(pipe_[0], F_SETFL, O_NONBLOCK);
  thread_ = std::thread([this] { run(); });
}

Steps::~Steps() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !first(State::waiting) && !first(State::posted); });
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  pyserve_cuda_stream_synchronize(notices_.value);  // a call may still be on its way out
  for (const int end : pipe_) close(end);
}

void Steps::start(std::function<void()> put) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check(steps_.size() < kMaxSteps, "a step is running or waits to be collected, and another one is behind it: two at a time");
    steps_.push_back(std::make_shared<Step>(std::move(put), this));
  }
  changed_.notify_all();
}

void Steps::collect() {
  StepPtr step;
  std::vector<StepPtr> let_go;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    check(!steps_.empty(), "no step was started");
    changed_.wait(lock, [this] { return steps_.front()->state == State::done; });
    step = std::move(steps_.front());
    steps_.pop_front();
    let_go.swap(let_go_);
  }
  step->put = nullptr;  // by the caller and without the lock: this object's thread may still have the step in its hands
  if (step->error) std::rethrow_exception(step->error);
  device_->step_collected(step->end);
}

void Steps::landed(void* data) {
  const std::unique_ptr<StepPtr> own(static_cast<StepPtr*>(data));
  Step& step = **own;
  Steps& self = *step.owner;
  std::lock_guard<std::mutex> lock(self.mutex_);
  self.let_go_.push_back(std::move(*own));
  if (step.state != State::posted) return;  // it was given up
  self.done(step, nullptr);
  self.changed_.notify_all();
}

Steps::StepPtr Steps::first(State state) const {
  for (const StepPtr& step : steps_)
    if (step->state == state) return step;
  return nullptr;
}

void Steps::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    const StepPtr waiting = first(State::waiting), posted = first(State::posted);
    if (waiting) {
      const std::exception_ptr error = without_lock(lock, [&] { post(waiting); });
      if (error) done(*waiting, error);
      changed_.notify_all();
    } else if (is_ending_) {
      return;
    } else if (!posted) {
      changed_.wait(lock);
    } else if (changed_.wait_for(lock, kLook) == std::cv_status::timeout) {
      const std::exception_ptr error = without_lock(lock, [&] { look_for_failure(*posted); });
      if (error && posted->state == State::posted) done(*posted, error);
      changed_.notify_all();
    }
  }
}

template <class Action>
std::exception_ptr Steps::without_lock(std::unique_lock<std::mutex>& lock, const Action& action) {
  lock.unlock();
  const std::exception_ptr error = caught(action);
  lock.lock();
  return error;
}

void Steps::post(const StepPtr& step) {
  try {
    step->put();
  } catch (...) {  // what was launched of it still writes to its sequences' pages, which come free when it is done
    pyserve_cuda_stream_synchronize(device_->compute());
    throw;
  }
  must(pyserve_cuda_event_create(&step->end->value), "making an event");
  must(pyserve_cuda_event_record(step->end->value, device_->compute()), "recording the step");
  must(pyserve_cuda_stream_wait(notices_.value, step->end->value), "waiting for the step");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    step->state = State::posted;
  }
  auto own = std::make_unique<StepPtr>(step);
  must(pyserve_cuda_host_call(notices_.value, &Steps::landed, own.get()), "asking to be told of the step's end");
  own.release();
}

void Steps::look_for_failure(const Step& posted) {
  const int error = pyserve_cuda_event_query(posted.end->value);
  if (error != kNotReady) must(error, "the step");
}

// With the lock held.
void Steps::done(Step& step, std::exception_ptr error) {
  step.error = std::move(error);
  step.state = State::done;
  const char byte = 1;
  while (write(pipe_[1], &byte, 1) < 0 && errno == EINTR) {
  }
}

}  // namespace pyserve::cuda
