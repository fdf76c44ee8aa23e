// A model's step on the CPU: the instructions of csrc/recorder.h, run by a thread team.
//
// `run` wakes the team once; each member walks the whole list and claims parts of each instruction until none is left. An instruction waits for all before it only
// if it touches a register (or a layer of the pool) that one of them may still be writing or reading. It waits for their parts, not for members: one that the
// system has interrupted, because the event loop needs a processor too, holds up nobody but the part that it was in, and finds its other work done.
//
// `set_logits` allocates: zeros, 64-byte aligned. Pointers to weights are the caller's to keep alive.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "../recorder.h"
#include "team.h"

namespace pyserve {

enum class Kind { embed, rms_norm, linear, quantise, rope_kv_write, attention, gated_activation, take_rows };
constexpr int num_kinds = 8;

class Program final : public Recorder {
 public:
  struct Profile {  // of one run, summed over the members
    double kernel_s[num_kinds] = {};  // in kernels of this kind
    double wait_s[num_kinds] = {};    // for what they need
  };

  Program(int64_t max_tokens, int64_t max_samples, int num_threads);

  // Returns the logits [batch.num_samples, logits_width()], valid until the next run. Blocks; throws std::invalid_argument for a batch or pool that does not fit.
  const float* run(const Batch& batch, const Pool& pool, Profile* profile = nullptr);
  // Picks a token for each row of logits [num_rows, vocab_size], row i with rows[i]; the team shares the rows. A call on its own, after a run.
  void sample(const float* logits, int64_t vocab_size, const std::vector<SampleRow>& rows, int32_t* tokens);

 private:
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

  void add_embed(const PackedWeight& table, const Register& out, float scale) override;
  void add_rms_norm(const Register& x, const float* weight, float eps, const Register& out) override;
  void add_quantise(const Register& x) override;
  void add_linear(const Register& x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, const Register& out,
                  bool accumulate) override;
  void add_rope_kv_write(const Register& qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm) override;
  void add_attention(const Register& qkv, const Register& out, const AttentionSpec& spec) override;
  void add_gated_activation(const Register& gate_up, const Register& out, Activation kind) override;
  void add_take_rows(const Register& x, const Register& out) override;
  bool attention_fills_q8(int64_t head_dim) const override { return head_dim % q8_block == 0; }
  void complete() override;
  template <class T>
  T* allocate(int64_t count);  // zeros, 64-byte aligned
  void add(Kind kind, Kernel kernel, const std::vector<int64_t>& read, const std::vector<int64_t>& written, int64_t row_work = 0);
  int64_t pool_layer(int64_t layer) const { return -1 - layer; }  // a layer of the pool counts as a register
  void prepare_workspace(const Batch& batch, const Pool& pool);
  int num_parts(const Instruction& instruction, int64_t num_rows) const;
  void execute(const Step& step, uint64_t first_call, int index, Profile* profile);
  void execute_one(const Step& step, uint64_t first_call, int index, size_t i);
  int claim(Progress& progress, int parts, int index) const;  // a part, or -1
  const uint8_t* next_weights(const Instruction& instruction, const Step& step, int index) const;

  std::vector<Instruction> instructions_;
  std::vector<int64_t> read_, written_;  // since the last instruction that waits
  std::vector<std::shared_ptr<uint8_t>> blocks_;  // of the registers
  std::shared_ptr<uint8_t> workspace_;  // of attention
  size_t workspace_bytes_ = 0;
  std::unique_ptr<Progress[]> progress_;  // of each instruction
  Team team_;
};

}  // namespace pyserve
