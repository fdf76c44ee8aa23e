// Every op's schema and every class, once: torch.ops.pyserve.* and torch.classes.pyserve.*. The only source that includes torch: it checks tensors, takes raw
// pointers and calls the kernels of ops.h. torch gives the GIL back around each of these calls, so a running program or a wait stops no Python thread.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <deque>

#include "callable.h"
#include "check.h"
#include "cpu/driver.h"
#include "cpu/isa.h"
#include "cpu/memory.h"
#include "cpu/page_runs.h"
#include "cpu/program.h"
#include "cpu/stream.h"
#include "ops.h"
#include "tensors.h"

namespace pyserve {
namespace {

// --- single ops. num_shares cuts the work as a team of that size would, one share after the other: results must not depend on it.

template <class Kernel>
void in_shares(int64_t num_shares, const Kernel& kernel) {
  check(num_shares > 0 && num_shares <= 4096, "num_shares must be in 1..4096, not ", num_shares);
  for (int i = 0; i < num_shares; ++i) kernel(Share{i, static_cast<int>(num_shares)});
}

Tensor pack_op(int64_t type, const Tensor& raw, int64_t rows, int64_t cols) {
  check_tensor(raw, "raw", at::kByte, 1);
  check(rows > 0 && cols > 0, "rows and cols must be positive");
  const WeightType as = weight_type(type);
  const size_t num_bytes = packed_bytes(as, rows, cols);
  const std::shared_ptr<uint8_t> memory = share_memory(num_bytes);
  const Tensor out = at::from_blob(memory.get(), {static_cast<int64_t>(num_bytes)}, [memory](void*) {}, raw.options());
  pack(as, raw.data_ptr<uint8_t>(), rows, cols, out.data_ptr<uint8_t>(), Share{0, 1});
  return out;
}

Tensor linear_op(const Tensor& x, const Tensor& packed, int64_t type, int64_t rows, int64_t cols, const MaybeTensor& bias, int64_t num_shares) {
  float* data = floats(x, "x", 2);
  check(x.size(1) == cols, "x must have ", cols, " columns, not ", x.size(1));
  const PackedWeight weight = packed_weight(packed, type, rows, cols);
  const float* added = floats_of_len(bias, "bias", rows);
  const int64_t num_rows = x.size(0), num_blocks = num_rows * cols / 32;
  const Tensor q8 = at::empty({num_rows * cols}, x.options().dtype(at::kChar)), scale = at::empty({num_blocks}, x.options());
  const Tensor sum = at::empty({num_blocks}, x.options().dtype(at::kInt)), out = at::empty({num_rows, rows}, x.options());
  Activations in{data, nullptr, nullptr, nullptr, cols};
  if (weight.type > WeightType::bf16) {
    check(cols % 32 == 0, "cols must be a multiple of 32 for a quantised weight, not ", cols);
    in = Activations{data, q8.data_ptr<int8_t>(), scale.data_ptr<float>(), sum.data_ptr<int32_t>(), cols};
    quantise(in, num_rows, Share{0, 1});
  }
  const Product product{weight, added};
  in_shares(num_shares, [&](Share share) { linear(&product, 1, in, out.data_ptr<float>(), rows, num_rows, false, share); });
  return out;
}

Tensor embed_op(const Tensor& tokens, const Tensor& packed, int64_t type, int64_t rows, int64_t cols, double scale) {
  const int32_t* ids = ints(tokens, "tokens", 1);
  check_range(ids, tokens.size(0), rows, "tokens");
  const Tensor out = at::empty({tokens.size(0), cols}, tokens.options().dtype(at::kFloat));
  embed(packed_weight(packed, type, rows, cols), ids, tokens.size(0), static_cast<float>(scale), out.data_ptr<float>(), Share{0, 1});
  return out;
}

Activations plain(const Tensor& out) { return Activations{out.data_ptr<float>(), nullptr, nullptr, nullptr, out.size(1)}; }

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  const float* data = floats(x, "x", 2);
  const float* factors = floats_of_len(weight, "weight", x.size(1));
  const Tensor out = at::empty(x.sizes(), x.options());
  rms_norm(data, factors, static_cast<float>(eps), plain(out), x.size(0), Share{0, 1});
  return out;
}

Tensor gated_activation_op(const Tensor& gate_up, int64_t kind) {
  const float* data = floats(gate_up, "gate_up", 2);
  check(gate_up.size(1) % 2 == 0, "gate_up must have an even number of columns, not ", gate_up.size(1));
  const Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  gated_activation(activation_of(kind), data, plain(out), gate_up.size(0), Share{0, 1});
  return out;
}

struct Paged {  // what the two ops over the pool check alike
  Pool pool;
  StepRows rows;
  float* qkv;

