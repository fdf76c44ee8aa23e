#include "graphs.h"

#include <utility>

namespace pyserve::cuda {
namespace {

constexpr int64_t kMaxFailures = 3;

// What `record` posts to the stream. Throws std::runtime_error; the stream is no longer recorded then.
std::unique_ptr<Handle> recorded(const Graphs::Record& record, void* stream) {
  auto graph = std::make_unique<Handle>(pyserve_cuda_graph_destroy);
  must(pyserve_cuda_capture_begin(stream), "recording a step");
  try {
    record(stream);
  } catch (...) {
    pyserve_cuda_capture_end(stream, &graph->value);
    throw;
  }
  must(pyserve_cuda_capture_end(stream, &graph->value), "recording a step");
  return graph;
}

}  // namespace

Graphs::~Graphs() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void* Graphs::find(const Key& key, const Record& record) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = graphs_.find(key);
  if (at != graphs_.end()) return at->second->value;
  if (wanted_ || is_recording_ || num_failed_ >= kMaxFailures) return nullptr;
  wanted_ = Wanted{key, record};
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  changed_.notify_all();
  return nullptr;
}

void Graphs::forget() {
  std::unique_lock<std::mutex> lock(mutex_);
  wanted_.reset();
  changed_.wait(lock, [this] { return !is_recording_; });
  graphs_.clear();
}

Graphs::Counts Graphs::counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {num_recorded_, num_failed_};
}

std::string Graphs::error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Graphs::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return wanted_ || is_ending_; });
    if (is_ending_) return;
    record(*std::exchange(wanted_, std::nullopt), lock);
  }
}

void Graphs::record(const Wanted& wanted, std::unique_lock<std::mutex>& lock) {
  is_recording_ = true;
  lock.unlock();
  std::unique_ptr<Handle> graph;
  std::string error;
  try {
    device_->use();
    Handle stream(pyserve_cuda_stream_destroy);
    must(pyserve_cuda_stream_create(&stream.value, 0), "making a stream to record on");
    graph = recorded(wanted.record, stream.value);
  } catch (const std::exception& failed) {
    error = failed.what();
  }
  lock.lock();
  is_recording_ = false;
  if (graph) {
    graphs_[wanted.key] = std::move(graph);
    ++num_recorded_;
  } else {
    error_ = error;
    ++num_failed_;
  }
  changed_.notify_all();
}

}  // namespace pyserve::cuda
