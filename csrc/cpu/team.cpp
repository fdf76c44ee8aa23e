#include "team.h"

#include <sched.h>

#include <chrono>
#include <utility>

#include "../check.h"
#include "isa.h"

#if PYSERVE_X86
#include <immintrin.h>
#endif

namespace pyserve {
namespace {

constexpr int num_spins = 1000;         // some 20 us: longer than the others take to end a balanced kernel, shorter than a wake-up twice over
constexpr int spins_before_yield = 50;  // some 1 us: longer than most waits of a team that has its processors to itself
constexpr auto long_absence = std::chrono::microseconds(2500);  // longer than most turns of an event loop; a thread that computes without end takes more
constexpr int absences_apart = 40;

void relax() {
#if PYSERVE_X86
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Whoever else wants this processor (the event loop, one of its clients) should have it now, while this member can do nothing and holds no part: else the
// scheduler takes the processor away at its next tick, most likely in the middle of a part, and the others wait for that. With two threads on two processors,
// the loop and its clients on the same ones, 16 chats get 4-7 % more tokens by it and 4 chats 4 %, and tokens come at even intervals (4 chats: the middle half
// of them 3.7 to 4.6 ms after the one before, where it was 3.2 to 6.6 ms).
//
// A thread that computes without end would take a whole turn each time: with one on each processor that cost a third of the tokens. After a long absence a
// member therefore stays for `absences_apart` times as long, and then at most 4 % are lost.
void let_others_run() {
  using Clock = std::chrono::steady_clock;
  thread_local Clock::time_point stays_until{};
  const Clock::time_point left = Clock::now();
  if (left < stays_until) return;
  sched_yield();
  const Clock::time_point back = Clock::now();
  if (back - left > long_absence) stays_until = back + absences_apart * (back - left);
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

// Spin, offer the processor to others once meanwhile, then sleep. A sleeper announces itself before it looks a last time, and whoever changes what is waited
// for looks for sleepers afterwards (both sequentially consistent), so no wake-up is lost.
void Team::wait_until(const std::function<bool()>& is_ready) {
  for (int i = 0; i < num_spins; ++i) {
    if (is_ready()) return;
    if (i == spins_before_yield) let_others_run();
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