  Paged(const Tensor& qkv_tensor, int64_t num_heads, const Tensor& kv, int64_t layer, const Tensor& positions, const Tensor& sequences,
        const Tensor& page_table, int64_t max_positions)
      : pool(pool_of(kv)), rows(step_rows(positions, sequences, page_table)), qkv(floats(qkv_tensor, "qkv", 2)) {
    check_attention_shape({layer, num_heads, pool.num_kv_heads, pool.head_dim});
    check(layer < pool.num_layers, "layer must be in 0..", pool.num_layers - 1, ", not ", layer);
    const int64_t width = (num_heads + 2 * pool.num_kv_heads) * pool.head_dim;
    check(qkv_tensor.size(0) == rows.num_rows && qkv_tensor.size(1) == width, "qkv must be [", rows.num_rows, ", ", width, "]");
    check_step_rows(rows, page_table.size(0), max_positions, pool);
  }
};

void rope_kv_write_op(const Tensor& qkv, int64_t num_heads, const Tensor& cos, const Tensor& sin, bool is_interleaved, const MaybeTensor& q_norm,
                      const MaybeTensor& k_norm, double norm_eps, const Tensor& kv, int64_t layer, const Tensor& positions, const Tensor& sequences,
                      const Tensor& page_table, int64_t num_shares) {
  const RopeTable rope = rope_table(cos, sin, is_interleaved);
  const Paged paged(qkv, num_heads, kv, layer, positions, sequences, page_table, rope.max_positions);
  check(rope.rotary_dim > 0 && rope.rotary_dim <= paged.pool.head_dim, "cos must have at most head_dim / 2 columns, not ", cos.size(1));
  const HeadNorm norm{floats_of_len(q_norm, "q_norm", paged.pool.head_dim), floats_of_len(k_norm, "k_norm", paged.pool.head_dim),
                      static_cast<float>(norm_eps)};
  in_shares(num_shares, [&](Share share) { rope_kv_write(paged.qkv, num_heads, rope, norm, paged.pool, layer, paged.rows, share); });
}

Tensor attention_op(const Tensor& qkv, int64_t num_heads, const Tensor& kv, int64_t layer, double scale, double softcap, int64_t window,
                    const Tensor& positions, const Tensor& sequences, const Tensor& page_table, int64_t num_shares) {
  const Paged paged(qkv, num_heads, kv, layer, positions, sequences, page_table, INT32_MAX);
  check(window >= 0, "window must not be negative");
  check(softcap >= 0, "softcap must not be negative");
  const Tensor out = at::empty({paged.rows.num_rows, num_heads * paged.pool.head_dim}, qkv.options());
  const AttentionSpec spec{num_heads, layer, static_cast<float>(scale), static_cast<float>(softcap), window};
  const auto workspace_bytes = static_cast<int64_t>(attention_workspace_bytes(num_heads, paged.pool, paged.rows, static_cast<int>(num_shares)));
  const Tensor workspace = at::empty({workspace_bytes}, qkv.options().dtype(at::kByte)).zero_();
  in_shares(num_shares, [&](Share share) { attention(paged.qkv, spec, paged.pool, paged.rows, plain(out), workspace.data_ptr<uint8_t>(), share); });
  return out;
}

void page_copy_op(const Tensor& pool, const Tensor& host, const Tensor& combs, bool to_host) {
  const PageCopy copy = page_copy_of(pool, host, combs, to_host);
  check_copy(copy);
  page_copy(copy);
}

Tensor comb_table_op(const Tensor& pages, int64_t first_offset) {
  check(pages.dim() == 1 && pages.scalar_type() == at::kInt && pages.is_contiguous(), "pages must be int32 [n], contiguous");
  check(first_offset >= 0, "first_offset must not be negative");
  const std::vector<Comb> combs = combs_of(pages.data_ptr<int32_t>(), pages.numel(), first_offset);
  const Tensor table = at::empty({static_cast<int64_t>(combs.size()), 5}, pages.options());
  int32_t* row = table.data_ptr<int32_t>();
  for (const Comb& comb : combs) {
    for (int64_t value : {comb.start_page, comb.run_pages, comb.stride_pages, comb.count, comb.list_offset}) *row++ = static_cast<int32_t>(value);
  }
  return table;
}

int64_t sample_row_op(const Tensor& logits, double temperature, int64_t top_k, double top_p, double min_p, int64_t seed, int64_t position) {
  const float* data = floats(logits, "logits", 1);
  check(logits.size(0) > 0, "logits must not be empty");
  const Tensor scratch = at::empty({2 * logits.size(0)}, logits.options());
  const SampleRow row{static_cast<float>(temperature), top_k, static_cast<float>(top_p), static_cast<float>(min_p), static_cast<uint64_t>(seed),
                      static_cast<uint64_t>(position)};
  return sample_row(data, logits.size(0), row, scratch.data_ptr<float>());
}

std::string isa_op() { return isa_name(isa()); }

// --- classes

struct Started {  // a step in the driver's hands
  Tensor picked;  // int32 [samples], once it is done
  bool is_done = false;
};

struct ProgramHolder : torch::CustomClassHolder {
  Program program;
  std::vector<Tensor> kept;  // what the program points into
  std::deque<std::shared_ptr<Started>> started;  // and not yet collected
  std::shared_ptr<Started> latest;
  Driver driver;  // after the program, so that it ends first

