// One device as the backend sees it: its compute stream, the event behind the step collected last, and memory that frees itself. No torch, no CUDA header.
//
// Threads: `use` makes the device the calling thread's; every entry point calls it. Steps are posted by one thread at a time, copies by any.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda_ops.h"
#include "kernels.h"

namespace pyserve::cuda {

// Throws std::runtime_error for an error of CUDA's.
inline void must(int error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string(what) + " failed: " + pyserve_cuda_error_text(error) + " (" + std::to_string(error) + ")");
}

class Handle {  // of a stream or an event
 public:
  using Destroy = int (*)(void*);
  explicit Handle(Destroy destroy) : destroy_(destroy) {}
  ~Handle() {
    if (value != nullptr) destroy_(value);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  void* value = nullptr;

 private:
  const Destroy destroy_;
};

enum class Place {
  device,
  pinned,
  host,  // pinned where the system allows it, else plain: copies then make their caller wait
};

class Memory {
 public:
  explicit Memory(Place place = Place::device) : place_(place) {}
  ~Memory() { release(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // At least so many bytes; what was in it is lost when it grows. Nothing that uses it may be under way then.
  void need(int64_t num_bytes) {
    if (num_bytes <= num_bytes_) return;
    const int64_t wanted = num_bytes_ == 0 ? num_bytes : std::max(num_bytes, num_bytes_ + num_bytes_ / 2);
    release();
    const bool is_device = place_ == Place::device;
    const int error = is_device ? pyserve_cuda_allocate(&data_, wanted) : pyserve_cuda_allocate_pinned(&data_, wanted);
    if (error != 0) data_ = nullptr;
    if (error != 0 && place_ == Place::host) plain_ = data_ = std::malloc(static_cast<size_t>(wanted));
    if (data_ == nullptr) {
      must(error, (std::string("allocating ") + std::to_string(wanted) + (is_device ? " bytes on the device" : " bytes of pinned memory")).c_str());
    }
    num_bytes_ = wanted;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t num_bytes() const { return num_bytes_; }
  Place place() const { return place_; }

 private:
  void release() {
    if (plain_ != nullptr) {
      std::free(plain_);
    } else if (data_ != nullptr) {
      place_ == Place::device ? pyserve_cuda_free(data_) : pyserve_cuda_free_pinned(data_);
    }
    data_ = plain_ = nullptr;
    num_bytes_ = 0;
  }
  const Place place_;
  void* data_ = nullptr;
  void* plain_ = nullptr;  // the same, where it could not be pinned
  int64_t num_bytes_ = 0;
};

class DeviceContext {
 public:
  explicit DeviceContext(int64_t index) : index_(index) {
    const int64_t count = pyserve_cuda_num_devices();
    if (index < 0 || index >= count) throw std::invalid_argument("there is no CUDA device " + std::to_string(index) + ": this machine has " + std::to_string(count));
    use();
    int64_t num_sms = 0, shared_bytes = 0;
    must(pyserve_cuda_device_limits(index, &num_sms, &shared_bytes), "asking the device for its limits");
    limits_ = Device{static_cast<int32_t>(num_sms), static_cast<int32_t>(shared_bytes)};
    must(pyserve_cuda_stream_create(&compute_.value, 1), "making the compute stream");
  }
  ~DeviceContext() { pyserve_cuda_stream_synchronize(compute_.value); }

  void use() const { must(pyserve_cuda_use_device(index_), "using the device"); }
  int64_t index() const { return index_; }
  const Device& limits() const { return limits_; }
  void* compute() const { return compute_.value; }

  // The step behind which `end` was recorded is what later copies come after.
  void step_collected(std::shared_ptr<Handle> end) {
    std::lock_guard<std::mutex> lock(mutex_);
    collected_.swap(end);  // the one before it goes without the lock
  }
  void wait_for_step(void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (collected_) must(pyserve_cuda_stream_wait(stream, collected_->value), "ordering a copy behind the step");
  }
  // The host waits for the compute stream.
  void finish_step() const { must(pyserve_cuda_stream_synchronize(compute_.value), "the step"); }

 private:
  const int64_t index_;
  Device limits_{};
  Handle compute_{pyserve_cuda_stream_destroy};
  std::mutex mutex_;
  std::shared_ptr<Handle> collected_;  // guarded by mutex_
};

}  // namespace pyserve::cuda
