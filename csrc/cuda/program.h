// A model's step on the device: the instructions of csrc/recorder.h, launched one behind the other on the compute stream.
//
// Pointers that instructions are given are to host memory, which may go away when `upload` has returned; weights are packed for the device (`packed_size`). Nothing
// is on the device before `upload`, so that `needs` can be compared with what is free. A step is checked on the host, uploaded in one copy out of pinned memory (inputs.h) and launched; logits, or the most probable tokens, are read back into
// pinned memory.
//
// A decode step is padded to a size and launched as one graph where there is one of that size (graphs.h), else instruction by instruction. Both give the same bits:
// no row of a product or of attention sees another (R37), and padding has position -1, for which no KV is written.
//
// Attention: rows that stand alone in their sequence go to the decode kernel, chunks of more rows to the prefill kernel. Both give a row the same bits, so this
// split is a matter of speed alone (R37). The decode kernel's plan is made by the first layer and used by the following ones with the same window.
//
// Memory grows before anything is launched, and never while kernels that use it are under way: the host waits for them, which happens as long as steps get larger
// than `expect` said.
// Not handled: heads of other sizes than 64, 80, 96, 128 and 256.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "../recorder.h"
#include "device.h"
#include "graphs.h"
#include "inputs.h"

namespace pyserve::cuda {

struct Samplers {  // of a step's samples, on the host: as pyserve_cuda_draw has them
  const float* real;
  const int64_t* whole;
  const std::vector<LogitChange>& changes;
};

class Program final : public Recorder {
 public:
  Program(std::shared_ptr<DeviceContext> device, int64_t max_tokens, int64_t max_samples);

  // Between set_logits and the first run. `expect`: memory for steps of so many sequences of up to so many pages each is taken at once.
  struct Needs {
    int64_t weight_bytes, work_bytes;
  };
  void expect(int64_t num_sequences, int64_t num_pages, int64_t page_size);
  Needs needs() const;
  void upload();

  // The pool's memory is the device's. Both wait for the result, which is pinned host memory, valid until the next run: logits [num_samples, logits_width()], or
  // the most probable token of each sample, ties to the lower id. Throw std::invalid_argument for what does not fit, std::runtime_error when the device fails.
  const float* run(const Batch& batch, const Pool& pool);
  const int32_t* run_greedy(const Batch& batch, const Pool& pool);

  // The same without waiting: the result is there when what is on the compute stream by then has run. Two steps may be under way. With `follows`, a token -1 - i is
  // the one that the step posted before picks for its sample i.
  const float* post(const Batch& batch, const Pool& pool, bool follows);
  const int32_t* post_greedy(const Batch& batch, const Pool& pool, bool follows);
  const int32_t* post_drawn(const Batch& batch, const Pool& pool, bool follows, const Samplers& samplers);  // the CPU sampler's tokens

  void use_graphs(bool are_used);
  Graphs::Counts graph_counts() { return graphs_.counts(); }
  std::string graph_error() { return graphs_.error(); }

 private:
  struct Range {
    int64_t first, count;
  };
  struct Step {               // what the launches of one run see
    void* stream;
    int32_t* tokens;          // on the device, as all that follows
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

  void add_embed(const PackedWeight& table, const Register& out, float scale) override;
  void add_rms_norm(const Register& x, const float* weight, float eps, const Register& out) override;
  void add_quantise(const Register& x) override;
  void add_linear(const Register& x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, const Register& out,
                  bool accumulate) override;
  void add_rope_kv_write(const Register& qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm) override;
  void add_attention(const Register& qkv, const Register& out, const AttentionSpec& spec) override;
  void add_gated_activation(const Register& gate_up, const Register& out, Activation kind) override;
  void add_take_rows(const Register& x, const Register& out) override;
  bool attention_fills_q8(int64_t) const override { return false; }
  void check_device_shape(const AttentionShape& shape) override;
  void add(Launch launch) { instructions_.push_back({std::move(launch), is_on_samples()}); }

  struct Constant {  // a weight
    const void* host;
    int64_t num_bytes;
    const void* data = nullptr;  // on the device, once it is there
    template <class T>
    const T* as() const { return static_cast<const T*>(data); }
  };
  const Constant* constant(const void* host, int64_t num_bytes);  // null for null
  static const float* values(const Constant* constant) { return constant == nullptr ? nullptr : constant->as<float>(); }
  struct Weight {
    PackedWeight shape;
    const Constant* constant;
    PackedWeight view() const { return {shape.type, shape.rows, shape.cols, constant->as<uint8_t>()}; }
  };
  Weight constant(const PackedWeight& weight);

  struct RegisterBytes {
    int64_t f32, q8, scales;  // scales: and as many again for the sums
    int64_t all() const { return f32 + q8 + 2 * scales; }
  };
  RegisterBytes register_bytes(const Register& target) const;
  template <class T>
  T* take(int64_t num_bytes);  // memory of the device
  int64_t decode_scratch_bytes(int64_t num_rows, int64_t context_len) const;
  int64_t prefill_scratch_bytes(int64_t num_tiles) const;
  int64_t max_tiles() const;
  struct Room {  // bytes of the memory that grows with the steps
    int64_t inputs, decode_scratch, prefill_scratch, samplers;
  };
  Room expected_room() const;
  void make_room(const Room& room);
  void grow(Memory& memory, int64_t num_bytes);
  Step place(const Batch& batch, const Pool& pool);
  Step place_decode(const Batch& batch, const Pool& pool, const Size& size);
  void send(const Layout& layout, Step& step);
  int32_t* staging(const Layout& layout);
  void cut_attention(const Batch& batch, Step& step, std::vector<int32_t>& tiles) const;
  void prepare_scratch(const Step& step);
  void attend(Step& step, const Register& from, const Register& to, const AttentionSpec& spec);
  void execute(Step step, bool is_picking);
  void launch(const Batch& batch, const Pool& pool, bool is_picking, bool follows);
  const float* launch_and_read(const Batch& batch, const Pool& pool, bool follows);
  const int32_t* launch_and_pick(const Batch& batch, const Pool& pool, bool follows);
  const int32_t* read_picked(int64_t num_samples);
  void draw(const Samplers& samplers, int64_t num_samples);

  const std::shared_ptr<DeviceContext> device_;
  std::vector<Instruction> instructions_;
  std::deque<Constant> constants_;  // launches keep pointers to them
  std::map<const void*, const Constant*> by_host_;  // until `upload`
  bool is_uploaded_ = false;
  int64_t tile_queries_ = 0;
  std::vector<int64_t> windows_;
  int64_t expected_sequences_ = 0, expected_pages_ = 0, expected_page_size_ = 0, num_launched_ = 0;
  Memory weights_, inputs_, decode_scratch_, prefill_scratch_, picked_;
  Memory staging_[2]{Memory(Place::host), Memory(Place::host)};  // of the steps under way, in turn
  Memory picked_on_host_[2]{Memory(Place::host), Memory(Place::host)};
  Memory logits_on_host_{Place::host};
  Memory samplers_, samplers_on_host_[2]{Memory(Place::host), Memory(Place::host)};
  bool are_graphs_used_ = true;
  const uint8_t* pool_ = nullptr;  // of the latest step
  std::deque<Memory> blocks_;  // of the registers
  Graphs graphs_;  // ends first: it records launches of this program
};

// Bytes of a weight as `Program` wants it: floats as in the file, quantised types packed by pyserve_cuda_pack; -1 for what the device does not have.
int64_t packed_size(WeightType type, int64_t rows, int64_t cols);

}  // namespace pyserve::cuda