  ProgramHolder(int64_t max_tokens, int64_t max_samples, int64_t num_threads) : program(max_tokens, max_samples, static_cast<int>(num_threads)) {}

  PackedWeight weight(const Tensor& data, int64_t type, int64_t rows, int64_t cols) {
    kept.push_back(data);
    return packed_weight(data, type, rows, cols);
  }
  const float* values(const MaybeTensor& tensor, const char* name, int64_t len) {
    if (tensor.has_value()) kept.push_back(*tensor);
    return floats_of_len(tensor, name, len);
  }
};

using ProgramPtr = c10::intrusive_ptr<ProgramHolder>;
using Shape = std::vector<int64_t>;

AttentionShape attention_shape(const Shape& shape) { return {shape.at(0), shape.at(1), shape.at(2), shape.at(3)}; }

int64_t add_buffer(const ProgramPtr& self, int64_t width) { return self->program.buffer(width); }

void add_embed(const ProgramPtr& self, const Tensor& data, int64_t type, int64_t rows, int64_t cols, int64_t out, double scale) {
  self->program.embed(self->weight(data, type, rows, cols), out, static_cast<float>(scale));
}

void add_rms_norm(const ProgramPtr& self, int64_t x, const Tensor& factors, double eps, int64_t out) {
  const float* data = floats(factors, "weight", 1);
  self->kept.push_back(factors);
  self->program.rms_norm(x, data, factors.size(0), static_cast<float>(eps), out);
}

// One row [type, rows, cols] of `shapes` for each weight.
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
  const RopeTable rope = rope_table(cos, sin, is_interleaved);
  self->kept.insert(self->kept.end(), {cos, sin});
  const HeadNorm norm{self->values(q_norm, "q_norm", as.head_dim), self->values(k_norm, "k_norm", as.head_dim), static_cast<float>(norm_eps)};
  self->program.rope_kv_write(qkv, as, rope, norm);
}

void add_attention(const ProgramPtr& self, int64_t qkv, int64_t out, const Shape& shape, double scale, int64_t window, double softcap) {
  self->program.attention(qkv, out, attention_shape(shape), static_cast<float>(scale), window, static_cast<float>(softcap));
}

void add_gated_activation(const ProgramPtr& self, int64_t gate_up, int64_t out, int64_t kind) {
  self->program.gated_activation(gate_up, out, activation_of(kind));
}

void add_take_rows(const ProgramPtr& self, int64_t x, int64_t out) { self->program.take_rows(x, out); }

