// torch.ops.pyserve_cuda.* and torch.classes.pyserve_cuda.*: the CUDA backend for Python. The only file of csrc/cuda that includes torch, and no CUDA header.
//
// The same binding serves nvcc's build and the emulated one of tests/cuda; there, memory of the device is the host's and the pool is a CPU tensor. torch gives
// the GIL back around each of these calls.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <set>
#include <utility>

#include "../callable.h"
#include "copies.h"
#include "program.h"
#include "steps.h"

namespace pyserve::cuda {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

void check_tensor(const Tensor& tensor, const char* name, at::ScalarType type, int64_t num_dims) {
  check(tensor.defined() && tensor.device().is_cpu(), name, " must be on the CPU");
  check(tensor.scalar_type() == type, name, " must be ", c10::toString(type), ", not ", c10::toString(tensor.scalar_type()));
  check(tensor.dim() == num_dims, name, " must have ", num_dims, " dimensions, not ", tensor.dim());
  check(tensor.is_contiguous(), name, " must be contiguous");
}

const float* floats(const Tensor& tensor, const char* name, int64_t num_dims) {
  check_tensor(tensor, name, at::kFloat, num_dims);
  return tensor.data_ptr<float>();
}

const int32_t* ints(const Tensor& tensor, const char* name, int64_t num_dims) {
  check_tensor(tensor, name, at::kInt, num_dims);
  return tensor.data_ptr<int32_t>();
}

WeightType weight_type(int64_t type) {
  check(type >= 0 && type <= static_cast<int64_t>(WeightType::q6_k), "type: there is no weight type ", type);
  return static_cast<WeightType>(type);
}

void check_on_device(const Tensor& tensor, const char* name) {
  const bool is_there = tensor.defined() && (pyserve_cuda_is_emulated() ? tensor.device().is_cpu() : tensor.device().is_cuda());
  check(is_there, name, " must be on the CUDA device");
  check(tensor.is_contiguous(), name, " must be contiguous");
}

Pool pool_of(const Tensor& kv) {
  check_on_device(kv, "kv");
  check(kv.dim() == 6 && kv.size(2) == 2, "kv must be [pages, layers, 2, kv_heads, page_size, head_dim]");
  const at::ScalarType type = kv.scalar_type();
  check(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, "kv must be float32, float16 or bfloat16, not ", c10::toString(type));
  const DType as = type == at::kFloat ? DType::f32 : type == at::kHalf ? DType::f16 : DType::bf16;
  return Pool{static_cast<uint8_t*>(kv.data_ptr()), as, kv.size(0), kv.size(1), kv.size(3), kv.size(4), kv.size(5)};
}

// --- the device, and memory

struct DeviceHolder : torch::CustomClassHolder {
  std::shared_ptr<DeviceContext> context;
  explicit DeviceHolder(int64_t index) : context(std::make_shared<DeviceContext>(index)) {}
};
using DevicePtr = c10::intrusive_ptr<DeviceHolder>;

DevicePtr open_device(int64_t index) { return c10::make_intrusive<DeviceHolder>(index); }

// A tensor in memory that the device allocated; not zeroed.
Tensor allocate(const DevicePtr& self, const Shape& shape, int64_t dtype) {
  constexpr at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16};  // of DType
  check(dtype >= 0 && dtype <= 2, "dtype: there is no type ", dtype);
  const at::ScalarType type = types[dtype];
  int64_t num_bytes = static_cast<int64_t>(c10::elementSize(type));
  for (const int64_t size : shape) num_bytes *= size;
  self->context->use();
  auto memory = std::make_shared<Memory>();
  memory->need(num_bytes);
  const at::Device device = pyserve_cuda_is_emulated() ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(self->context->index()));
  void* data = memory->as<void>();
  return at::from_blob(data, shape, [memory, context = self->context](void*) {}, at::TensorOptions().dtype(type).device(device), device);
}

