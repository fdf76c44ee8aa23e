#include "program.h"

#include <algorithm>

namespace pyserve::cuda {
namespace {

constexpr int64_t kWeightAlign = 256;  // as cudaMalloc gives it
constexpr int64_t kHeadDims[] = {64, 80, 96, 128, 256};

int64_t aligned(int64_t num_bytes) { return (num_bytes + kWeightAlign - 1) / kWeightAlign * kWeightAlign; }

}  // namespace

int64_t packed_size(WeightType type, int64_t rows, int64_t cols) {
  if (!is_quantised(type)) return rows * cols * (type == WeightType::f32 ? 4 : 2);
  return pyserve_cuda_packed_bytes(static_cast<int64_t>(type), rows, cols);
}

Program::Program(std::shared_ptr<DeviceContext> device, int64_t max_tokens, int64_t max_samples)
    : Recorder(max_tokens, max_samples), device_(std::move(device)), graphs_(device_) {}

// --- building

void Program::add_embed(const PackedWeight& table, const Register& out, float scale) {
  add([=, table = constant(table), to = &out](Step& step, int64_t num_rows) {
    const PackedWeight weight = table.view();
    must(pyserve_cuda_embed(&weight, step.tokens, num_rows, scale, to->data.f32, step.stream), "embed");
  });
}

void Program::add_rms_norm(const Register& x, const float* weight, float eps, const Register& out) {
  add([=, weight = constant(weight, x.width * 4), from = &x, to = &out](Step& step, int64_t num_rows) {
    must(pyserve_cuda_rms_norm(from->data.f32, nullptr, weight->as<float>(), eps, &to->data, num_rows, step.stream), "rms_norm");
  });
}

void Program::add_quantise(const Register& x) {
  add([target = &x](Step& step, int64_t num_rows) { must(pyserve_cuda_quantise(&target->data, num_rows, step.stream), "quantise"); });
}

void Program::add_linear(const Register& x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, const Register& out,
                         bool accumulate) {
  std::vector<Weight> held;
  std::vector<const Constant*> added;
  for (size_t i = 0; i < weights.size(); ++i) {
    held.push_back(constant(weights[i]));
    added.push_back(constant(biases[i], weights[i].rows * 4));
  }
  add([=, from = &x, to = &out](Step& step, int64_t num_rows) {
    float* columns = to->data.f32;
    for (size_t i = 0; i < held.size(); ++i) {
      const PackedWeight weight = held[i].view();
      const auto product = is_quantised(weight.type) ? pyserve_cuda_linear : pyserve_cuda_linear_float;
      must(product(&weight, &from->data, values(added[i]), columns, to->width, num_rows, accumulate, step.stream), "linear");
      columns += weight.rows;
    }
  });
}

void Program::add_rope_kv_write(const Register& qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm) {
  const int64_t table_bytes = rope.max_positions * rope.rotary_dim / 2 * 4;
  const Constant *cos = constant(rope.cos, table_bytes), *sin = constant(rope.sin, table_bytes);
  const Constant *q_norm = constant(norm.q_weight, shape.head_dim * 4), *k_norm = constant(norm.k_weight, shape.head_dim * 4);
  add([=, to = &qkv](Step& step, int64_t) {
    const RopeTable table{values(cos), values(sin), rope.max_positions, rope.rotary_dim, rope.is_interleaved};
    const HeadNorm weights{values(q_norm), values(k_norm), norm.eps};
    must(pyserve_cuda_rope_kv_write(to->data.f32, shape.num_heads, &table, &weights, &step.pool, shape.layer, &step.rows, step.stream), "rope_kv_write");
  });
}

void Program::add_attention(const Register& qkv, const Register& out, const AttentionSpec& spec) {
  check(spec.scale >= 0, "scale must not be negative");
  windows_.push_back(spec.window);
  add([=, this, from = &qkv, to = &out](Step& step, int64_t) { attend(step, *from, *to, spec); });
}

void Program::add_gated_activation(const Register& gate_up, const Register& out, Activation kind) {
  add([=, from = &gate_up, to = &out](Step& step, int64_t num_rows) {
    must(pyserve_cuda_gated_activation(static_cast<int64_t>(kind), from->data.f32, &to->data, num_rows, step.stream), "gated_activation");
  });
}

void Program::add_take_rows(const Register& x, const Register& out) {
  add([from = &x, to = &out](Step& step, int64_t num_rows) {
    must(pyserve_cuda_take_rows(from->data.f32, from->width, step.sample_rows, num_rows, to->data.f32, step.stream), "take_rows");
  });
}

void Program::check_device_shape(const AttentionShape& shape) {
  check(std::find(std::begin(kHeadDims), std::end(kHeadDims), shape.head_dim) != std::end(kHeadDims),
        "head_dim must be 64, 80, 96, 128 or 256 on a CUDA device, not ", shape.head_dim);
  if (shape_) check_equal(shape.num_heads, shape_->num_heads, "num_heads");
  tile_queries_ = pyserve_cuda_attention_prefill_queries(shape.head_dim, &device_->limits());
  check(tile_queries_ > 0, "head_dim ", shape.head_dim, " needs more shared memory than this device has");
}

// --- onto the device

const Program::Constant* Program::constant(const void* host, int64_t num_bytes) {
  if (host == nullptr) return nullptr;
  const Constant*& known = by_host_[host];
  if (known == nullptr) known = &constants_.emplace_back(Constant{host, num_bytes});
  return known;
}

Program::Weight Program::constant(const PackedWeight& weight) { return {weight, constant(weight.data, packed_size(weight.type, weight.rows, weight.cols))}; }

void Program::expect(int64_t num_sequences, int64_t num_pages, int64_t page_size) {
  check(num_sequences >= 0 && num_pages >= 0 && page_size > 0, "expect: ", num_sequences, " sequences of ", num_pages, " pages of ", page_size, " tokens");
  expected_sequences_ = std::min(num_sequences, max_tokens_);
  expected_pages_ = num_pages;
  expected_page_size_ = page_size;
}

Program::RegisterBytes Program::register_bytes(const Register& target) const {
  const int64_t size = max_rows(target) * target.width;
  return target.needs_q8 ? RegisterBytes{size * 4, size, size / q8_block * 4} : RegisterBytes{size * 4, 0, 0};
}

Program::Needs Program::needs() const {
  check(is_complete(), "the program is not complete: set_logits must come before");
  Needs needs{};
  for (const Constant& each : constants_) needs.weight_bytes += aligned(each.num_bytes);
  for (const Register& target : registers_) needs.work_bytes += register_bytes(target).all();
  const Room room = expected_room();
  needs.work_bytes += room.inputs + room.decode_scratch + room.prefill_scratch + room.samplers;
  return needs;
}

template <class T>
T* Program::take(int64_t num_bytes) {
  blocks_.emplace_back().need(num_bytes);
  return blocks_.back().as<T>();
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
    const RegisterBytes bytes = register_bytes(target);
    target.data.f32 = take<float>(bytes.f32);
    if (!target.needs_q8) continue;
    target.data.q8 = take<int8_t>(bytes.q8);
    target.data.q8_scale = take<float>(bytes.scales);
    target.data.q8_sum = take<int32_t>(bytes.scales);
  }
  picked_.need(max_samples_ * 4);
  for (Memory& memory : picked_on_host_) memory.need(max_samples_ * 4);
  make_room(expected_room());
  device_->finish_step();
  by_host_.clear();
  is_uploaded_ = true;
}

}  // namespace pyserve::cuda