void set_logits(const ProgramPtr& self, int64_t x) { self->program.set_logits(x); }

// Logits [num_samples, vocab]: a view of the program's register, which lives as long as the view.
Tensor run_program(const ProgramPtr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                   const Tensor& sample_rows, const Tensor& kv) {
  const int32_t* ids = ints(tokens, "tokens", 1);
  const int32_t* samples = ints(sample_rows, "sample_rows", 1);
  const Batch batch{ids, step_rows(positions, sequences, page_table), page_table.size(0), samples, sample_rows.size(0)};
  check(tokens.size(0) == batch.rows.num_rows, "positions must have ", tokens.size(0), " values, as tokens has, not ", batch.rows.num_rows);
  const float* logits = self->program.run(batch, pool_of(kv));
  return at::from_blob(const_cast<float*>(logits), {batch.num_samples, self->program.logits_width()}, [self](void*) {}, at::kFloat);
}

// [8 kinds, 2]: seconds of all members together in kernels of this kind, and waiting for what they need.
Tensor profile_program(const ProgramPtr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                       const Tensor& sample_rows, const Tensor& kv) {
  const Batch batch{ints(tokens, "tokens", 1), step_rows(positions, sequences, page_table), page_table.size(0), ints(sample_rows, "sample_rows", 1),
                    sample_rows.size(0)};
  check(tokens.size(0) == batch.rows.num_rows, "positions must have ", tokens.size(0), " values, as tokens has, not ", batch.rows.num_rows);
  Program::Profile profile;
  self->program.run(batch, pool_of(kv), &profile);
  Tensor out = at::empty({num_kinds, 2}, at::kDouble);
  for (int kind = 0; kind < num_kinds; ++kind) {
    out.data_ptr<double>()[2 * kind] = profile.kernel_s[kind];
    out.data_ptr<double>()[2 * kind + 1] = profile.wait_s[kind];
  }
  return out;
}

// Row i of `real` is (temperature, top_p, min_p), of `whole` (top_k, seed, position).
std::vector<SampleRow> sample_rows_of(const Tensor& real, const Tensor& whole, int64_t num_rows) {
  const float* r = floats(real, "real", 2);
  check_tensor(whole, "whole", at::kLong, 2);
  check(real.size(0) == num_rows && real.size(1) == 3, "real must be [", num_rows, ", 3]");
  check(whole.size(0) == num_rows && whole.size(1) == 3, "whole must be [", num_rows, ", 3]");
  const int64_t* w = whole.data_ptr<int64_t>();
  std::vector<SampleRow> rows;
  for (int64_t i = 0; i < num_rows; ++i, r += 3, w += 3)
    rows.push_back({r[0], w[0], r[1], r[2], static_cast<uint64_t>(w[1]), static_cast<uint64_t>(w[2])});
  return rows;
}

Tensor sample_program(const ProgramPtr& self, const Tensor& logits, const Tensor& real, const Tensor& whole) {
  const float* data = floats(logits, "logits", 2);
  check(logits.size(0) > 0 && logits.size(1) > 0, "logits must not be empty");
  const std::vector<SampleRow> rows = sample_rows_of(real, whole, logits.size(0));
  Tensor tokens = at::empty({logits.size(0)}, logits.options().dtype(at::kInt));
  self->program.sample(data, logits.size(1), rows, tokens.data_ptr<int32_t>());
  return tokens;
}

// The tokens of a step that follows another: row i's is the one that the step before picked for its sample row sources[i].
Tensor tokens_after(const Started& before, const Tensor& sources) {
  check(before.is_done, "the step before it failed");
  const int32_t* from = ints(sources, "sources", 1);
  check_range(from, sources.size(0), before.picked.size(0), "sources");
  Tensor tokens = at::empty_like(sources);
  for (int64_t i = 0; i < sources.size(0); ++i) tokens.data_ptr<int32_t>()[i] = before.picked.const_data_ptr<int32_t>()[from[i]];
  return tokens;
}

