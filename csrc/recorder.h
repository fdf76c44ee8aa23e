// Records a model's step as a fixed list of instructions: what the programs of every device have in common.
//
// The list is made once, at load: every shape, width and type is checked then, so that a run checks only its batch. An executor (cpu/program.h, cuda/program.h)
// derives from this: it adds an instruction for each call that was found good, gives registers their memory, and runs the list.
//
// Registers are buffers: float [rows, width]. What is computed before `take_rows` has one row a token, what comes after has one row a sample. `set_logits` closes
// the list. A register that only ever holds sample rows needs max_samples rows, so the logits of a whole prompt chunk are never made room for. A register that a
// quantised product reads has an int8 half as well, filled by the instruction that writes the register where its kernel can (norm, activation), else by a
// `quantise` of its own.
//
// One run at a time; not copyable.
#pragma once
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "ops.h"
#include "step.h"

namespace pyserve {

constexpr int64_t q8_block = 32;  // columns under one scale

inline bool is_quantised(WeightType type) { return type > WeightType::bf16; }

class Recorder {
 public:
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  int64_t buffer(int64_t width);
  void embed(const PackedWeight& table, int64_t out, float scale);
  void rms_norm(int64_t x, const float* weight, int64_t weight_len, float eps, int64_t out);
  // Biases: as many as weights, null where there is none. Outputs stand side by side in `out`.
  void linear(int64_t x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, int64_t out, bool accumulate);
  void rope_kv_write(int64_t qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm);
  void attention(int64_t qkv, int64_t out, const AttentionShape& shape, float scale, int64_t window, float softcap);
  void gated_activation(int64_t gate_up, int64_t out, Activation kind);
  void take_rows(int64_t x, int64_t out);
  void set_logits(int64_t x);
  int64_t logits_width() const { return logits().width; }

 protected:
  enum class Rows { none, tokens, samples };  // what a register holds
  struct Register {
    int64_t index, width;
    Rows rows = Rows::none;
    bool holds_tokens = false;  // at any time: decides how many rows to allocate
    bool needs_q8 = false;      // a quantised product reads it
    bool has_q8 = false;        // the last instruction that wrote it fills q8
    Activations data{};         // where it lies, once the executor has given it memory
  };

  Recorder(int64_t max_tokens, int64_t max_samples);
  ~Recorder() = default;

  // What an executor adds. Registers stay where they are, so that launches may keep pointers to them.
  virtual void add_embed(const PackedWeight& table, const Register& out, float scale) = 0;
  virtual void add_rms_norm(const Register& x, const float* weight, float eps, const Register& out) = 0;
  virtual void add_quantise(const Register& x) = 0;
  virtual void add_linear(const Register& x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, const Register& out,
                          bool accumulate) = 0;
  virtual void add_rope_kv_write(const Register& qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm) = 0;
  virtual void add_attention(const Register& qkv, const Register& out, const AttentionSpec& spec) = 0;
  virtual void add_gated_activation(const Register& gate_up, const Register& out, Activation kind) = 0;
  virtual void add_take_rows(const Register& x, const Register& out) = 0;
  virtual bool attention_fills_q8(int64_t head_dim) const = 0;
  virtual void check_device_shape(const AttentionShape&) {}  // what the device has no kernel for
  virtual void complete() {}                                 // the list is: before `set_logits` returns

  bool is_on_samples() const { return is_on_samples_; }
  bool is_complete() const { return logits_.has_value(); }
  const Register& logits() const { return registers_.at(static_cast<size_t>(logits_.value())); }
  int64_t max_rows(const Register& each) const { return each.holds_tokens ? max_tokens_ : max_samples_; }
  int64_t num_rows(const Batch& batch, bool is_on_samples) const { return is_on_samples ? batch.num_samples : batch.rows.num_rows; }
  // Throws std::invalid_argument for a batch or pool that does not fit. `are_tokens_known`: else the negative ones are what the step before picks.
  void check_step(const Batch& batch, const Pool& pool, bool are_tokens_known = true) const;
  std::unique_lock<std::mutex> lock_running();

  const int64_t max_tokens_, max_samples_;
  std::deque<Register> registers_;
  std::optional<AttentionShape> shape_;  // of the latest attention: all have the same heads for the pool

 private:
  Register& reg(int64_t index, const char* name);
  Register& readable(int64_t index, const char* name);
  Register& writable(int64_t index, const char* name, int64_t width, bool fills_q8);
  void check_open() const;
  void need_q8(Register& x);
  void note_shape(const AttentionShape& shape);

  bool is_on_samples_ = false;
  std::optional<int64_t> logits_;
  int64_t vocab_size_ = INT32_MAX, max_positions_ = INT32_MAX, num_layers_ = 0;
  std::mutex running_;
};

}  // namespace pyserve
