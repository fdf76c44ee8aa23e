#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "../check.h"
#include "memory.h"

namespace pyserve {
namespace {

constexpr int64_t q8_block = 32;  // columns under one scale
constexpr int64_t part_work = 1 << 20;      // multiply-adds: some 10 us of one thread, beside which claiming a part costs nothing
constexpr int64_t least_rows_of_work = 5;  // reading the weights takes as long as computing so many rows
constexpr int64_t max_parts = 16;          // for each member
std::atomic<uint64_t> num_calls{0};  // of kernels, in all programs: what threads keep between parts must not be taken for another program's

bool is_quantised(WeightType type) { return type != WeightType::f32 && type != WeightType::f16 && type != WeightType::bf16; }

bool has_common(const std::vector<int64_t>& left, const std::vector<int64_t>& right) {
  return std::any_of(left.begin(), left.end(), [&](int64_t item) { return std::find(right.begin(), right.end(), item) != right.end(); });
}

// [first, last) of `count` things for this share
std::pair<int64_t, int64_t> part(int64_t count, Share share) { return {count * share.index / share.count, count * (share.index + 1) / share.count}; }

}  // namespace

// Mapped, which leaves the pages of a large block untouched until they are used: a program made for long prompts costs nothing while prompts are short.
template <class T>
void Program::Memory<T>::allocate(int64_t count) {
  block_ = map_memory(static_cast<size_t>(count) * sizeof(T));
  data_ = reinterpret_cast<T*>(block_.get());
}

Activations Program::Register::view() const { return Activations{f32.get(), q8.get(), q8_scale.get(), q8_sum.get(), width}; }

Program::Program(int64_t max_tokens, int64_t max_samples, int num_threads) : max_tokens_(max_tokens), max_samples_(max_samples), team_(num_threads) {
  check(max_tokens > 0 && max_tokens <= INT32_MAX, "max_tokens must be positive, not ", max_tokens);
  check(max_samples > 0 && max_samples <= max_tokens, "max_samples must be in 1..max_tokens, not ", max_samples);
}

int64_t Program::buffer(int64_t width) {
  check_open();
  check(width > 0, "width must be positive, not ", width);
  registers_.emplace_back().width = width;
  return static_cast<int64_t>(registers_.size()) - 1;
}

void Program::embed(const PackedWeight& table, int64_t out, float scale) {
  Register* to = &writable(out, "out", table.cols, false);
  vocab_size_ = std::min(vocab_size_, table.rows);
  check(!is_on_samples_, "embed must come before take_rows");
  const auto kernel = [=](const Step& step, int64_t num_rows, Share share) {
    pyserve::embed(table, step.batch.tokens, num_rows, scale, to->f32.get(), share);
  };
  add(Kind::embed, kernel, {}, {out});
}

void Program::rms_norm(int64_t x, const float* weight, int64_t weight_len, float eps, int64_t out) {
  const Register* from = &readable(x, "x");
  check_equal(weight_len, from->width, "weight: its length");
  check(eps >= 0, "eps must not be negative");
  check(x != out, "out must be another register than x");
  Register* to = &writable(out, "out", from->width, true);
  const auto kernel = [=](const Step&, int64_t num_rows, Share share) {
    pyserve::rms_norm(from->f32.get(), weight, eps, to->view(), num_rows, share);
  };
  add(Kind::rms_norm, kernel, {x}, {out});
}

void Program::linear(int64_t x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, int64_t out, bool accumulate) {
  const Register* from = &readable(x, "x");
  check(!weights.empty(), "weights must not be empty");
  check_equal(static_cast<int64_t>(biases.size()), static_cast<int64_t>(weights.size()), "biases: their number");
  check(x != out, "out must be another register than x");
  int64_t width = 0;
  bool reads_q8 = false;
  for (const PackedWeight& weight : weights) {
    check_equal(weight.cols, from->width, "weights: the columns of each");
    width += weight.rows;
    reads_q8 = reads_q8 || is_quantised(weight.type);
  }
  if (reads_q8) need_q8(x);
  if (accumulate) readable(out, "out");
  Register* to = &writable(out, "out", width, false);
  // Several products need not wait for one another: they read one register and write columns of their own.
  auto products = std::make_shared<std::vector<Product>>();
  for (size_t i = 0; i < weights.size(); ++i) products->push_back({weights[i], biases[i]});
  add(
      Kind::linear,
      [=](const Step&, int64_t num_rows, Share share) {
        pyserve::linear(products->data(), static_cast<int>(products->size()), from->view(), to->f32.get(), width, num_rows, accumulate, share);
      },
      {x}, {out}, width * from->width);
  Instruction& added = instructions_.back();
  added.products = products;
  for (size_t i = instructions_.size() - 1; i-- > 0 && !instructions_[i].next_linear;) instructions_[i].next_linear = instructions_.size() - 1;
}

void Program::rope_kv_write(int64_t qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm) {
  Register* to = &readable(qkv, "qkv");
  note_shape(shape);
  writable(qkv, "qkv", (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, false);
  check(rope.rotary_dim > 0 && rope.rotary_dim % 2 == 0 && rope.rotary_dim <= shape.head_dim, "rope: rotary_dim must be even and in 2..", shape.head_dim,
        ", not ", rope.rotary_dim);
  check(rope.max_positions > 0, "rope: the tables must have a row for each position");
  max_positions_ = std::min(max_positions_, rope.max_positions);
  add(
      Kind::rope_kv_write,
      [=](const Step& step, int64_t, Share share) {
        pyserve::rope_kv_write(to->f32.get(), shape.num_heads, rope, norm, step.pool, shape.layer, step.batch.rows, share);
      },
      {qkv}, {qkv, pool_layer(shape.layer)});
}

void Program::attention(int64_t qkv, int64_t out, const AttentionShape& shape, float scale, int64_t window, float softcap) {
  const Register* from = &readable(qkv, "qkv");
  note_shape(shape);
  check_equal(from->width, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, "qkv: its width");
  check(window >= 0, "window must not be negative");
  check(softcap >= 0, "softcap must not be negative");
  check(qkv != out, "out must be another register than qkv");
  Register* to = &writable(out, "out", shape.num_heads * shape.head_dim, shape.head_dim % q8_block == 0);
  const AttentionSpec spec{shape.num_heads, shape.layer, scale, softcap, window};
  add(
      Kind::attention,
      [=, this](const Step& step, int64_t, Share share) {
        pyserve::attention(from->f32.get(), spec, step.pool, step.batch.rows, to->view(), workspace_.get(), share);
      },
      {qkv, pool_layer(shape.layer)}, {out});
}

void Program::gated_activation(int64_t gate_up, int64_t out, Activation kind) {
  const Register* from = &readable(gate_up, "gate_up");
  check(gate_up != out, "out must be another register than gate_up");
  check(from->width % 2 == 0, "gate_up: its width must be even, not ", from->width);
  Register* to = &writable(out, "out", from->width / 2, true);
  const auto kernel = [=](const Step&, int64_t num_rows, Share share) {
    pyserve::gated_activation(kind, from->f32.get(), to->view(), num_rows, share);
  };
  add(Kind::gated_activation, kernel, {gate_up}, {out});
}

void Program::take_rows(int64_t x, int64_t out) {
  const Register* from = &readable(x, "x");
  check(!is_on_samples_, "take_rows may come once only");
  check(x != out, "out must be another register than x");
  is_on_samples_ = true;
  Register* to = &writable(out, "out", from->width, false);
  add(
      Kind::take_rows,
      [=](const Step& step, int64_t num_rows, Share share) {
        const auto [first, last] = part(num_rows, share);
        for (int64_t i = first; i < last; ++i) {
          std::memcpy(to->f32.get() + i * to->width, from->f32.get() + step.batch.sample_rows[i] * to->width, static_cast<size_t>(to->width) * sizeof(float));
        }
      },
      {x}, {out});
}

void Program::set_logits(int64_t x) {
  readable(x, "logits");
  check(is_on_samples_, "logits must hold sample rows: take_rows must come before");
  for (Register& target : registers_) allocate(target);
  progress_ = std::make_unique<Progress[]>(instructions_.size());
  logits_ = x;
}

void Program::allocate(Register& target) {
  const int64_t rows = target.holds_tokens ? max_tokens_ : max_samples_;
  target.f32.allocate(rows * target.width);
  if (!target.needs_q8) return;
  target.q8.allocate(rows * target.width);
  target.q8_scale.allocate(rows * target.width / q8_block);
  target.q8_sum.allocate(rows * target.width / q8_block);
}

void Program::check_open() const { check(!logits_.has_value(), "the program is complete: nothing may follow set_logits"); }

Program::Register& Program::reg(int64_t index, const char* name) {
  check_open();
  check(index >= 0 && index < static_cast<int64_t>(registers_.size()), name, " is no register of this program");
  return registers_[static_cast<size_t>(index)];
}

Program::Register& Program::readable(int64_t index, const char* name) {
  Register& found = reg(index, name);
  check(found.rows != Rows::none, name, " is read before anything wrote it");
  check((found.rows == Rows::samples) == is_on_samples_, name, " holds token rows: after take_rows only sample rows can be read");
  return found;
}

Program::Register& Program::writable(int64_t index, const char* name, int64_t width, bool fills_q8) {
  Register& found = reg(index, name);
  check_equal(found.width, width, (std::string(name) + ": its width").c_str());
  found.rows = is_on_samples_ ? Rows::samples : Rows::tokens;
  found.holds_tokens = found.holds_tokens || !is_on_samples_;
  found.has_q8 = fills_q8;
  return found;
}

void Program::need_q8(int64_t x) {
  Register* target = &reg(x, "x");
  check(target->width % q8_block == 0, "x: its width must be a multiple of ", q8_block, " for a quantised product, not ", target->width);
  target->needs_q8 = true;
  if (target->has_q8) return;
  add(Kind::quantise, [=](const Step&, int64_t num_rows, Share share) { pyserve::quantise(target->view(), num_rows, share); }, {x}, {x});
  target->has_q8 = true;
}

void Program::add(Kind kind, Kernel kernel, const std::vector<int64_t>& read, const std::vector<int64_t>& written, int64_t row_work) {
  const bool waits = has_common(read, written_) || has_common(written, written_) || has_common(written, read_);
  if (waits) {
    read_.clear();
    written_.clear();
  }
  read_.insert(read_.end(), read.begin(), read.end());
  written_.insert(written_.end(), written.begin(), written.end());
  instructions_.push_back(Instruction{kind, std::move(kernel), nullptr, row_work, is_on_samples_, waits, std::nullopt});
}

void Program::note_shape(const AttentionShape& shape) {
  check(!is_on_samples_, "attention must come before take_rows");
  check_attention_shape(shape);
  if (shape_) {
    check_equal(shape.num_kv_heads, shape_->num_kv_heads, "num_kv_heads");
    check_equal(shape.head_dim, shape_->head_dim, "head_dim");
  }
  shape_ = shape;
  num_layers_ = std::max(num_layers_, shape.layer + 1);
}

void Program::check_pool(const Pool& pool) const {
  if (!shape_) return;
  check(pool.num_layers >= num_layers_, "kv: must have ", num_layers_, " layers, not ", pool.num_layers);
  check_equal(pool.num_kv_heads, shape_->num_kv_heads, "kv: its kv heads");
  check_equal(pool.head_dim, shape_->head_dim, "kv: its head_dim");
  check(pool.page_size > 0 && pool.num_pages > 0, "kv: must not be empty");
}

void Program::check_batch(const Batch& batch, const Pool& pool) const {
  check(batch.rows.num_rows > 0 && batch.rows.num_rows <= max_tokens_, "tokens: their number must be in 1..", max_tokens_, ", not ", batch.rows.num_rows);
  check(batch.num_samples >= 0 && batch.num_samples <= max_samples_, "sample_rows: their number must be in 0..", max_samples_, ", not ", batch.num_samples);
  check_range(batch.tokens, batch.rows.num_rows, vocab_size_, "tokens");
  check_range(batch.sample_rows, batch.num_samples, batch.rows.num_rows, "sample_rows");
  if (shape_) check_step_rows(batch.rows, batch.num_sequences, max_positions_, pool);
}

const float* Program::run(const Batch& batch, const Pool& pool, Profile* profile) {
  check(logits_.has_value(), "the program is not complete: set_logits must come before run");
  const auto lock = lock_running();
  check_pool(pool);
  check_batch(batch, pool);
  prepare_workspace(batch, pool);
  const Step step{batch, pool};
  for (size_t i = 0; i < instructions_.size(); ++i) {
    progress_[i].claimed.store(0, std::memory_order_relaxed);
    progress_[i].num_done.store(0, std::memory_order_relaxed);
  }
  const uint64_t first_call = num_calls.fetch_add(instructions_.size()) + 1;
  team_.run([&](Share share) { execute(step, first_call, share.index, profile); });
  return registers_[static_cast<size_t>(*logits_)].f32.get();
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

std::unique_lock<std::mutex> Program::lock_running() {
  std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
  check(lock.owns_lock(), "the program is running: one run at a time");
  return lock;
}

// A run that failed may have left counters behind in it, so it starts from zero each time; what is zeroed is in proportion to what attention will read.
void Program::prepare_workspace(const Batch& batch, const Pool& pool) {
  if (!shape_) return;
  const size_t needed = attention_workspace_bytes(shape_->num_heads, pool, batch.rows, team_.num_threads());
  if (needed > workspace_bytes_) {
    workspace_.allocate(static_cast<int64_t>(needed));
    workspace_bytes_ = needed;
  }
  std::memset(workspace_.get(), 0, std::min<size_t>(needed, static_cast<size_t>(team_.num_threads()) * 64));
}

int Program::num_parts(const Instruction& instruction, int64_t num_rows) const {
  const int64_t members = team_.num_threads(), work = instruction.row_work * std::max(num_rows, least_rows_of_work);
  return static_cast<int>(members == 1 ? 1 : members * std::clamp(work / (members * part_work), int64_t{1}, max_parts));
}

int64_t Program::num_rows(const Step& step, const Instruction& instruction) const {
  return instruction.is_on_samples ? step.batch.num_samples : step.batch.rows.num_rows;
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
  const int64_t rows = num_rows(step, next);
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
    if (num_rows(step, instruction) == 0) continue;
    for (; instruction.waits && first_open < i; ++first_open) {
      const int64_t rows_before = num_rows(step, instructions_[first_open]);
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
  const int64_t rows = num_rows(step, instruction);
  const int parts = num_parts(instruction, rows), own_end = (index + 1) * parts / team_.num_threads();
  const uint8_t* next = instruction.products ? next_weights(instruction, step, index) : nullptr;
  for (int part; (part = claim(progress_[i], parts, index)) >= 0;) {
    instruction.kernel(step, rows, {part, parts, first_call + i, part + 1 == own_end ? next : nullptr});
    if (progress_[i].num_done.fetch_add(1) + 1 == parts) team_.wake();
  }
}

}  // namespace pyserve