// run and sample in the driver's thread. `bans` int64 [n, 2]: (row, id) of logits that become minus infinity first. With `sources` the tokens are those that the
// step started before this one picks.
void start_program(const ProgramPtr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                   const Tensor& sample_rows, const Tensor& kv, const Tensor& real, const Tensor& whole, const Tensor& bans, const MaybeTensor& sources) {
  const int64_t num_rows = sample_rows.size(0), width = self->program.logits_width();
  std::vector<SampleRow> rows = sample_rows_of(real, whole, num_rows);
  check_tensor(bans, "bans", at::kLong, 2);
  check(bans.size(1) == 2, "bans must be [n, 2]");
  const int64_t* banned = bans.data_ptr<int64_t>();
  for (int64_t i = 0; i < bans.size(0); ++i) {
    check(banned[2 * i] >= 0 && banned[2 * i] < num_rows, "bans: row ", banned[2 * i], " is not in the step");
    check(banned[2 * i + 1] >= 0 && banned[2 * i + 1] < width, "bans: id ", banned[2 * i + 1], " is not in the vocabulary");
  }
  const std::shared_ptr<Started> before = self->latest;
  check(!sources.has_value() || before != nullptr, "sources: no step was started before");
  auto started = std::make_shared<Started>(Started{at::empty({num_rows}, at::kInt)});
  self->driver.start([=, program = &self->program, rows = std::move(rows)] {
    const Tensor ids = sources.has_value() ? tokens_after(*before, *sources) : tokens;
    const Batch batch{ints(ids, "tokens", 1), step_rows(positions, sequences, page_table), page_table.size(0), ints(sample_rows, "sample_rows", 1), num_rows};
    check(ids.size(0) == batch.rows.num_rows, "positions must have ", ids.size(0), " values, as tokens has, not ", batch.rows.num_rows);
    auto* logits = const_cast<float*>(program->run(batch, pool_of(kv)));
    for (int64_t i = 0; i < bans.size(0); ++i) logits[banned[2 * i] * width + banned[2 * i + 1]] = -std::numeric_limits<float>::infinity();
    if (num_rows > 0) program->sample(logits, width, rows, started->picked.data_ptr<int32_t>());
    started->is_done = true;
  });
  self->started.push_back(started);
  self->latest = started;
}

Tensor collect_program(const ProgramPtr& self) {
  std::shared_ptr<Started> oldest;
  if (!self->started.empty()) {
    oldest = self->started.front();
    self->started.pop_front();
  }
  self->driver.collect();
  return oldest->picked;
}

int64_t fileno_program(const ProgramPtr& self) { return self->driver.fileno(); }

struct EventHolder : torch::CustomClassHolder {
  std::shared_ptr<Event> event;
  explicit EventHolder(std::shared_ptr<Event> event) : event(std::move(event)) {}
};

struct FenceHolder : torch::CustomClassHolder {
  Fence fence;
};

struct StreamHolder : torch::CustomClassHolder {
  CopyStream stream;
  StreamHolder(double delay_ms, std::optional<int64_t> fail_after) : stream(delay_ms, fail_after) {}
};

using EventPtr = c10::intrusive_ptr<EventHolder>;
using FencePtr = c10::intrusive_ptr<FenceHolder>;
using StreamPtr = c10::intrusive_ptr<StreamHolder>;

EventPtr post_copy(const StreamPtr& self, const Tensor& pool, const Tensor& host, const Tensor& combs, bool to_host, const std::optional<FencePtr>& fence,
                   const MaybeTensor& hashes) {
  PageCopy copy = page_copy_of(pool, host, combs, to_host);
  if (hashes.has_value()) {
    check_tensor(*hashes, "hashes", at::kLong, 1);
    check(hashes->size(0) >= copy.host_bytes / copy.page_bytes, "hashes must have one value for each of the ", copy.host_bytes / copy.page_bytes,
          " pages of host, not ", hashes->size(0));
    copy.hashes = hashes->data_ptr<int64_t>();
  }
  auto kept = std::make_shared<std::tuple<Tensor, Tensor, MaybeTensor>>(pool, host, hashes);
  return c10::make_intrusive<EventHolder>(self->stream.post(std::move(copy), fence ? (*fence)->fence.event() : nullptr, std::move(kept)));
}

}  // namespace

