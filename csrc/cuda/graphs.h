// The decode step as CUDA graphs: one for each size that a step is padded to.
//
// A graph is recorded the first time its size comes up, by a thread of this object's own and on a stream of its own, so that the step which asked for it is
// launched kernel by kernel and waits for nothing. Recording runs nothing on the device. What a graph holds are addresses and sizes; all that differs from step to
// step lies in device memory (inputs.h). When memory that graphs point into is to be moved, `forget` comes first.
//
// A recording that fails is tried again when its size comes up again; after the third failure in all no more graphs are made, and `error` says why.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>

#include "device.h"

namespace pyserve::cuda {

class Graphs {
 public:
  using Key = std::tuple<int64_t, int64_t, bool>;       // rows, columns of the page table, whether tokens are picked
  using Record = std::function<void(void* stream)>;     // posts a step's launches; neither allocates nor waits
  struct Counts {
    int64_t num_recorded, num_failed;
  };

  explicit Graphs(std::shared_ptr<DeviceContext> device) : device_(std::move(device)) {}
  ~Graphs();

  // The graph of this size; null: there is none so far, and it is being recorded, if nothing else is.
  void* find(const Key& key, const Record& record);
  void forget();  // none of them may be under way on the device
  Counts counts();
  std::string error();

 private:
  struct Wanted {
    Key key;
    Record record;
  };
  void work();
  void record(const Wanted& wanted, std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<DeviceContext> device_;
  std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::map<Key, std::unique_ptr<Handle>> graphs_;
  std::optional<Wanted> wanted_;
  bool is_recording_ = false, is_ending_ = false;
  int64_t num_recorded_ = 0, num_failed_ = 0;
  std::string error_;
  std::thread thread_;  // begun by the first size
};

}  // namespace pyserve::cuda
