// A thread that runs jobs in turn and says through a file descriptor when each is done.
//
// An event loop watches the descriptor, so a step needs no interpreter thread of its own: such a thread would wait for the interpreter's lock each time it comes
// back from a kernel, behind whatever the loop does at that moment. A second job may wait behind the one that runs, so that between two steps nobody waits for
// the event loop.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace pyserve {

class Driver {
 public:
  Driver();
  ~Driver();  // waits for the jobs
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  int fileno() const { return pipe_[0]; }  // has a byte to read for each job that is done
  void start(std::function<void()> job);   // throws std::invalid_argument while two run, wait, or are still to be collected
  void collect();                          // waits for the oldest job, and throws what it threw

 private:
  struct Job {
    std::function<void()> run;
    std::exception_ptr error;
    bool is_done = false;
  };
  void work();
  Job* next();  // the oldest that has not run

  int pipe_[2];
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // in order of arrival, until they are collected
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace pyserve
