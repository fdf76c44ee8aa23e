// A thread that runs one job at a time and says through a file descriptor when it is done.
//
// An event loop watches the descriptor, so a step needs no interpreter thread of its own: such a thread would wait for the interpreter's lock each time it comes
// back from a kernel, behind whatever the loop does at that moment.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace pyserve {

class Driver {
 public:
  Driver();
  ~Driver();  // waits for the job
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  int fileno() const { return pipe_[0]; }  // has a byte to read for each job that is done
  void start(std::function<void()> job);   // throws std::invalid_argument while one runs or waits to be collected
  void collect();                          // waits for the job, and throws what it threw

 private:
  enum class State { idle, posted, done, closing };
  void work();

  int pipe_[2];
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::idle;
  std::function<void()> job_;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace pyserve
