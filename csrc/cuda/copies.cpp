#include "copies.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "../check.h"

namespace pyserve::cuda {
namespace {

// The pages of the copy whose hash entry is not 0: a comb each, that stands for hash i of `hashed`.
std::vector<int32_t> marked_pages(const PageCopy& copy, std::vector<int64_t>& hashed) {
  std::vector<int32_t> rows;
  for (const Comb& comb : copy.combs)
    for (int64_t i = 0; i < comb.run_pages * comb.count; ++i) {
      const int64_t place = comb.list_offset + i;
      if (copy.hashes[place] == 0) continue;
      const int64_t page = comb.start_page + i / comb.run_pages * comb.stride_pages + i % comb.run_pages;
      for (const int64_t value : {page, int64_t{1}, int64_t{1}, int64_t{1}, static_cast<int64_t>(hashed.size())}) rows.push_back(static_cast<int32_t>(value));
      hashed.push_back(place);
    }
  return rows;
}

std::vector<int32_t> table_of(const std::vector<Comb>& combs) {
  std::vector<int32_t> rows;
  for (const Comb& comb : combs)
    for (const int64_t value : {comb.start_page, comb.run_pages, comb.stride_pages, comb.count, comb.list_offset}) rows.push_back(static_cast<int32_t>(value));
  return rows;
}

PoolCopy request_of(const PageCopy& copy, const std::vector<int32_t>& table, const CopyTuning& tuning) {
  PoolCopy request{};
  request.pool = copy.pool;
  request.num_pages = copy.num_pages;
  request.page_bytes = copy.page_bytes;
  request.host = copy.host;
  request.host_bytes = copy.host_bytes;
  request.combs = table.data();
  request.num_combs = static_cast<int64_t>(table.size()) / 5;
  request.to_host = copy.to_host;
  request.tuning = tuning;
  return request;
}

std::optional<std::string> failure(int error) {
  if (error == 0) return std::nullopt;
  return std::string("the copy failed: ") + pyserve_cuda_error_text(error);
}

}  // namespace

// --- events

bool CopyEvent::query() {
  std::lock_guard<std::mutex> lock(mutex_);
  return poll() && result();
}

bool CopyEvent::wait(std::optional<double> timeout_s) {
  constexpr std::chrono::microseconds kFirstNap(20), kLongestNap(1000);
  const auto deadline = Clock::now() + std::chrono::duration<double>(std::min(std::max(timeout_s.value_or(1e8), 0.0), 1e8));
  for (auto nap = kFirstNap;; nap = std::min(2 * nap, kLongestNap)) {
    if (query()) return true;
    if (timeout_s && Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(nap);
  }
}

bool CopyEvent::is_mismatch() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_mismatch_;
}

double CopyEvent::copy_s() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return copy_s_;
}

bool CopyEvent::result() const {
  if (error_) throw std::runtime_error(*error_);
  return true;
}

bool CopyEvent::poll() {
  if (is_done_ || is_worked_on_) return is_done_;
  stream_->device_->use();
  const int error = pyserve_cuda_event_query(event_.value);
  if (error == kNotReady) return false;
  finish(failure(error), found_ ? found_->as<uint64_t>() : nullptr);
  return true;
}

// Nothing of the copy is left when it turns done. `hashes`: those found, on the host.
void CopyEvent::finish(std::optional<std::string> error, const uint64_t* hashes) {
  const auto now = Clock::now(), before = stream_->ended(now);
  copy_s_ = std::chrono::duration<double>(now - std::max(posted_, before)).count();
  error_ = std::move(error);
  if (!error_) compare(hashes);
  if (found_) stream_->give_found(std::move(found_));
  keep_alive_.reset();
  stream_.reset();
  is_done_ = true;
}

void CopyEvent::compare(const uint64_t* hashes) {
  for (size_t i = 0; i < hashed_.size(); ++i) {
    const uint64_t hash = hashes[i];
    const auto found = static_cast<int64_t>(hash == 0 ? 1 : hash);  // 0 stands for "no hash"
    int64_t& known = hashes_[hashed_[i]];
    if (!to_host_ && known != found && !error_) {
      error_ = "page " + std::to_string(hashed_[i]) + " of the parked state is not what was parked";
      is_mismatch_ = true;
    }
    if (to_host_) known = found;
  }
}

