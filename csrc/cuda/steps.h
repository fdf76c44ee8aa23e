// Steps that were started and are not yet collected.
//
// A thread of this object's own posts each step to the device, as soon as it is started, and waits for nothing: a second step is on the device's queue while the
// first runs. When a step's results are in host memory, CUDA calls back (on a stream that only waits for events, so that no step is held up) and the descriptor has
// a byte to read. No host thread waits for the device, but where a step could not be posted as a whole: it is done when what was posted of it is.
//
// What a step holds is destroyed by its caller: tensors may need Python's lock, which whoever destroys this object has while it waits; and CUDA must not be called
// (the step's event is destroyed) by what CUDA calls.
//
// Liveness: CUDA calls nobody back when the device has failed, so while a step is under way its event is queried now and then.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"

namespace pyserve::cuda {

class Steps {
 public:
  explicit Steps(std::shared_ptr<DeviceContext> device);
  ~Steps();  // waits for what was started
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  int fileno() const { return pipe_[0]; }  // has a byte to read for each step that is done
  void start(std::function<void()> put);   // that puts a step on the compute stream; throws std::invalid_argument while two are not collected
  void collect();                          // waits for the oldest, and throws what it threw

 private:
  enum class State { waiting, posted, done };
  struct Step {
    std::function<void()> put;
    Steps* owner;
    std::shared_ptr<Handle> end = std::make_shared<Handle>(pyserve_cuda_event_destroy);  // recorded behind it
    State state = State::waiting;
    std::exception_ptr error;
    Step(std::function<void()> put, Steps* owner) : put(std::move(put)), owner(owner) {}
  };
  using StepPtr = std::shared_ptr<Step>;
  static void landed(void* step);  // CUDA calls it

  void run();
  StepPtr first(State state) const;
  void post(const StepPtr& step);
  void look_for_failure(const Step& posted);
  void done(Step& step, std::exception_ptr error);
  template <class Action>
  std::exception_ptr without_lock(std::unique_lock<std::mutex>& lock, const Action& action);

  const std::shared_ptr<DeviceContext> device_;
  Handle notices_{pyserve_cuda_stream_destroy};
  int pipe_[2];
  std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::deque<StepPtr> steps_;
  std::vector<StepPtr> let_go_;  // that CUDA's call back had a hold of
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace pyserve::cuda
