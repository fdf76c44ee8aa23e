// A model's step as a fixed list of kernel calls.
//
// The list is made once, at load: every shape, width and type is checked then, so that a run checks only its batch. `run` wakes the thread team once; each
// member walks the whole list and claims parts of each instruction until none is left. An instruction waits for all before it only if it touches a register (or a
// layer of the pool) that one of them may still be writing or reading. It waits for their parts, not for members: one that the system has interrupted, because
// the event loop needs a processor too, holds up nobody but the part that it was in, and finds its other work done.
//
// Registers are buffers that the program owns: float [rows, width], 64-byte aligned, zero at first. What is computed before `take_rows` has one row a token,
// what comes after has one row a sample. `set_logits` closes the list and allocates: a register that only ever holds sample rows gets max_samples rows, so the
// logits of a whole prompt chunk are never made room for. A register that a quantised product reads has an int8 half as well, filled by the instruction that
// writes the register where its kernel can (norm, activation, attention), else by a `quantise` of its own.
//
// Pointers to weights are the caller's to keep alive. One run at a time; not copyable.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../ops.h"
#include "../step.h"
#include "team.h"

namespace pyserve {

enum class Kind { embed, rms_norm, linear, quantise, rope_kv_write, attention, gated_activation, take_rows };
constexpr int num_kinds = 8;

class Program {
 public:
  struct Profile {  // of one run, summed over the members
    double kernel_s[num_kinds] = {};  // in kernels of this kind
    double wait_s[num_kinds] = {};    // for what they need
  };

  Program(int64_t max_tokens, int64_t max_samples, int num_threads);

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

  // Returns the logits [batch.num_samples, logits_width()], valid until the next run. Blocks; throws std::invalid_argument for a batch or pool that does not fit.
  const float* run(const Batch& batch, const Pool& pool, Profile* profile = nullptr);
  // Picks a token for each row of logits [num_rows, vocab_size], row i with rows[i]; the team shares the rows. A call on its own, after a run.
  void sample(const float* logits, int64_t vocab_size, const std::vector<SampleRow>& rows, int32_t* tokens);
  int64_t logits_width() const { return registers_.at(static_cast<size_t>(logits_.value())).width; }

 private:
  std::unique_lock<std::mutex> lock_running();

  enum class Rows { none, tokens, samples };  // what a register holds
  template <class T>
  class Memory {  // zeros, 64-byte aligned
   public:
    void allocate(int64_t count);
    T* get() const { return data_; }

   private:
    std::shared_ptr<uint8_t> block_;
    T* data_ = nullptr;
  };
  struct Register {
    int64_t width;
    Rows rows = Rows::none;
    bool holds_tokens = false;  // at any time: decides how many rows to allocate
    bool needs_q8 = false;      // a quantised product reads it
    bool has_q8 = false;        // the last instruction that wrote it fills q8
    Memory<float> f32;
    Memory<int8_t> q8;
    Memory<float> q8_scale;
    Memory<int32_t> q8_sum;
    Activations view() const;
  };
  struct Step {  // what the kernels of one run see
    const Batch& batch;
    const Pool& pool;
  };
  using Kernel = std::function<void(const Step&, int64_t num_rows, Share)>;
  struct Instruction {
    Kind kind;
    Kernel kernel;
    std::shared_ptr<const std::vector<Product>> products;  // of a linear
    int64_t row_work;  // multiply-adds for each row where they are many, else 0
    bool is_on_samples;
    bool waits;  // for all before it
    std::optional<size_t> next_linear;  // the instruction that reads weights after this one
  };
  struct alignas(64) Progress {  // of one instruction in one run
    std::atomic<uint64_t> claimed;  // parts: a bit for each where they are few, else their number
    std::atomic<int> num_done;
  };

  Register& reg(int64_t index, const char* name);
  Register& readable(int64_t index, const char* name);
  Register& writable(int64_t index, const char* name, int64_t width, bool fills_q8);
  void check_open() const;
  void add(Kind kind, Kernel kernel, const std::vector<int64_t>& read, const std::vector<int64_t>& written, int64_t row_work = 0);
  void need_q8(int64_t x);
  void note_shape(const AttentionShape& shape);
  void check_batch(const Batch& batch, const Pool& pool) const;
  void allocate(Register& target);
  void check_pool(const Pool& pool) const;
  int64_t pool_layer(int64_t layer) const { return -1 - layer; }  // a layer of the pool counts as a register
  void prepare_workspace(const Batch& batch, const Pool& pool);
  int num_parts(const Instruction& instruction, int64_t num_rows) const;
  void execute(const Step& step, uint64_t first_call, int index, Profile* profile);
  void execute_one(const Step& step, uint64_t first_call, int index, size_t i);
  int64_t num_rows(const Step& step, const Instruction& instruction) const;
  int claim(Progress& progress, int parts, int index) const;  // a part, or -1
  const uint8_t* next_weights(const Instruction& instruction, const Step& step, int index) const;

  const int64_t max_tokens_, max_samples_;
  bool is_on_samples_ = false;
  std::deque<Register> registers_;  // kernels keep pointers to them
  std::vector<Instruction> instructions_;
  std::vector<int64_t> read_, written_;  // since the last instruction that waits
  std::optional<int64_t> logits_;
  int64_t vocab_size_ = INT32_MAX, max_positions_ = INT32_MAX, num_layers_ = 0;
  std::optional<AttentionShape> shape_;
  Memory<uint8_t> workspace_;  // of attention
  size_t workspace_bytes_ = 0;
  std::unique_ptr<Progress[]> progress_;  // of each instruction
  std::mutex running_;
  Team team_;
};

}  // namespace pyserve