TORCH_LIBRARY(pyserve, m) {
  m.def("pack(int type, Tensor raw, int rows, int cols) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int type, int rows, int cols, Tensor? bias=None, int num_shares=1) -> Tensor");
  m.def("embed(Tensor tokens, Tensor packed, int type, int rows, int cols, float scale=1.0) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("gated_activation(Tensor gate_up, int kind) -> Tensor");
  m.def(
      "rope_kv_write(Tensor(a!) qkv, int num_heads, Tensor cos, Tensor sin, bool is_interleaved, Tensor? q_norm, Tensor? k_norm, float norm_eps, "
      "Tensor(b!) kv, int layer, Tensor positions, Tensor sequences, Tensor page_table, int num_shares=1) -> ()");
  m.def(
      "attention(Tensor qkv, int num_heads, Tensor kv, int layer, float scale, float softcap, int window, Tensor positions, Tensor sequences, "
      "Tensor page_table, int num_shares=1) -> Tensor");
  m.def("page_copy(Tensor(a!) pool, Tensor(b!) host, Tensor combs, bool to_host) -> ()");
  m.def("comb_table(Tensor pages, int first_offset) -> Tensor");
  m.def("sample_row(Tensor logits, float temperature, int top_k, float top_p, float min_p, int seed, int position) -> int");
  m.def("isa() -> str", &Callable<&isa_op>::call);

  m.class_<ProgramHolder>("Program")
      .def(torch::init<int64_t, int64_t, int64_t>())
      .def("buffer", &Callable<&add_buffer>::call)
      .def("embed", &Callable<&add_embed>::call)
      .def("rms_norm", &Callable<&add_rms_norm>::call)
      .def("linear", &Callable<&add_linear>::call)
      .def("rope_kv_write", &Callable<&add_rope_kv_write>::call)
      .def("attention", &Callable<&add_attention>::call)
      .def("gated_activation", &Callable<&add_gated_activation>::call)
      .def("take_rows", &Callable<&add_take_rows>::call)
      .def("set_logits", &Callable<&set_logits>::call)
      .def("run", &Callable<&run_program>::call)
      .def("profile", &Callable<&profile_program>::call)
      .def("sample", &Callable<&sample_program>::call)
      .def("start", &Callable<&start_program>::call)
      .def("collect", &Callable<&collect_program>::call)
      .def("fileno", &Callable<&fileno_program>::call);

  m.class_<EventHolder>("CopyEvent")
      .def("query", [](const EventPtr& self) { return self->event->query(); })
      .def("wait", [](const EventPtr& self, std::optional<double> timeout_s) { return self->event->wait(timeout_s); })
      .def("is_mismatch", [](const EventPtr& self) { return self->event->is_mismatch(); })
      .def("copy_s", [](const EventPtr& self) { return self->event->copy_s(); });
  m.class_<FenceHolder>("Fence").def(torch::init<>()).def("signal", [](const FencePtr& self) { self->fence.signal(); });
  m.class_<StreamHolder>("CopyStream")
      .def(torch::init<double, std::optional<int64_t>>())
      .def("copy_pages", &Callable<&post_copy>::call)
      .def("pause", [](const StreamPtr& self) { self->stream.pause(); })
      .def("resume", [](const StreamPtr& self) { self->stream.resume(); })
      .def("num_outstanding", [](const StreamPtr& self) { return self->stream.num_outstanding(); })
      .def("close", [](const StreamPtr& self) { self->stream.close(); });
}

TORCH_LIBRARY_IMPL(pyserve, CPU, m) {
  m.impl("pack", &Callable<&pack_op>::call);
  m.impl("linear", &Callable<&linear_op>::call);
  m.impl("embed", &Callable<&embed_op>::call);
  m.impl("rms_norm", &Callable<&rms_norm_op>::call);
  m.impl("gated_activation", &Callable<&gated_activation_op>::call);
  m.impl("rope_kv_write", &Callable<&rope_kv_write_op>::call);
  m.impl("attention", &Callable<&attention_op>::call);
  m.impl("page_copy", &Callable<&page_copy_op>::call);
  m.impl("comb_table", &Callable<&comb_table_op>::call);
  m.impl("sample_row", &Callable<&sample_row_op>::call);
}

}  // namespace pyserve