// free and total bytes
Shape device_memory(const DevicePtr& self) {
  self->context->use();
  int64_t free_bytes = 0, total_bytes = 0;
  must(pyserve_cuda_memory_info(&free_bytes, &total_bytes), "asking for free memory");
  return {free_bytes, total_bytes};
}

// The same memory, pinned for as long as the result lives. Throws std::runtime_error when it cannot be pinned.
Tensor pinned(const DevicePtr& self, const Tensor& memory) {
  check_tensor(memory, "memory", at::kByte, 1);
  self->context->use();
  must(pyserve_cuda_pin(memory.data_ptr(), memory.numel()), "pinning host memory");
  return at::from_blob(memory.data_ptr(), memory.sizes(), [memory](void* data) { pyserve_cuda_unpin(data); }, memory.options());
}

bool is_pinned(const Tensor& memory) { return pyserve_cuda_is_pinned(memory.data_ptr(), static_cast<int64_t>(memory.nbytes())) != 0; }

// uint8: a weight's bytes, as a file has them, in the order that the device's products read. Floats stay as they are.
Tensor pack(int64_t type, const Tensor& raw, int64_t rows, int64_t cols) {
  check_tensor(raw, "raw", at::kByte, 1);
  const int64_t size = packed_size(weight_type(type), rows, cols);
  check(rows > 0 && cols > 0 && size > 0, "type: a weight of ", rows, " x ", cols, " of type ", type, " has no product on the device");
  if (weight_type(type) <= WeightType::bf16) {
    check(raw.numel() == size, "raw must have ", size, " bytes, not ", raw.numel());
    return raw.clone();
  }
  const Tensor out = at::empty({size}, raw.options());
  must(pyserve_cuda_pack(type, raw.data_ptr<uint8_t>(), rows, cols, out.data_ptr<uint8_t>()), "packing");
  return out;
}

// --- programs

struct Started {  // a step
  Tensor picked;               // int32 [samples], once it is done
  const int32_t* in_pinned = nullptr;  // where they land, if the device picks them
  bool has_failed = false;
};

struct ProgramHolder : torch::CustomClassHolder {
  Program program;
  std::vector<Tensor> kept;  // until everything is on the device: what is uploaded once is known by its address
  std::deque<std::shared_ptr<Started>> started;  // and not yet collected
  std::shared_ptr<Started> latest;
  Steps steps;  // after the program, so that they end first

  ProgramHolder(const DevicePtr& device, int64_t max_tokens, int64_t max_samples)
      : program(device->context, max_tokens, max_samples), steps(device->context) {}

  PackedWeight weight(const Tensor& data, int64_t type, int64_t rows, int64_t cols) {
    check_tensor(data, "packed", at::kByte, 1);
    const int64_t wanted = packed_size(weight_type(type), rows, cols);
    check(rows > 0 && cols > 0 && wanted > 0, "weights: type ", type, " has no product on the device");
    check(data.numel() >= wanted, "packed must have ", wanted, " bytes, not ", data.numel());
    kept.push_back(data);
    return PackedWeight{weight_type(type), rows, cols, data.data_ptr<uint8_t>()};
  }
  const float* values(const MaybeTensor& tensor, const char* name, int64_t len) {
    if (!tensor.has_value()) return nullptr;
    kept.push_back(*tensor);
    const float* data = floats(*tensor, name, 1);
    check(tensor->size(0) == len, name, " must have ", len, " values, not ", tensor->size(0));
    return data;
  }
};
using ProgramPtr = c10::intrusive_ptr<ProgramHolder>;

AttentionShape attention_shape(const Shape& shape) { return {shape.at(0), shape.at(1), shape.at(2), shape.at(3)}; }

int64_t add_buffer(const ProgramPtr& self, int64_t width) { return self->program.buffer(width); }

void add_embed(const ProgramPtr& self, const Tensor& data, int64_t type, int64_t rows, int64_t cols, int64_t out, double scale) {
  self->program.embed(self->weight(data, type, rows, cols), out, static_cast<float>(scale));
}

