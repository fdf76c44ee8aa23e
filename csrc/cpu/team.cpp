#include "team.h"

#include <utility>

#include "../check.h"
#include "isa.h"

#if PYSERVE_X86
#include <immintrin.h>
#endif

namespace pyserve {
namespace {

constexpr int num_spins = 1000;  // some 20 us: longer than the others take to end a balanced kernel, shorter than a wake-up twice over

void relax() {
#if PYSERVE_X86
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Team::Team(int num_threads) : num_threads_(num_threads) {
  check(num_threads >= 1 && num_threads <= 1024, "num_threads must be in 1..1024, not ", num_threads);
  try {
    for (int index = 1; index < num_threads; ++index) threads_.emplace_back([this, index] { work(index); });
  } catch (...) {  // the system has no more threads: those that started must end
    close();
    throw;
  }
}

Team::~Team() { close(); }

void Team::close() {
  is_closing_ = true;
  run_id_.fetch_add(1);
  wake();
  for (std::thread& thread : threads_) thread.join();
}

// Spin, then sleep. A sleeper announces itself before it looks a last time, and whoever changes what is waited for looks for sleepers afterwards (both
// sequentially consistent), so no wake-up is lost.
void Team::wait_until(const std::function<bool()>& is_ready) {
  for (int i = 0; i < num_spins; ++i) {
    if (is_ready()) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  num_sleeping_.fetch_add(1);
  changed_.wait(lock, is_ready);
  num_sleeping_.fetch_sub(1);
}

void Team::wake_sleepers() {
  { std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper is now either in its wait or past its last look
  changed_.notify_all();
}

void Team::run(const std::function<void(Share)>& function) {
  function_ = &function;
  num_done_ = 0;
  has_failed_ = false;
  run_id_.fetch_add(1);
  wake();
  take_part(0);
  wait_until([this] { return num_done_.load() == num_threads_; });
  if (has_failed_) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void Team::take_part(int index) {
  try {
    (*function_)(Share{index, num_threads_});
  } catch (const Stopped&) {
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
    has_failed_ = true;
  }
  if (has_failed_) wake();
  if (num_done_.fetch_add(1) + 1 == num_threads_) wake();
}

void Team::work(int index) {
  for (uint64_t seen = 0;;) {
    wait_until([this, seen] { return run_id_.load() != seen; });
    seen = run_id_.load();
    if (is_closing_) return;
    take_part(index);
  }
}

}  // namespace pyserve