// --- the stream

CopyStream::CopyStream(std::shared_ptr<DeviceContext> device) : device_(std::move(device)) {
  constexpr int64_t kHashes = 8192;  // of a park of 131,072 tokens
  device_->use();
  must(pyserve_cuda_stream_create(&stream_.value, 0), "making the copy stream");
  for (int i = 0; i < 2; ++i) give_found(make_found(kHashes));  // now, since pinning takes its time
}

CopyStream::~CopyStream() { pyserve_cuda_stream_synchronize(stream_.value); }

std::shared_ptr<CopyEvent> CopyStream::post(const PageCopy& copy, std::shared_ptr<void> keep_alive) {
  check_copy(copy);
  std::lock_guard<std::mutex> lock(posting_);
  check(!is_closed_, "the copy stream is closed");
  notice();
  device_->use();
  auto event = std::make_shared<CopyEvent>();
  must(pyserve_cuda_event_create(&event->event_.value), "making an event");
  event->stream_ = shared_from_this();
  event->keep_alive_ = std::move(keep_alive);
  event->hashes_ = copy.hashes;
  event->to_host_ = copy.to_host;
  event->posted_ = CopyEvent::Clock::now();
  Job job{copy, table_of(copy.combs), {}, event};
  if (copy.hashes != nullptr) job.marked = marked_pages(copy, event->hashed_);
  if (!event->hashed_.empty()) event->found_ = take_found(static_cast<int64_t>(event->hashed_.size()));
  const bool has_memory = event->hashed_.empty() || event->found_;
  const bool must_wait = !has_memory || is_working() || !pyserve_cuda_is_pinned(copy.host, copy.host_bytes);
  event->is_worked_on_ = must_wait;
  outstanding_.push_back(event);  // from here on something may be under way, whatever goes wrong
  if (must_wait) {
    hand_over(std::move(job));
  } else {
    launch(job);
  }
  return event;
}

void CopyStream::launch(const Job& job) {
  const PageCopy& copy = job.copy;
  CopyEvent& event = *job.event;
  PoolCopy request = request_of(copy, job.table, tuning_), hashing = request_of(copy, job.marked, tuning_);
  if (!pyserve_cuda_is_pinned(copy.host, copy.host_bytes)) request.way = static_cast<int64_t>(CopyWay::calls);
  char message[200] = "";
  device_->wait_for_step(stream_.value);
  const auto posted = [&](int error) {
    if (error == 0) return;
    must(pyserve_cuda_event_record(event.event_.value, stream_.value), "recording a copy");
    check(error != kRefused || message[0] == 0, message);
    must(error, "posting a copy");
  };
  const auto hash = [&] {
    if (!event.hashed_.empty()) posted(pyserve_cuda_page_hash(&hashing, event.found_->as<uint64_t>(), stream_.value, message, sizeof message));
  };
  if (copy.to_host) hash();
  posted(pyserve_cuda_page_copy(&request, stream_.value, message, sizeof message));
  if (!copy.to_host) hash();
  must(pyserve_cuda_event_record(event.event_.value, stream_.value), "recording a copy");
}

// --- copies that would make their caller wait

bool CopyStream::is_working() {
  std::lock_guard<std::mutex> lock(working_);
  return !jobs_.empty();
}

void CopyStream::hand_over(Job job) {
  {
    std::lock_guard<std::mutex> lock(working_);
    jobs_.push_back(std::move(job));
    if (!worker_.joinable()) worker_ = std::thread([self = shared_from_this()] { self->work(); });
  }
  changed_.notify_all();
}

void CopyStream::work() {
  std::unique_lock<std::mutex> lock(working_);
  for (;;) {
    changed_.wait(lock, [this] { return !jobs_.empty() || is_ending_; });
    if (jobs_.empty()) return;
    Job& job = jobs_.front();  // stays where it is: others are added behind it
    lock.unlock();
    carry_out(job);
    lock.lock();
    jobs_.pop_front();
  }
}