void add_rms_norm(const ProgramPtr& self, int64_t x, const Tensor& factors, double eps, int64_t out) {
  const float* data = self->values(factors, "weight", factors.dim() == 1 ? factors.size(0) : -1);
  self->program.rms_norm(x, data, factors.size(0), static_cast<float>(eps), out);
}

void add_linear(const ProgramPtr& self, int64_t x, const std::vector<Tensor>& data, const std::vector<Shape>& shapes, const c10::List<MaybeTensor>& biases,
                int64_t out, bool accumulate) {
  check(shapes.size() == data.size() && biases.size() == data.size(), "biases must be as many as weights: ", data.size(), ", not ", biases.size());
  std::vector<PackedWeight> weights;
  std::vector<const float*> added;
  for (size_t i = 0; i < data.size(); ++i) {
    weights.push_back(self->weight(data[i], shapes[i].at(0), shapes[i].at(1), shapes[i].at(2)));
    added.push_back(self->values(biases.get(i), "bias", weights.back().rows));
  }
  self->program.linear(x, weights, added, out, accumulate);
}

void add_rope_kv_write(const ProgramPtr& self, int64_t qkv, const Shape& shape, const Tensor& cos, const Tensor& sin, bool is_interleaved,
                       const MaybeTensor& q_norm, const MaybeTensor& k_norm, double norm_eps) {
  const AttentionShape as = attention_shape(shape);
  const float* cosines = floats(cos, "cos", 2);
  const float* sines = floats(sin, "sin", 2);
  check(sin.sizes() == cos.sizes(), "sin must have the shape of cos");
  self->kept.insert(self->kept.end(), {cos, sin});
  const HeadNorm norm{self->values(q_norm, "q_norm", as.head_dim), self->values(k_norm, "k_norm", as.head_dim), static_cast<float>(norm_eps)};
  self->program.rope_kv_write(qkv, as, RopeTable{cosines, sines, cos.size(0), cos.size(1) * 2, is_interleaved}, norm);
}

void add_attention(const ProgramPtr& self, int64_t qkv, int64_t out, const Shape& shape, double scale, int64_t window, double softcap) {
  self->program.attention(qkv, out, attention_shape(shape), static_cast<float>(scale), window, static_cast<float>(softcap));
}

void add_gated_activation(const ProgramPtr& self, int64_t gate_up, int64_t out, int64_t kind) {
  check(kind == 0 || kind == 1, "kind: there is no activation ", kind);
  self->program.gated_activation(gate_up, out, static_cast<Activation>(kind));
}

void add_take_rows(const ProgramPtr& self, int64_t x, int64_t out) { self->program.take_rows(x, out); }

void set_logits(const ProgramPtr& self, int64_t x) { self->program.set_logits(x); }

void expect(const ProgramPtr& self, int64_t num_sequences, int64_t context_len) { self->program.expect(num_sequences, context_len); }

// bytes of weights, bytes to work in
Shape needs(const ProgramPtr& self) {
  const Program::Needs needs = self->program.needs();
  return {needs.weight_bytes, needs.work_bytes};
}

void upload(const ProgramPtr& self) {
  self->program.upload();
  self->kept.clear();
}

Batch batch_of(const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table, const Tensor& sample_rows) {
  const int64_t num_rows = tokens.dim() == 1 ? tokens.size(0) : -1;
  const StepRows rows{num_rows, ints(positions, "positions", 1), ints(sequences, "sequences", 1), ints(page_table, "page_table", 2), page_table.size(1)};
  const Batch batch{ints(tokens, "tokens", 1), rows, page_table.size(0), ints(sample_rows, "sample_rows", 1), sample_rows.size(0)};
  check(positions.size(0) == num_rows, "positions must have ", num_rows, " values, as tokens has, not ", positions.size(0));
  check(sequences.size(0) == num_rows, "sequences must have ", num_rows, " values, as tokens has, not ", sequences.size(0));
  return batch;
}

