#include "program.h"

#include <algorithm>
#include <cstring>

namespace pyserve::cuda {
namespace {

constexpr int64_t kQ8Block = 32;       // columns under one scale
constexpr int64_t kAlign = 4;          // int32 values: what is uploaded together starts on 16 bytes
constexpr int64_t kHeadDims[] = {64, 80, 96, 128, 256};

bool is_float(WeightType type) { return type == WeightType::f32 || type == WeightType::f16 || type == WeightType::bf16; }

// Several int32 arrays in one piece of staging memory.
class Packer {
 public:
  int64_t add(const int32_t* values, int64_t count) {
    parts_.push_back({values, count, size_});
    size_ += (count + kAlign - 1) / kAlign * kAlign;
    return parts_.back().offset;
  }
  int64_t num_bytes() const { return size_ * 4; }
  void write(int32_t* to) const {
    for (const Part& part : parts_) std::copy_n(part.values, part.count, to + part.offset);
  }

 private:
  struct Part {
    const int32_t* values;
    int64_t count, offset;
  };
  std::vector<Part> parts_;
  int64_t size_ = 0;
};

}  // namespace

int64_t packed_size(WeightType type, int64_t rows, int64_t cols) {
  if (is_float(type)) return rows * cols * (type == WeightType::f32 ? 4 : 2);
  return pyserve_cuda_packed_bytes(static_cast<int64_t>(type), rows, cols);
}

Program::Program(std::shared_ptr<DeviceContext> device, int64_t max_tokens, int64_t max_samples)
    : device_(std::move(device)), max_tokens_(max_tokens), max_samples_(max_samples) {
  pyserve::check(max_tokens > 0 && max_tokens <= INT32_MAX, "max_tokens must be positive, not ", max_tokens);
  pyserve::check(max_samples > 0 && max_samples <= max_tokens, "max_samples must be in 1..max_tokens, not ", max_samples);
}

// --- building

int64_t Program::buffer(int64_t width) {
  check_open();
  pyserve::check(width > 0, "width must be positive, not ", width);
  registers_.emplace_back().width = width;
  return static_cast<int64_t>(registers_.size()) - 1;
}

void Program::embed(const PackedWeight& table, int64_t out, float scale) {
  Register* to = &writable(out, "out", table.cols, false);
  vocab_size_ = std::min(vocab_size_, table.rows);
  pyserve::check(!is_on_samples_, "embed must come before take_rows");
  add([=, this, table = on_device(table)](Step& step, int64_t num_rows) {
    must(pyserve_cuda_embed(&table, step.tokens, num_rows, scale, to->f32.as<float>(), device_->compute()), "embed");
  });
}

void Program::rms_norm(int64_t x, const float* weight, int64_t weight_len, float eps, int64_t out) {
  const Register* from = &readable(x, "x");
  check_equal(weight_len, from->width, "weight: its length");
  pyserve::check(eps >= 0, "eps must not be negative");
  pyserve::check(x != out, "out must be another register than x");
  Register* to = &writable(out, "out", from->width, true);
  add([=, this, weight = on_device(weight, weight_len)](Step&, int64_t num_rows) {
    const Activations into = to->view();
    must(pyserve_cuda_rms_norm(from->f32.as<float>(), nullptr, weight, eps, &into, num_rows, device_->compute()), "rms_norm");
  });
}

void Program::linear(int64_t x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, int64_t out, bool accumulate) {
  const Register* from = &readable(x, "x");
  pyserve::check(!weights.empty(), "weights must not be empty");
  check_equal(static_cast<int64_t>(biases.size()), static_cast<int64_t>(weights.size()), "biases: their number");
  pyserve::check(x != out, "out must be another register than x");
  std::vector<PackedWeight> held;
  std::vector<const float*> added;
  int64_t width = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_equal(weights[i].cols, from->width, "weights: the columns of each");
    if (!is_float(weights[i].type)) need_q8(x);
    held.push_back(on_device(weights[i]));
    added.push_back(biases[i] == nullptr ? nullptr : on_device(biases[i], weights[i].rows));
    width += weights[i].rows;
  }
  if (accumulate) readable(out, "out");
  Register* to = &writable(out, "out", width, false);
  add([=, this](Step&, int64_t num_rows) {
    const Activations in = from->view();
    float* columns = to->f32.as<float>();
    for (size_t i = 0; i < held.size(); ++i) {
      const auto product = is_float(held[i].type) ? pyserve_cuda_linear_float : pyserve_cuda_linear;
      must(product(&held[i], &in, added[i], columns, width, num_rows, accumulate, device_->compute()), "linear");
      columns += held[i].rows;
    }
  });
}