void CopyStream::carry_out(const Job& job) {
  CopyEvent& event = *job.event;
  std::optional<std::string> error;
  std::vector<uint64_t> hashes(event.hashed_.size());
  const auto num_bytes = static_cast<int64_t>(hashes.size()) * 8;
  try {
    device_->use();
    if (num_bytes > 0 && !event.found_) event.found_ = make_found(static_cast<int64_t>(hashes.size()));
    launch(job);
    must(pyserve_cuda_event_wait(event.event_.value), "the copy");
    if (num_bytes > 0 && event.found_->place() == Place::pinned) std::copy_n(event.found_->as<uint64_t>(), hashes.size(), hashes.data());
    if (num_bytes > 0 && event.found_->place() == Place::device) {
      must(pyserve_cuda_copy(hashes.data(), event.found_->as<void>(), num_bytes, 1, stream_.value), "reading hashes back");
      must(pyserve_cuda_stream_synchronize(stream_.value), "reading hashes back");
    }
  } catch (const std::exception& failed) {
    pyserve_cuda_stream_synchronize(stream_.value);  // what was posted before it failed
    error = failed.what();
  }
  std::lock_guard<std::mutex> lock(event.mutex_);
  event.finish(std::move(error), hashes.data());
}

// Copies that have ended let go of their memory, also when nobody asks for their events.
void CopyStream::notice() {
  std::erase_if(outstanding_, [](const std::shared_ptr<CopyEvent>& event) {
    std::lock_guard<std::mutex> lock(event->mutex_);
    return event->poll();
  });
}

int64_t CopyStream::num_outstanding() {
  std::lock_guard<std::mutex> lock(posting_);
  notice();
  return static_cast<int64_t>(outstanding_.size());
}

void CopyStream::close() {
  std::lock_guard<std::mutex> lock(posting_);
  is_closed_ = true;
  device_->use();
  {
    std::lock_guard<std::mutex> working(working_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
  pyserve_cuda_stream_synchronize(stream_.value);
  notice();
  std::lock_guard<std::mutex> idle(mutex_);
  idle_found_.clear();
}

CopyTuning CopyStream::calibrate(void* pool, int64_t num_pages, int64_t page_bytes, int64_t limit_us) {
  constexpr int64_t kHostBytes = 16 << 20;
  std::lock_guard<std::mutex> lock(posting_);
  device_->use();
  Memory host(Place::pinned);
  host.need(kHostBytes);
  PoolCopy memory{};
  memory.pool = pool;
  memory.num_pages = num_pages;
  memory.page_bytes = page_bytes;
  memory.host = host.as<void>();
  memory.host_bytes = kHostBytes;
  CopyTuning tuning = kDefaultTuning;
  const int error = pyserve_cuda_calibrate(&memory, &tuning, limit_us, stream_.value);
  if (error == kNotReady) throw std::runtime_error("took longer than " + std::to_string(limit_us / 1000) + " ms");
  must(error, "measuring copies");
  return tuning_ = tuning;
}

std::unique_ptr<Memory> CopyStream::take_found(int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (idle_found_.empty() || idle_found_.back()->num_bytes() < count * 8) return nullptr;
  auto memory = std::move(idle_found_.back());
  idle_found_.pop_back();
  return memory;
}

// Not in a thread that must not wait.
std::unique_ptr<Memory> CopyStream::make_found(int64_t count) {
  auto memory = std::make_unique<Memory>(Place::pinned);
  try {
    memory->need(count * 8);
  } catch (const std::runtime_error&) {  // the device keeps them until they are read (R17)
    memory = std::make_unique<Memory>();
    memory->need(count * 8);
  }
  return memory;
}

void CopyStream::give_found(std::unique_ptr<Memory> memory) {
  if (memory->place() != Place::pinned) return;
  std::lock_guard<std::mutex> lock(mutex_);
  idle_found_.push_back(std::move(memory));
}

CopyEvent::Clock::time_point CopyStream::ended(CopyEvent::Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(last_end_, now);
}

}  // namespace pyserve::cuda