// Logits [num_samples, vocab] in pinned host memory: a view that the next run overwrites.
Tensor run_program(const ProgramPtr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                   const Tensor& sample_rows, const Tensor& kv) {
  const float* logits = self->program.run(batch_of(tokens, positions, sequences, page_table, sample_rows), pool_of(kv));
  const Shape shape{sample_rows.size(0), self->program.logits_width()};
  if (logits == nullptr) return at::empty(shape, at::kFloat);
  return at::from_blob(const_cast<float*>(logits), shape, [self](void*) {}, at::kFloat);
}

// The most probable token of each sample, int32 [num_samples].
Tensor run_greedy(const ProgramPtr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                  const Tensor& sample_rows, const Tensor& kv) {
  const int32_t* picked = self->program.run_greedy(batch_of(tokens, positions, sequences, page_table, sample_rows), pool_of(kv));
  Tensor out = at::empty({sample_rows.size(0)}, at::kInt);
  std::copy_n(picked, sample_rows.size(0), out.data_ptr<int32_t>());
  return out;
}

// --- steps that are started

struct Picking {  // how tokens are picked where the most probable ones will not do
  Tensor real, whole, bans;  // float32 [R, 3]: temperature, top_p, min_p; int64 [R, 3]: top_k, seed, position; int64 [n, 2]: sample row, token id

  bool is_greedy() const {
    const float* rows = real.const_data_ptr<float>();
    for (int64_t i = 0; i < real.size(0); ++i)
      if (rows[3 * i] > 0) return false;
    return bans.size(0) == 0;
  }
};

void check_picking(const Picking& picking, int64_t num_rows, int64_t width) {
  floats(picking.real, "real", 2);
  check_tensor(picking.whole, "whole", at::kLong, 2);
  check(picking.real.size(0) == num_rows && picking.real.size(1) == 3, "real must be [", num_rows, ", 3]");
  check(picking.whole.size(0) == num_rows && picking.whole.size(1) == 3, "whole must be [", num_rows, ", 3]");
  check_tensor(picking.bans, "bans", at::kLong, 2);
  check(picking.bans.size(1) == 2, "bans must be [n, 2]");
  const int64_t* banned = picking.bans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < picking.bans.size(0); ++i) {
    check(banned[2 * i] >= 0 && banned[2 * i] < num_rows, "bans: row ", banned[2 * i], " is not in the step");
    check(banned[2 * i + 1] >= 0 && banned[2 * i + 1] < width, "bans: id ", banned[2 * i + 1], " is not in the vocabulary");
  }
}

Samplers samplers_of(const Picking& picking) {
  Samplers samplers{picking.real.const_data_ptr<float>(), picking.whole.const_data_ptr<int64_t>(), {}};
  std::set<std::pair<int64_t, int64_t>> bans;  // each once
  const int64_t* banned = picking.bans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < picking.bans.size(0); ++i) bans.emplace(banned[2 * i], banned[2 * i + 1]);
  for (const auto& [row, token] : bans) samplers.changes.push_back({static_cast<int32_t>(row), static_cast<int32_t>(token), 0.f, 0.f, 1.f, 0.f, 0.f, 1});
  return samplers;
}

// The tokens of a step behind another: what that one picked, or, where the host does not know it, its places as -1 - i.
Tensor tokens_after(const Started& before, const Tensor& sources) {
  check(!before.has_failed, "the step before it failed");
  Tensor tokens = at::empty({sources.size(0)}, at::kInt);
  const int32_t* from = sources.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < sources.size(0); ++i)
    tokens.data_ptr<int32_t>()[i] = before.in_pinned != nullptr ? -1 - from[i] : before.picked.const_data_ptr<int32_t>()[from[i]];
  return tokens;
}

