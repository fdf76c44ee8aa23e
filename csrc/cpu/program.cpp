#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "../check.h"
#include "memory.h"

namespace pyserve {
namespace {

constexpr int64_t part_work = 1 << 20;     // multiply-adds: some 10 us of one thread, beside which claiming a part costs nothing
constexpr int64_t least_rows_of_work = 5;  // reading the weights takes as long as computing so many rows
constexpr int64_t max_parts = 16;          // for each member
std::atomic<uint64_t> num_calls{0};  // of kernels, in all programs: what threads keep between parts must not be taken for another program's

bool has_common(const std::vector<int64_t>& left, const std::vector<int64_t>& right) {
  return std::any_of(left.begin(), left.end(), [&](int64_t item) { return std::find(right.begin(), right.end(), item) != right.end(); });
}

}  // namespace

// Mapped, which leaves the pages of a large block untouched until they are used: a program made for long prompts costs nothing while prompts are short.
template <class T>
T* Program::allocate(int64_t count) {
  blocks_.push_back(map_memory(static_cast<size_t>(count) * sizeof(T)));
  return reinterpret_cast<T*>(blocks_.back().get());
}

Program::Program(int64_t max_tokens, int64_t max_samples, int num_threads) : Recorder(max_tokens, max_samples), team_(num_threads) {}

void Program::add_embed(const PackedWeight& table, const Register& out, float scale) {
  const auto kernel = [=, to = &out](const Step& step, int64_t num_rows, Share share) {
    pyserve::embed(table, step.batch.tokens, num_rows, scale, to->data.f32, share);
  };
  add(Kind::embed, kernel, {}, {out.index});
}

void Program::add_rms_norm(const Register& x, const float* weight, float eps, const Register& out) {
  const auto kernel = [=, from = &x, to = &out](const Step&, int64_t num_rows, Share share) {
    pyserve::rms_norm(from->data.f32, weight, eps, to->data, num_rows, share);
  };
  add(Kind::rms_norm, kernel, {x.index}, {out.index});
}

void Program::add_quantise(const Register& x) {
  const auto kernel = [target = &x](const Step&, int64_t num_rows, Share share) { pyserve::quantise(target->data, num_rows, share); };
  add(Kind::quantise, kernel, {x.index}, {x.index});
}

// Several products need not wait for one another: they read one register and write columns of their own.
void Program::add_linear(const Register& x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, const Register& out,
                         bool accumulate) {
  auto products = std::make_shared<std::vector<Product>>();
  for (size_t i = 0; i < weights.size(); ++i) products->push_back({weights[i], biases[i]});
  const auto kernel = [=, from = &x, to = &out](const Step&, int64_t num_rows, Share share) {
    pyserve::linear(products->data(), static_cast<int>(products->size()), from->data, to->data.f32, to->width, num_rows, accumulate, share);
  };
  add(Kind::linear, kernel, {x.index}, {out.index}, out.width * x.width);
  instructions_.back().products = products;
  for (size_t i = instructions_.size() - 1; i-- > 0 && !instructions_[i].next_linear;) instructions_[i].next_linear = instructions_.size() - 1;
}

void Program::add_rope_kv_write(const Register& qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm) {
  const auto kernel = [=, to = &qkv](const Step& step, int64_t, Share share) {
    pyserve::rope_kv_write(to->data.f32, shape.num_heads, rope, norm, step.pool, shape.layer, step.batch.rows, share);
  };
  add(Kind::rope_kv_write, kernel, {qkv.index}, {qkv.index, pool_layer(shape.layer)});
}

void Program::add_attention(const Register& qkv, const Register& out, const AttentionSpec& spec) {
  const auto kernel = [=, this, from = &qkv, to = &out](const Step& step, int64_t, Share share) {
    pyserve::attention(from->data.f32, spec, step.pool, step.batch.rows, to->data, workspace_.get(), share);
  };
  add(Kind::attention, kernel, {qkv.index, pool_layer(spec.layer)}, {out.index});
}

void Program::add_gated_activation(const Register& gate_up, const Register& out, Activation kind) {
  const auto kernel = [=, from = &gate_up, to = &out](const Step&, int64_t num_rows, Share share) {
    pyserve::gated_activation(kind, from->data.f32, to->data, num_rows, share);
  };
  add(Kind::gated_activation, kernel, {gate_up.index}, {out.index});
}

void Program::add_take_rows(const Register& x, const Register& out) {
  const auto kernel = [from = &x, to = &out](const Step& step, int64_t num_rows, Share share) {
    const int64_t first = num_rows * share.index / share.count, last = num_rows * (share.index + 1) / share.count;
    for (int64_t i = first; i < last; ++i) {
      std::memcpy(to->data.f32 + i * to->width, from->data.f32 + step.batch.sample_rows[i] * to->width, static_cast<size_t>(to->width) * sizeof(float));
    }
  };
  add(Kind::take_rows, kernel, {x.index}, {out.index});
}

void Program::complete() {
  for (Register& target : registers_) {
    const int64_t size = max_rows(target) * target.width;
    target.data.f32 = allocate<float>(size);
    if (!target.needs_q8) continue;
    target.data.q8 = allocate<int8_t>(size);
    target.data.q8_scale = allocate<float>(size / q8_block);
    target.data.q8_sum = allocate<int32_t>(size / q8_block);
  }
  progress_ = std::make_unique<Progress[]>(instructions_.size());
}

void Program::add(Kind kind, Kernel kernel, const std::vector<int64_t>& read, const std::vector<int64_t>& written, int64_t row_work) {
  const bool waits = has_common(read, written_) || has_common(written, written_) || has_common(written, read_);
  if (waits) {
    read_.clear();
    written_.clear();
  }
  read_.insert(read_.end(), read.begin(), read.end());
  written_.insert(written_.end(), written.begin(), written.end());
  instructions_.push_back(Instruction{kind, std::move(kernel), nullptr, row_work, is_on_samples(), waits, std::nullopt});
}

const float* Program::run(const Batch& batch, const Pool& pool, Profile* profile) {
  check(is_complete(), "the program is not complete: set_logits must come before run");
  const auto lock = lock_running();
  check_step(batch, pool);
  prepare_workspace(batch, pool);
  const Step step{batch, pool};
  for (size_t i = 0; i < instructions_.size(); ++i) {
    progress_[i].claimed.store(0, std::memory_order_relaxed);
    progress_[i].num_done.store(0, std::memory_order_relaxed);
  }
  const uint64_t first_call = num_calls.fetch_add(instructions_.size()) + 1;
  team_.run([&](Share share) { execute(step, first_call, share.index, profile); });
  return logits().data.f32;
}

void Program::sample(const float* logits, int64_t vocab_size, const std::vector<SampleRow>& rows, int32_t* tokens) {
  const auto lock = lock_running();
  std::atomic<size_t> next{0};
  const auto pick = [&](Share) {
    thread_local std::vector<float> scratch;  // kept: taking so much memory anew costs more than a greedy row
    scratch.resize(std::max(scratch.size(), static_cast<size_t>(2 * vocab_size)));
    for (size_t i; (i = next.fetch_add(1)) < rows.size();) {
      tokens[i] = sample_row(logits + static_cast<int64_t>(i) * vocab_size, vocab_size, rows[i], scratch.data());
    }
  };
  if (rows.size() == 1)  // not worth waking the others
    pick({0, 1});
  else
    team_.run(pick);
}

// A run that failed may have left counters behind in it, so it starts from zero each time; what is zeroed is in proportion to what attention will read.
void Program::prepare_workspace(const Batch& batch, const Pool& pool) {
  if (!shape_) return;
  const size_t needed = attention_workspace_bytes(shape_->num_heads, pool, batch.rows, team_.num_threads());
  if (needed > workspace_bytes_) {
    workspace_ = map_memory(needed);
    workspace_bytes_ = needed;
  }
  std::memset(workspace_.get(), 0, std::min<size_t>(needed, static_cast<size_t>(team_.num_threads()) * 64));
}

int Program::num_parts(const Instruction& instruction, int64_t num_rows) const {
  const int64_t members = team_.num_threads(), work = instruction.row_work * std::max(num_rows, least_rows_of_work);
  return static_cast<int>(members == 1 ? 1 : members * std::clamp(work / (members * part_work), int64_t{1}, max_parts));
}

// Its own share first, in the order in which memory is read: what a member reads is then on its way, or in its own cache from the step before. Then the others',
// from the end.
int Program::claim(Progress& progress, int parts, int index) const {
  if (parts > 64) {
    const uint64_t part = progress.claimed.fetch_add(1, std::memory_order_relaxed);
    return part < static_cast<uint64_t>(parts) ? static_cast<int>(part) : -1;
  }
  const int own = parts / team_.num_threads(), first = index * own;
  for (int i = 0; i < parts; ++i) {
    const int part = i < own ? first + i : (first - 1 - (i - own) + parts) % parts;
    const uint64_t bit = uint64_t{1} << part;
    if (progress.claimed.load(std::memory_order_relaxed) & bit) continue;
    if (!(progress.claimed.fetch_or(bit, std::memory_order_relaxed) & bit)) return part;
  }
  return -1;
}

// What the member will read first of the next product, so that it can be on its way; null after the last one.
const uint8_t* Program::next_weights(const Instruction& instruction, const Step& step, int index) const {
  if (!instruction.next_linear) return nullptr;
  const Instruction& next = instructions_[*instruction.next_linear];
  const int64_t rows = num_rows(step.batch, next.is_on_samples);
  if (rows == 0) return nullptr;
  return linear_start(next.products->data(), static_cast<int>(next.products->size()), rows, {index, team_.num_threads()});
}

void Program::execute(const Step& step, uint64_t first_call, int index, Profile* profile) {
  Profile mine;
  auto last = std::chrono::steady_clock::now();
  const auto lap = [&](double& total) {
    if (profile == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    total += std::chrono::duration<double>(now - std::exchange(last, now)).count();
  };
  size_t first_open = 0;  // all before it are done
  for (size_t i = 0; i < instructions_.size(); ++i) {
    const Instruction& instruction = instructions_[i];
    if (num_rows(step.batch, instruction.is_on_samples) == 0) continue;
    for (; instruction.waits && first_open < i; ++first_open) {
      const int64_t rows_before = num_rows(step.batch, instructions_[first_open].is_on_samples);
      const int parts = rows_before == 0 ? 0 : num_parts(instructions_[first_open], rows_before);
      team_.wait([&] { return progress_[first_open].num_done.load() >= parts; });
    }
    lap(mine.wait_s[static_cast<int>(instruction.kind)]);
    execute_one(step, first_call, index, i);
    lap(mine.kernel_s[static_cast<int>(instruction.kind)]);
  }
  if (profile == nullptr) return;
  static std::mutex adding;
  std::lock_guard<std::mutex> lock(adding);
  for (int kind = 0; kind < num_kinds; ++kind) {
    profile->kernel_s[kind] += mine.kernel_s[kind];
    profile->wait_s[kind] += mine.wait_s[kind];
  }
}

// Who computes a part changes no bit.
void Program::execute_one(const Step& step, uint64_t first_call, int index, size_t i) {
  const Instruction& instruction = instructions_[i];
  const int64_t rows = num_rows(step.batch, instruction.is_on_samples);
  const int parts = num_parts(instruction, rows), own_end = (index + 1) * parts / team_.num_threads();
  const uint8_t* next = instruction.products ? next_weights(instruction, step, index) : nullptr;
  for (int part; (part = claim(progress_[i], parts, index)) >= 0;) {
    instruction.kernel(step, rows, {part, parts, first_call + i, part + 1 == own_end ? next : nullptr});
    if (progress_[i].num_done.fetch_add(1) + 1 == parts) team_.wake();
  }
}

}  // namespace pyserve
