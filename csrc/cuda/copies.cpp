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
  if (is_done_) return true;
  stream_->device_->use();
  const int error = pyserve_cuda_event_query(event_.value);
  if (error == kNotReady) return false;
  finish(error);
  return true;
}

// Nothing of the copy is left when it turns done.
void CopyEvent::finish(int error) {
  const auto now = Clock::now(), before = stream_->ended(now);
  copy_s_ = std::chrono::duration<double>(now - std::max(posted_, before)).count();
  if (error != 0) {
    error_ = std::string("the copy failed: ") + pyserve_cuda_error_text(error);
  } else {
    compare();
  }
  if (found_) stream_->give_found(std::move(found_));
  keep_alive_.reset();
  stream_.reset();
  is_done_ = true;
}

void CopyEvent::compare() {
  if (hashed_.empty()) return;
  const uint64_t* hashes = found_->as<uint64_t>();
  std::vector<uint64_t> read;
  if (found_->place() == Place::device) {
    read.resize(hashed_.size());
    void* stream = stream_->stream_.value;
    int error = pyserve_cuda_copy(read.data(), hashes, static_cast<int64_t>(read.size()) * 8, 1, stream);
    if (error == 0) error = pyserve_cuda_stream_synchronize(stream);
    if (error != 0) {
      error_ = std::string("reading hashes back failed: ") + pyserve_cuda_error_text(error);
      return;
    }
    hashes = read.data();
  }
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
  device_->use();
  must(pyserve_cuda_stream_create(&stream_.value, 0), "making the copy stream");
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
  const std::vector<int32_t> table = table_of(copy.combs);
  const std::vector<int32_t> marked = copy.hashes == nullptr ? std::vector<int32_t>() : marked_pages(copy, event->hashed_);
  PoolCopy request = request_of(copy, table, tuning_), hashing = request_of(copy, marked, tuning_);
  if (!pyserve_cuda_is_pinned(copy.host, copy.host_bytes)) request.way = static_cast<int64_t>(CopyWay::calls);
  char message[200] = "";
  device_->wait_for_step(stream_.value);
  outstanding_.push_back(event);  // from here on something may be under way, whatever goes wrong
  const auto posted = [&](int error) {
    if (error == 0) return;
    must(pyserve_cuda_event_record(event->event_.value, stream_.value), "recording a copy");
    check(error != kRefused || message[0] == 0, message);
    must(error, "posting a copy");
  };
  const auto hash = [&] {
    if (event->hashed_.empty()) return;
    event->found_ = take_found(static_cast<int64_t>(event->hashed_.size()));
    posted(pyserve_cuda_page_hash(&hashing, event->found_->as<uint64_t>(), stream_.value, message, sizeof message));
  };
  if (copy.to_host) hash();
  posted(pyserve_cuda_page_copy(&request, stream_.value, message, sizeof message));
  if (!copy.to_host) hash();
  must(pyserve_cuda_event_record(event->event_.value, stream_.value), "recording a copy");
  return event;
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
  pyserve_cuda_stream_synchronize(stream_.value);
  notice();
  std::lock_guard<std::mutex> idle(mutex_);
  idle_found_.clear();
}

void CopyStream::calibrate(void* pool, int64_t num_pages, int64_t page_bytes) {
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
  if (pyserve_cuda_calibrate(&memory, &tuning, stream_.value) == 0) tuning_ = tuning;
}

std::unique_ptr<Memory> CopyStream::take_found(int64_t count) {
  std::unique_ptr<Memory> memory;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_found_.empty()) {
      memory = std::move(idle_found_.back());
      idle_found_.pop_back();
    }
  }
  const int64_t num_bytes = std::max<int64_t>(count * 8, 4096);
  if (memory && memory->num_bytes() >= num_bytes) return memory;
  memory = std::make_unique<Memory>(Place::pinned);
  try {
    memory->need(num_bytes);
  } catch (const std::runtime_error&) {  // the device keeps them until they are read (R17)
    memory = std::make_unique<Memory>();
    memory->need(num_bytes);
  }
  return memory;
}

void CopyStream::give_found(std::unique_ptr<Memory> memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_found_.push_back(std::move(memory));
}

CopyEvent::Clock::time_point CopyStream::ended(CopyEvent::Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(last_end_, now);
}

}  // namespace pyserve::cuda