// As Program.start in pyserve/ops/program.py.
void start_program(const ProgramPtr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                   const Tensor& sample_rows, const Tensor& kv, const Tensor& real, const Tensor& whole, const Tensor& bans, const MaybeTensor& sources) {
  const int64_t num_samples = sample_rows.size(0), width = self->program.logits_width();
  const Picking picking{real, whole, bans};
  check_picking(picking, num_samples, width);
  const std::shared_ptr<Started> before = self->latest;
  if (sources.has_value()) {
    check(before != nullptr, "sources: no step was started before");
    check_range(ints(*sources, "sources", 1), sources->size(0), before->picked.size(0), "sources");
    check(sources->size(0) == positions.size(0), "sources must have ", positions.size(0), " values, as positions has, not ", sources->size(0));
  }
  auto step = std::make_shared<Started>(Started{at::empty({num_samples}, at::kInt)});
  Program* program = &self->program;
  const bool is_greedy = picking.is_greedy();
  const auto post = [=] {
    step->has_failed = true;  // unless it gets to the end
    const Tensor ids = sources.has_value() ? tokens_after(*before, *sources) : tokens;
    const bool follows = sources.has_value() && before->in_pinned != nullptr;
    const Batch batch = batch_of(ids, positions, sequences, page_table, sample_rows);
    step->in_pinned = is_greedy ? program->post_greedy(batch, pool_of(kv), follows) : program->post_drawn(batch, pool_of(kv), follows, samplers_of(picking));
    step->has_failed = false;
  };
  self->steps.start({post, nullptr});
  self->started.push_back(step);
  self->latest = step;
}

Tensor collect_program(const ProgramPtr& self) {
  std::shared_ptr<Started> step;
  if (!self->started.empty()) {
    step = self->started.front();
    self->started.pop_front();
  }
  self->steps.collect();
  if (step->in_pinned != nullptr) std::copy_n(step->in_pinned, step->picked.size(0), step->picked.data_ptr<int32_t>());
  return step->picked;
}

// graphs made, attempts that failed; and why the latest did
std::tuple<int64_t, int64_t, std::string> graph_counts(const ProgramPtr& self) {
  const Graphs::Counts counts = self->program.graph_counts();
  return {counts.num_recorded, counts.num_failed, self->program.graph_error()};
}

// --- copies

struct EventHolder : torch::CustomClassHolder {
  std::shared_ptr<CopyEvent> event;
  explicit EventHolder(std::shared_ptr<CopyEvent> event) : event(std::move(event)) {}
};
struct StreamHolder : torch::CustomClassHolder {
  std::shared_ptr<CopyStream> stream;
  explicit StreamHolder(const DevicePtr& device) : stream(std::make_shared<CopyStream>(device->context)) {}
};
using EventPtr = c10::intrusive_ptr<EventHolder>;
using StreamPtr = c10::intrusive_ptr<StreamHolder>;

EventPtr post_copy(const StreamPtr& self, const Tensor& pool, const Tensor& host, const Tensor& combs, bool to_host, const MaybeTensor& hashes) {
  check_on_device(pool, "pool");
  check(pool.dim() >= 1 && pool.size(0) > 0, "pool must be [pages, ...]");
  check_tensor(host, "host", at::kByte, 1);
  const int32_t* values = ints(combs, "combs", 2);
  check(combs.size(1) == 5, "combs must be [n, 5]: start_page, run_pages, stride_pages, count, list_offset");
  PageCopy copy{static_cast<uint8_t*>(pool.data_ptr()), pool.size(0), static_cast<int64_t>(pool.nbytes()) / pool.size(0), host.data_ptr<uint8_t>(),
                host.numel(), {}, to_host};
  for (int64_t i = 0; i < combs.size(0); ++i, values += 5) copy.combs.push_back(Comb{values[0], values[1], values[2], values[3], values[4]});
  if (hashes.has_value()) {
    check_tensor(*hashes, "hashes", at::kLong, 1);
    check(hashes->size(0) >= copy.host_bytes / copy.page_bytes, "hashes must have one value for each of the ", copy.host_bytes / copy.page_bytes,
          " pages of host, not ", hashes->size(0));
    copy.hashes = hashes->data_ptr<int64_t>();
  }
  auto kept = std::make_shared<std::tuple<Tensor, Tensor, MaybeTensor>>(pool, host, hashes);
  return c10::make_intrusive<EventHolder>(self->stream->post(copy, std::move(kept)));
}