void Program::rope_kv_write(int64_t qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm) {
  Register* to = &readable(qkv, "qkv");
  note_shape(shape);
  writable(qkv, "qkv", (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, false);
  pyserve::check(rope.rotary_dim > 0 && rope.rotary_dim % 2 == 0 && rope.rotary_dim <= shape.head_dim, "rope: rotary_dim must be even and in 2..",
                 shape.head_dim, ", not ", rope.rotary_dim);
  pyserve::check(rope.max_positions > 0, "rope: the tables must have a row for each position");
  max_positions_ = std::min(max_positions_, rope.max_positions);
  RopeTable table = rope;
  table.cos = on_device(rope.cos, rope.max_positions * rope.rotary_dim / 2);
  table.sin = on_device(rope.sin, rope.max_positions * rope.rotary_dim / 2);
  HeadNorm weights = norm;
  if (norm.q_weight != nullptr) weights.q_weight = on_device(norm.q_weight, shape.head_dim);
  if (norm.k_weight != nullptr) weights.k_weight = on_device(norm.k_weight, shape.head_dim);
  add([=, this](Step& step, int64_t) {
    must(pyserve_cuda_rope_kv_write(to->f32.as<float>(), shape.num_heads, &table, &weights, &step.pool, shape.layer, &step.rows, device_->compute()),
         "rope_kv_write");
  });
}

void Program::attention(int64_t qkv, int64_t out, const AttentionShape& shape, float scale, int64_t window, float softcap) {
  const Register* from = &readable(qkv, "qkv");
  note_shape(shape);
  check_equal(from->width, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, "qkv: its width");
  pyserve::check(window >= 0, "window must not be negative");
  pyserve::check(softcap >= 0, "softcap must not be negative");
  pyserve::check(scale >= 0, "scale must not be negative");
  pyserve::check(qkv != out, "out must be another register than qkv");
  Register* to = &writable(out, "out", shape.num_heads * shape.head_dim, false);
  const AttentionSpec spec{shape.num_heads, shape.layer, scale, softcap, window};
  windows_.push_back(window);
  add([=, this](Step& step, int64_t) { attend(step, *from, *to, spec); });
}

void Program::gated_activation(int64_t gate_up, int64_t out, Activation kind) {
  const Register* from = &readable(gate_up, "gate_up");
  pyserve::check(gate_up != out, "out must be another register than gate_up");
  pyserve::check(from->width % 2 == 0, "gate_up: its width must be even, not ", from->width);
  Register* to = &writable(out, "out", from->width / 2, true);
  add([=, this](Step&, int64_t num_rows) {
    const Activations into = to->view();
    must(pyserve_cuda_gated_activation(static_cast<int64_t>(kind), from->f32.as<float>(), &into, num_rows, device_->compute()), "gated_activation");
  });
}

void Program::take_rows(int64_t x, int64_t out) {
  const Register* from = &readable(x, "x");
  pyserve::check(!is_on_samples_, "take_rows may come once only");
  pyserve::check(x != out, "out must be another register than x");
  is_on_samples_ = true;
  Register* to = &writable(out, "out", from->width, false);
  add([=, this](Step& step, int64_t num_rows) {
    must(pyserve_cuda_take_rows(from->f32.as<float>(), from->width, step.sample_rows, num_rows, to->f32.as<float>(), device_->compute()), "take_rows");
  });
}

void Program::set_logits(int64_t x) {
  readable(x, "logits");
  pyserve::check(is_on_samples_, "logits must hold sample rows: take_rows must come before");
  device_->use();
  for (Register& target : registers_) {
    const int64_t rows = target.holds_tokens ? max_tokens_ : max_samples_;
    target.f32.need(rows * target.width * 4);
    if (!target.needs_q8) continue;
    target.q8.need(rows * target.width);
    target.q8_scale.need(rows * target.width / kQ8Block * 4);
    target.q8_sum.need(rows * target.width / kQ8Block * 4);
  }
  tokens_.need(max_samples_ * 4);
  tokens_on_host_.need(max_samples_ * 4);
  device_->finish_step();
  uploaded_.clear();
  logits_ = x;
}

const void* Program::on_device(const void* host, int64_t num_bytes) {
  const void*& known = uploaded_[host];
  if (known == nullptr) {
    device_->use();
    Memory& memory = constants_.emplace_back();
    memory.need(num_bytes);
    must(pyserve_cuda_copy(memory.as<void>(), host, num_bytes, 0, device_->compute()), "uploading weights");
    known = memory.as<void>();
  }
  return known;
}

PackedWeight Program::on_device(const PackedWeight& weight) {
  const int64_t num_bytes = packed_size(weight.type, weight.rows, weight.cols);
  return {weight.type, weight.rows, weight.cols, static_cast<const uint8_t*>(on_device(static_cast<const void*>(weight.data), num_bytes))};
}

void Program::check_open() const { pyserve::check(!logits_.has_value(), "the program is complete: nothing may follow set_logits"); }

Program::Register& Program::reg(int64_t index, const char* name) {
  check_open();
  pyserve::check(index >= 0 && index < static_cast<int64_t>(registers_.size()), name, " is no register of this program");
  return registers_[static_cast<size_t>(index)];
}

Program::Register& Program::readable(int64_t index, const char* name) {
  Register& found = reg(index, name);
  pyserve::check(found.rows != Rows::none, name, " is read before anything wrote it");
  pyserve::check((found.rows == Rows::samples) == is_on_samples_, name, " holds token rows: after take_rows only sample rows can be read");
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
  pyserve::check(target->width % kQ8Block == 0, "x: its width must be a multiple of ", kQ8Block, " for a quantised product, not ", target->width);
  target->needs_q8 = true;
  if (target->has_q8) return;
  add([=, this](Step&, int64_t num_rows) {
    const Activations view = target->view();
    must(pyserve_cuda_quantise(&view, num_rows, device_->compute()), "quantise");
  });
  target->has_q8 = true;
}

void Program::note_shape(const AttentionShape& shape) {
  pyserve::check(!is_on_samples_, "attention must come before take_rows");
  check_attention_shape(shape);
  pyserve::check(std::find(std::begin(kHeadDims), std::end(kHeadDims), shape.head_dim) != std::end(kHeadDims),
                 "head_dim must be 64, 80, 96, 128 or 256 on a CUDA device, not ", shape.head_dim);
  if (shape_) {
    check_equal(shape.num_kv_heads, shape_->num_kv_heads, "num_kv_heads");
    check_equal(shape.head_dim, shape_->head_dim, "head_dim");
    check_equal(shape.num_heads, shape_->num_heads, "num_heads");
  }
  shape_ = shape;
  num_layers_ = std::max(num_layers_, shape.layer + 1);
  tile_queries_ = pyserve_cuda_attention_prefill_queries(shape.head_dim, &device_->limits());
  pyserve::check(tile_queries_ > 0, "head_dim ", shape.head_dim, " needs more shared memory than this device has");
}

// --- running

void Program::check(const Batch& batch, const Pool& pool) const {
  pyserve::check(logits_.has_value(), "the program is not complete: set_logits must come before run");
  if (shape_) {
    pyserve::check(pool.num_layers >= num_layers_, "kv: must have ", num_layers_, " layers, not ", pool.num_layers);
    check_equal(pool.num_kv_heads, shape_->num_kv_heads, "kv: its kv heads");
    check_equal(pool.head_dim, shape_->head_dim, "kv: its head_dim");
    pyserve::check(pool.type != DType::f32, "kv must be float16 or bfloat16 on a CUDA device, not float32");
    pyserve::check(pool.page_size > 0 && pool.num_pages > 0, "kv: must not be empty");
  }
  pyserve::check(batch.rows.num_rows > 0 && batch.rows.num_rows <= max_tokens_, "tokens: their number must be in 1..", max_tokens_, ", not ",
                 batch.rows.num_rows);
  pyserve::check(batch.num_samples >= 0 && batch.num_samples <= max_samples_, "sample_rows: their number must be in 0..", max_samples_, ", not ",
                 batch.num_samples);
  check_range(batch.tokens, batch.rows.num_rows, vocab_size_, "tokens");
  check_range(batch.sample_rows, batch.num_samples, batch.rows.num_rows, "sample_rows");
  if (shape_) check_step_rows(batch.rows, batch.num_sequences, max_positions_, pool);
}

void Program::cut_attention(const Batch& batch, Step& step, std::vector<int32_t>& tiles) const {
  const StepRows& rows = batch.rows;
  std::vector<int32_t> chunks;
  for (int64_t first = 0, next; first < rows.num_rows; first = next) {
    for (next = first + 1; next < rows.num_rows && rows.sequences[next] == rows.sequences[first];) ++next;
    if (next - first > 1) {
      for (const int64_t value : {first, next - first, int64_t{rows.positions[next - 1]}}) chunks.push_back(static_cast<int32_t>(value));
    } else if (!step.alone.empty() && step.alone.back().first + step.alone.back().count == first) {
      ++step.alone.back().count;
    } else {
      step.alone.push_back({first, 1});
    }
  }
  if (chunks.empty()) return;
  const auto cut = [&](int32_t* to, int64_t room) {
    return pyserve_cuda_attention_prefill_tiles(chunks.data(), static_cast<int64_t>(chunks.size()) / 3, shape_->num_heads / shape_->num_kv_heads, tile_queries_,
                                                to, room);
  };
  step.num_tiles = cut(nullptr, 0);
  tiles.resize(static_cast<size_t>(3 * step.num_tiles));
  cut(tiles.data(), step.num_tiles);
}

// The batch as the device sees it. Of the page table, only the columns that some row reads.
Program::Step Program::upload(const Batch& batch, const Pool& pool) {
  Step step{};
  step.pool = pool;
  step.num_samples = batch.num_samples;
  step.rows = batch.rows;
  std::vector<int32_t> tiles, table;
  if (shape_) {
    cut_attention(batch, step, tiles);
    const int32_t last = *std::max_element(batch.rows.positions, batch.rows.positions + batch.rows.num_rows);
    step.rows.page_table_width = last / pool.page_size + 1;
    for (int64_t i = 0; i < batch.num_sequences; ++i) {
      const int32_t* row = batch.rows.page_table + i * batch.rows.page_table_width;
      table.insert(table.end(), row, row + step.rows.page_table_width);
    }
  }
  const int64_t num_rows = batch.rows.num_rows;
  Packer packer;
  const int64_t tokens = packer.add(batch.tokens, num_rows), positions = packer.add(batch.rows.positions, num_rows);
  const int64_t sequences = packer.add(batch.rows.sequences, num_rows), pages = packer.add(table.data(), static_cast<int64_t>(table.size()));
  const int64_t samples = packer.add(batch.sample_rows, batch.num_samples), cut = packer.add(tiles.data(), static_cast<int64_t>(tiles.size()));
  staging_.need(packer.num_bytes());
  inputs_.need(packer.num_bytes());
  packer.write(staging_.as<int32_t>());
  must(pyserve_cuda_copy(inputs_.as<void>(), staging_.as<void>(), packer.num_bytes(), 0, device_->compute()), "uploading the batch");
  const int32_t* base = inputs_.as<int32_t>();
  step.tokens = base + tokens;
  step.rows.positions = base + positions;
  step.rows.sequences = base + sequences;
  step.rows.page_table = base + pages;
  step.sample_rows = base + samples;
  step.tiles = base + cut;
  return step;
}

void Program::prepare_scratch(const Step& step) {
  if (!shape_) return;
  int64_t num_bytes = 0;
  for (const Range& range : step.alone)
    for (const int64_t window : windows_)
      num_bytes = std::max(num_bytes, pyserve_cuda_attention_decode_scratch_bytes(range.count, shape_->num_heads, shape_->num_kv_heads, shape_->head_dim,
                                                                                  step.rows.page_table_width * step.pool.page_size, window,
                                                                                  &device_->limits()));
  decode_scratch_.need(num_bytes);
  prefill_scratch_.need(pyserve_cuda_attention_prefill_scratch_bytes(step.num_tiles, shape_->num_kv_heads, shape_->head_dim, &device_->limits()));
}

void Program::attend(Step& step, const Register& from, const Register& to, const AttentionSpec& spec) {
  constexpr auto f32 = static_cast<int64_t>(DType::f32);
  void* stream = device_->compute();
  for (const Range& range : step.alone) {
    const Matrix q{from.f32.as<float>() + range.first * from.width, f32, from.width}, out{to.f32.as<float>() + range.first * to.width, f32, to.width};
    StepRows rows = step.rows;
    rows.num_rows = range.count;
    rows.positions += range.first;
    rows.sequences += range.first;
    const bool is_planned = step.alone.size() == 1 && step.planned_window == spec.window;
    const auto decode = is_planned ? pyserve_cuda_attention_decode_planned : pyserve_cuda_attention_decode;
    must(decode(&q, &spec, &step.pool, &rows, &out, decode_scratch_.as<void>(), decode_scratch_.num_bytes(), &device_->limits(), stream), "attention");
    step.planned_window = spec.window;
  }
  if (step.num_tiles == 0) return;
  const Matrix q{from.f32.as<float>(), f32, from.width}, out{to.f32.as<float>(), f32, to.width};
  must(pyserve_cuda_attention_prefill(&q, &spec, &step.pool, &step.rows, &out, step.tiles, step.num_tiles, prefill_scratch_.as<void>(),
                                      prefill_scratch_.num_bytes(), &device_->limits(), stream),
       "attention of a prompt");
}

void Program::launch(const Batch& batch, const Pool& pool) {
  check(batch, pool);
  device_->use();
  Step step = upload(batch, pool);
  prepare_scratch(step);
  for (const Instruction& instruction : instructions_) {
    const int64_t num_rows = instruction.is_on_samples ? step.num_samples : step.rows.num_rows;
    if (num_rows > 0) instruction.launch(step, num_rows);
  }
  device_->step_posted();
}

const float* Program::run(const Batch& batch, const Pool& pool) {
  const auto lock = lock_running();
  launch(batch, pool);
  const int64_t num_bytes = batch.num_samples * logits_width() * 4;
  logits_on_host_.need(num_bytes);
  const Register& logits = registers_[static_cast<size_t>(*logits_)];
  if (num_bytes > 0) must(pyserve_cuda_copy(logits_on_host_.as<void>(), logits.f32.as<void>(), num_bytes, 1, device_->compute()), "reading logits back");
  device_->finish_step();
  return logits_on_host_.as<float>();
}

const int32_t* Program::run_greedy(const Batch& batch, const Pool& pool) {
  const auto lock = lock_running();
  launch(batch, pool);
  const Register& logits = registers_[static_cast<size_t>(*logits_)];
  void* stream = device_->compute();
  must(pyserve_cuda_argmax(logits.f32.as<float>(), logits.width, logits.width, batch.num_samples, tokens_.as<int32_t>(), stream), "argmax");
  if (batch.num_samples > 0) must(pyserve_cuda_copy(tokens_on_host_.as<void>(), tokens_.as<void>(), batch.num_samples * 4, 1, stream), "reading tokens back");
  device_->finish_step();
  return tokens_on_host_.as<int32_t>();
}

std::unique_lock<std::mutex> Program::lock_running() {
  std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
  pyserve::check(lock.owns_lock(), "the program is running: one run at a time");
  return lock;
}

}  // namespace pyserve::cuda
