#include "program.h"

#include <algorithm>

namespace pyserve::cuda {
namespace {

constexpr int64_t kQ8Block = 32;       // columns under one scale
constexpr int64_t kWeightAlign = 256;  // as cudaMalloc gives it
constexpr int64_t kHeadDims[] = {64, 80, 96, 128, 256};

bool is_float(WeightType type) { return type == WeightType::f32 || type == WeightType::f16 || type == WeightType::bf16; }

int64_t aligned(int64_t num_bytes) { return (num_bytes + kWeightAlign - 1) / kWeightAlign * kWeightAlign; }

}  // namespace

int64_t packed_size(WeightType type, int64_t rows, int64_t cols) {
  if (is_float(type)) return rows * cols * (type == WeightType::f32 ? 4 : 2);
  return pyserve_cuda_packed_bytes(static_cast<int64_t>(type), rows, cols);
}

Program::Program(std::shared_ptr<DeviceContext> device, int64_t max_tokens, int64_t max_samples)
    : device_(std::move(device)), max_tokens_(max_tokens), max_samples_(max_samples), graphs_(device_) {
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
  add([=, table = constant(table)](Step& step, int64_t num_rows) {
    const PackedWeight weight = table.view();
    must(pyserve_cuda_embed(&weight, step.tokens, num_rows, scale, to->f32.as<float>(), step.stream), "embed");
  });
}

void Program::rms_norm(int64_t x, const float* weight, int64_t weight_len, float eps, int64_t out) {
  const Register* from = &readable(x, "x");
  check_equal(weight_len, from->width, "weight: its length");
  pyserve::check(eps >= 0, "eps must not be negative");
  pyserve::check(x != out, "out must be another register than x");
  Register* to = &writable(out, "out", from->width, true);
  add([=, weight = constant(weight, weight_len * 4)](Step& step, int64_t num_rows) {
    const Activations into = to->view();
    must(pyserve_cuda_rms_norm(from->f32.as<float>(), nullptr, weight->as<float>(), eps, &into, num_rows, step.stream), "rms_norm");
  });
}

void Program::linear(int64_t x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, int64_t out, bool accumulate) {
  const Register* from = &readable(x, "x");
  pyserve::check(!weights.empty(), "weights must not be empty");
  check_equal(static_cast<int64_t>(biases.size()), static_cast<int64_t>(weights.size()), "biases: their number");
  pyserve::check(x != out, "out must be another register than x");
  std::vector<Weight> held;
  std::vector<const Constant*> added;
  int64_t width = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_equal(weights[i].cols, from->width, "weights: the columns of each");
    if (!is_float(weights[i].type)) need_q8(x);
    held.push_back(constant(weights[i]));
    added.push_back(constant(biases[i], weights[i].rows * 4));
    width += weights[i].rows;
  }
  if (accumulate) readable(out, "out");
  Register* to = &writable(out, "out", width, false);
  add([=](Step& step, int64_t num_rows) {
    const Activations in = from->view();
    float* columns = to->f32.as<float>();
    for (size_t i = 0; i < held.size(); ++i) {
      const PackedWeight weight = held[i].view();
      const float* bias = added[i] == nullptr ? nullptr : added[i]->as<float>();
      const auto product = is_float(weight.type) ? pyserve_cuda_linear_float : pyserve_cuda_linear;
      must(product(&weight, &in, bias, columns, width, num_rows, accumulate, step.stream), "linear");
      columns += weight.rows;
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
  const int64_t table_bytes = rope.max_positions * rope.rotary_dim / 2 * 4;
  const Constant *cos = constant(rope.cos, table_bytes), *sin = constant(rope.sin, table_bytes);
  const Constant *q_norm = constant(norm.q_weight, shape.head_dim * 4), *k_norm = constant(norm.k_weight, shape.head_dim * 4);
  const auto values = [](const Constant* constant) { return constant == nullptr ? nullptr : constant->as<float>(); };
  add([=](Step& step, int64_t) {
    const RopeTable table{values(cos), values(sin), rope.max_positions, rope.rotary_dim, rope.is_interleaved};
    const HeadNorm weights{values(q_norm), values(k_norm), norm.eps};
    must(pyserve_cuda_rope_kv_write(to->f32.as<float>(), shape.num_heads, &table, &weights, &step.pool, shape.layer, &step.rows, step.stream), "rope_kv_write");
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
  add([=](Step& step, int64_t num_rows) {
    const Activations into = to->view();
    must(pyserve_cuda_gated_activation(static_cast<int64_t>(kind), from->f32.as<float>(), &into, num_rows, step.stream), "gated_activation");
  });
}

void Program::take_rows(int64_t x, int64_t out) {
  const Register* from = &readable(x, "x");
  pyserve::check(!is_on_samples_, "take_rows may come once only");
  pyserve::check(x != out, "out must be another register than x");
  is_on_samples_ = true;
  Register* to = &writable(out, "out", from->width, false);
  add([=](Step& step, int64_t num_rows) {
    must(pyserve_cuda_take_rows(from->f32.as<float>(), from->width, step.sample_rows, num_rows, to->f32.as<float>(), step.stream), "take_rows");
  });
}

void Program::set_logits(int64_t x) {
  readable(x, "logits");
  pyserve::check(is_on_samples_, "logits must hold sample rows: take_rows must come before");
  logits_ = x;
}

// --- onto the device

const Program::Constant* Program::constant(const void* host, int64_t num_bytes) {
  if (host == nullptr) return nullptr;
  const Constant*& known = by_host_[host];
  if (known == nullptr) known = &constants_.emplace_back(Constant{host, num_bytes});
  return known;
}

Program::Weight Program::constant(const PackedWeight& weight) { return {weight, constant(weight.data, packed_size(weight.type, weight.rows, weight.cols))}; }

void Program::expect(int64_t num_sequences, int64_t context_len) {
  expected_sequences_ = std::min(num_sequences, max_tokens_);
  expected_len_ = context_len;
}

Program::Needs Program::needs() const {
  pyserve::check(logits_.has_value(), "the program is not complete: set_logits must come before");
  Needs needs{};
  for (const Constant& each : constants_) needs.weight_bytes += aligned(each.num_bytes);
  for (const Register& target : registers_)
    needs.work_bytes += register_rows(target) * target.width * (target.needs_q8 ? 5 : 4) + (target.needs_q8 ? register_rows(target) * target.width / kQ8Block * 8 : 0);
  if (expected_sequences_ > 0) needs.work_bytes += decode_scratch_bytes(expected_sequences_, expected_len_) + prefill_scratch_bytes(max_tiles());
  return needs;
}

void Program::upload() {
  device_->use();
  weights_.need(needs().weight_bytes);
  uint8_t* to = weights_.as<uint8_t>();
  for (Constant& each : constants_) {
    must(pyserve_cuda_copy(to, each.host, each.num_bytes, 0, device_->compute()), "uploading weights");
    each.data = to;
    to += aligned(each.num_bytes);
  }
  for (Register& target : registers_) {
    const int64_t rows = register_rows(target);
    target.f32.need(rows * target.width * 4);
    if (!target.needs_q8) continue;
    target.q8.need(rows * target.width);
    target.q8_scale.need(rows * target.width / kQ8Block * 4);
    target.q8_sum.need(rows * target.width / kQ8Block * 4);
  }
  picked_.need(max_samples_ * 4);
  for (Memory& memory : picked_on_host_) memory.need(max_samples_ * 4);
  if (expected_sequences_ > 0) {
    decode_scratch_.need(decode_scratch_bytes(expected_sequences_, expected_len_));
    prefill_scratch_.need(prefill_scratch_bytes(max_tiles()));
  }
  device_->finish_step();
  by_host_.clear();
  is_uploaded_ = true;
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
  add([=](Step& step, int64_t num_rows) {
    const Activations view = target->view();
    must(pyserve_cuda_quantise(&view, num_rows, step.stream), "quantise");
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

}  // namespace pyserve::cuda
