// A model's step on the device: the instructions of csrc/cpu/program.h, launched one behind the other on the compute stream.
//
// The list is made once, at load: shapes, widths and types are checked then, weights go to the device, registers are allocated by `set_logits`. A run checks its
// batch on the host, uploads it in one copy out of pinned memory, launches everything, and reads logits, or the most probable tokens, back into pinned memory.
//
// Attention: rows that stand alone in their sequence go to the decode kernel, chunks of more rows to the prefill kernel. Both give a row the same bits, so this
// split is a matter of speed alone (R37). The decode kernel's plan is made by the first layer and used by the following ones with the same window.
//
// Memory grows before anything is launched, never while kernels that use it are under way. One run at a time; not copyable.
// Not handled: KV in f32, heads of other sizes than 64, 80, 96, 128 and 256.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../step.h"
#include "device.h"

namespace pyserve::cuda {

class Program {
 public:
  Program(std::shared_ptr<DeviceContext> device, int64_t max_tokens, int64_t max_samples);

  // As in csrc/cpu/program.h, but pointers are to host memory that may go away when set_logits has returned. Weights are packed for the device (`packed_size`).
  int64_t buffer(int64_t width);
  void embed(const PackedWeight& table, int64_t out, float scale);
  void rms_norm(int64_t x, const float* weight, int64_t weight_len, float eps, int64_t out);
  void linear(int64_t x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, int64_t out, bool accumulate);
  void rope_kv_write(int64_t qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm);
  void attention(int64_t qkv, int64_t out, const AttentionShape& shape, float scale, int64_t window, float softcap);
  void gated_activation(int64_t gate_up, int64_t out, Activation kind);
  void take_rows(int64_t x, int64_t out);
  void set_logits(int64_t x);

  // The pool's memory is the device's. Both wait for the result, which is pinned host memory, valid until the next run: logits [num_samples, logits_width()], or
  // the most probable token of each sample, ties to the lower id. Throw std::invalid_argument for what does not fit, std::runtime_error when the device fails.
  const float* run(const Batch& batch, const Pool& pool);
  const int32_t* run_greedy(const Batch& batch, const Pool& pool);
  int64_t logits_width() const { return registers_.at(static_cast<size_t>(logits_.value())).width; }

 private:
  enum class Rows { none, tokens, samples };  // what a register holds
  struct Register {
    int64_t width;
    Rows rows = Rows::none;
    bool holds_tokens = false, needs_q8 = false, has_q8 = false;  // as in csrc/cpu/program.h
    Memory f32, q8, q8_scale, q8_sum;
    Activations view() const { return {f32.as<float>(), q8.as<int8_t>(), q8_scale.as<float>(), q8_sum.as<int32_t>(), width}; }
  };
  struct Range {
    int64_t first, count;
  };
  struct Step {               // what the launches of one run see
    const int32_t* tokens;    // on the device, as all that follows
    StepRows rows;
    const int32_t* sample_rows;
    int64_t num_samples;
    const int32_t* tiles;     // of prefill attention [num_tiles, 3]
    int64_t num_tiles;
    std::vector<Range> alone; // adjacent rows that each stand alone in their sequence
    Pool pool;
    std::optional<int64_t> planned_window;  // of the plan in the decode kernel's scratch
  };
  using Launch = std::function<void(Step&, int64_t num_rows)>;
  struct Instruction {
    Launch launch;
    bool is_on_samples;
  };

  Register& reg(int64_t index, const char* name);
  Register& readable(int64_t index, const char* name);
  Register& writable(int64_t index, const char* name, int64_t width, bool fills_q8);
  void check_open() const;
  void add(Launch launch) { instructions_.push_back({std::move(launch), is_on_samples_}); }
  void need_q8(int64_t x);
  void note_shape(const AttentionShape& shape);
  void check(const Batch& batch, const Pool& pool) const;
  const void* on_device(const void* host, int64_t num_bytes);
  PackedWeight on_device(const PackedWeight& weight);
  const float* on_device(const float* values, int64_t count) { return static_cast<const float*>(on_device(static_cast<const void*>(values), count * 4)); }

  Step upload(const Batch& batch, const Pool& pool);
  void cut_attention(const Batch& batch, Step& step, std::vector<int32_t>& tiles) const;
  void prepare_scratch(const Step& step);
  void attend(Step& step, const Register& from, const Register& to, const AttentionSpec& spec);
  void launch(const Batch& batch, const Pool& pool);
  std::unique_lock<std::mutex> lock_running();

  const std::shared_ptr<DeviceContext> device_;
  const int64_t max_tokens_, max_samples_;
  bool is_on_samples_ = false;
  std::deque<Register> registers_;  // launches keep pointers to them
  std::vector<Instruction> instructions_;
  std::deque<Memory> constants_;
  std::map<const void*, const void*> uploaded_;  // host -> device, until set_logits
  std::optional<int64_t> logits_;
  int64_t vocab_size_ = INT32_MAX, max_positions_ = INT32_MAX, num_layers_ = 0, tile_queries_ = 0;
  std::optional<AttentionShape> shape_;
  std::vector<int64_t> windows_;
  Memory inputs_, decode_scratch_, prefill_scratch_, tokens_;
  Memory staging_{Place::host}, logits_on_host_{Place::host}, tokens_on_host_{Place::host};
  std::mutex running_;
};

// Bytes of a weight as `Program` wants it: floats as in the file, q8_0, q4_0 and q4_1 packed by pyserve_cuda_pack; -1 for what the device does not have.
int64_t packed_size(WeightType type, int64_t rows, int64_t cols);

}  // namespace pyserve::cuda