// chunk_bytes, max_calls, min_batch_bytes
Shape calibrate(const StreamPtr& self, const Tensor& pool, int64_t limit_us) {
  check_on_device(pool, "pool");
  const CopyTuning found = self->stream->calibrate(pool.data_ptr(), pool.size(0), static_cast<int64_t>(pool.nbytes()) / pool.size(0), limit_us);
  return {found.chunk_bytes, found.max_calls, found.min_batch_bytes};
}

}  // namespace

TORCH_LIBRARY(pyserve_cuda, m) {
  m.def("num_devices() -> int", []() { return pyserve_cuda_num_devices(); });
  m.def("is_emulated() -> bool", []() { return pyserve_cuda_is_emulated() != 0; });
  m.def("pack(int type, Tensor raw, int rows, int cols) -> Tensor");
  m.def("is_pinned(Tensor memory) -> bool");

  m.class_<DeviceHolder>("Device")
      .def(torch::init([](int64_t index) { return Callable<&open_device>::call(index); }))
      .def("allocate", &Callable<&allocate>::call)
      .def("memory", &Callable<&device_memory>::call)
      .def("pinned", &Callable<&pinned>::call);
  m.class_<ProgramHolder>("Program")
      .def(torch::init<const DevicePtr&, int64_t, int64_t>())
      .def("buffer", &Callable<&add_buffer>::call)
      .def("embed", &Callable<&add_embed>::call)
      .def("rms_norm", &Callable<&add_rms_norm>::call)
      .def("linear", &Callable<&add_linear>::call)
      .def("rope_kv_write", &Callable<&add_rope_kv_write>::call)
      .def("attention", &Callable<&add_attention>::call)
      .def("gated_activation", &Callable<&add_gated_activation>::call)
      .def("take_rows", &Callable<&add_take_rows>::call)
      .def("set_logits", &Callable<&set_logits>::call)
      .def("expect", &Callable<&expect>::call)
      .def("needs", &Callable<&needs>::call)
      .def("upload", &Callable<&upload>::call)
      .def("start", &Callable<&start_program>::call)
      .def("fileno", [](const ProgramPtr& self) { return int64_t{self->steps.fileno()}; })
      .def("collect", &Callable<&collect_program>::call)
      .def("use_graphs", [](const ProgramPtr& self, bool are_used) { self->program.use_graphs(are_used); })
      .def("graph_counts", &Callable<&graph_counts>::call)
      .def("run", &Callable<&run_program>::call)
      .def("run_greedy", &Callable<&run_greedy>::call);
  m.class_<EventHolder>("CopyEvent")
      .def("query", [](const EventPtr& self) { return self->event->query(); })
      .def("wait", [](const EventPtr& self, std::optional<double> timeout_s) { return self->event->wait(timeout_s); })
      .def("is_mismatch", [](const EventPtr& self) { return self->event->is_mismatch(); })
      .def("copy_s", [](const EventPtr& self) { return self->event->copy_s(); });
  m.class_<StreamHolder>("CopyStream")
      .def(torch::init<const DevicePtr&>())
      .def("copy_pages", &Callable<&post_copy>::call)
      .def("calibrate", &Callable<&calibrate>::call)
      .def("num_outstanding", [](const StreamPtr& self) { return self->stream->num_outstanding(); })
      .def("close", [](const StreamPtr& self) { self->stream->close(); });
}

TORCH_LIBRARY_IMPL(pyserve_cuda, CPU, m) {
  m.impl("pack", &Callable<&pack>::call);
  m.impl("is_pinned", &Callable<&is_pinned>::call);
}

}  // namespace pyserve::cuda
