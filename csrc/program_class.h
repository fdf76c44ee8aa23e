// The class torch.classes.pyserve.Program, and pyserve_cuda's, as far as they are the same: the instructions, a run, and steps that are started.
//
// Their state derives from ProgramState and has `program`, a recorder.h's Recorder with `run`, and `steps`, which runs what it is given one after the other (cpu/driver.h,
// cuda/steps.h). It says what a weight and a pool are on its device, and how a step is posted:
//
//     PackedWeight weight(const Tensor& data, int64_t type, int64_t rows, int64_t cols);  // kept
//     static Pool pool(const Tensor& kv);
//     void post(const Batch& batch, const Pool& pool, const Picking& picking, const std::vector<LogitChange>& changes, bool follows, Started& step);
#pragma once
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <memory>

#include "callable.h"
#include "picking.h"
#include "tensors.h"

namespace pyserve {

struct Started {  // a step
  Tensor picked;                       // int32 [samples], once they are known
  const int32_t* in_pinned = nullptr;  // where they land when the device is done, if it picks them
  bool is_done = false;                // posted, on a device
};

// The tokens of a step behind another: what that one picked, or, where the host does not know it, its places as -1 - i. Where the source is -1 the one that is
// `known`. Behind a row that was broken any token will do: nobody wants what comes of it.
inline Tensor tokens_after(const Started& before, const Tensor& sources, const Tensor& known) {
  check(before.is_done, "the step before it failed");
  Tensor tokens = known.clone();
  const int32_t *from = sources.const_data_ptr<int32_t>(), *picked = before.in_pinned != nullptr ? nullptr : before.picked.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < sources.size(0); ++i)
    if (from[i] >= 0) tokens.data_ptr<int32_t>()[i] = picked == nullptr ? -1 - from[i] : std::max(picked[from[i]], 0);
  return tokens;
}

inline void check_sources(const Tensor& sources, const Tensor& tokens, int64_t num_picked) {
  const int32_t *from = ints(sources, "sources", 1), *known = ints(tokens, "tokens", 1);
  check(sources.size(0) == tokens.size(0), "sources must be as many as tokens: ", tokens.size(0), ", not ", sources.size(0));
  for (int64_t i = 0; i < sources.size(0); ++i) {
    check(from[i] >= -1 && from[i] < num_picked, "sources[", i, "] is ", from[i], ": must be in -1..", num_picked - 1);
    check(from[i] >= 0 || known[i] >= 0, "tokens[", i, "] is ", known[i], ": must not be negative");
  }
}

struct ProgramState : torch::CustomClassHolder {
  std::vector<Tensor> kept;                      // what the program points into
  std::deque<std::shared_ptr<Started>> started;  // and not yet collected
  std::shared_ptr<Started> latest;

  const float* values(const MaybeTensor& tensor, const char* name, int64_t len) {
    if (tensor.has_value()) kept.push_back(*tensor);
    return floats_of_len(tensor, name, len);
  }
};

template <class State>
struct ProgramClass {
  using Ptr = c10::intrusive_ptr<State>;

  static AttentionShape attention_shape(const Shape& shape) { return {shape.at(0), shape.at(1), shape.at(2), shape.at(3)}; }

  static int64_t buffer(const Ptr& self, int64_t width) { return self->program.buffer(width); }

  static void embed(const Ptr& self, const Tensor& data, int64_t type, int64_t rows, int64_t cols, int64_t out, double scale) {
    self->program.embed(self->weight(data, type, rows, cols), out, static_cast<float>(scale));
  }

  static void rms_norm(const Ptr& self, int64_t x, const Tensor& factors, double eps, int64_t out) {
    const float* data = floats(factors, "weight", 1);
    self->kept.push_back(factors);
    self->program.rms_norm(x, data, factors.size(0), static_cast<float>(eps), out);
  }

  // One row [type, rows, cols] of `shapes` for each weight.
  static void linear(const Ptr& self, int64_t x, const std::vector<Tensor>& data, const std::vector<Shape>& shapes, const c10::List<MaybeTensor>& biases,
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

  static void rope_kv_write(const Ptr& self, int64_t qkv, const Shape& shape, const Tensor& cos, const Tensor& sin, bool is_interleaved,
                            const MaybeTensor& q_norm, const MaybeTensor& k_norm, double norm_eps) {
    const AttentionShape as = attention_shape(shape);
    const RopeTable rope = rope_table(cos, sin, is_interleaved);
    self->kept.insert(self->kept.end(), {cos, sin});
    const HeadNorm norm{self->values(q_norm, "q_norm", as.head_dim), self->values(k_norm, "k_norm", as.head_dim), static_cast<float>(norm_eps)};
    self->program.rope_kv_write(qkv, as, rope, norm);
  }

  static void attention(const Ptr& self, int64_t qkv, int64_t out, const Shape& shape, double scale, int64_t window, double softcap) {
    self->program.attention(qkv, out, attention_shape(shape), static_cast<float>(scale), window, static_cast<float>(softcap));
  }

  static void gated_activation(const Ptr& self, int64_t gate_up, int64_t out, int64_t kind) {
    self->program.gated_activation(gate_up, out, activation_of(kind));
  }

  static void take_rows(const Ptr& self, int64_t x, int64_t out) { self->program.take_rows(x, out); }

  static void set_logits(const Ptr& self, int64_t x) { self->program.set_logits(x); }

  // Logits [num_samples, vocab]: a view of the program's memory, which lives as long as the view; the next run overwrites it.
  static Tensor run(const Ptr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                    const Tensor& sample_rows, const Tensor& kv) {
    const float* logits = self->program.run(batch_of(tokens, positions, sequences, page_table, sample_rows), State::pool(kv));
    const Shape shape{sample_rows.size(0), self->program.logits_width()};
    if (logits == nullptr) return at::empty(shape, at::kFloat);
    return at::from_blob(const_cast<float*>(logits), shape, [self](void*) {}, at::kFloat);
  }

  // As Program.start in pyserve/ops/program.py.
  static void start(const Ptr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                    const Tensor& sample_rows, const Tensor& kv, const Tensor& real, const Tensor& whole, const Tensor& bans, const MaybeTensor& sources,
                    const std::vector<Tensor>& weighing) {
    check(weighing.empty() || weighing.size() == 3, "weighing must be penalties, places and values, or nothing");
    const bool is_weighed = !weighing.empty();
    const Picking picking = is_weighed ? Picking{real, whole, bans, weighing[0], weighing[1], weighing[2]} : Picking{real, whole, bans, {}, {}, {}};
    check_picking(picking, sample_rows.size(0), self->program.logits_width());
    const std::shared_ptr<Started> before = self->latest;
    if (sources.has_value()) {
      check(before != nullptr, "sources: no step was started before");
      check_sources(*sources, tokens, before->picked.size(0));
    }
    auto step = std::make_shared<Started>(Started{at::empty({sample_rows.size(0)}, at::kInt)});
    self->steps.start([=, state = self.get()] {  // which waits for its steps before it goes
      const Tensor ids = sources.has_value() ? tokens_after(*before, *sources, tokens) : tokens;
      const bool follows = sources.has_value() && before->in_pinned != nullptr;
      const Batch batch = batch_of(ids, positions, sequences, page_table, sample_rows);
      state->post(batch, State::pool(kv), picking, changes_of(picking, batch, sources.has_value()), follows, *step);
      step->is_done = true;
    });
    self->started.push_back(step);
    self->latest = step;
  }

  static Tensor collect(const Ptr& self) {
    std::shared_ptr<Started> oldest;
    if (!self->started.empty()) {
      oldest = self->started.front();
      self->started.pop_front();
    }
    self->steps.collect();
    if (oldest->in_pinned != nullptr) std::copy_n(oldest->in_pinned, oldest->picked.size(0), oldest->picked.template data_ptr<int32_t>());
    return oldest->picked;
  }

  static int64_t fileno(const Ptr& self) { return self->steps.fileno(); }

  template <class Class>
  static void define(Class& program) {
    program.def("buffer", &Callable<&buffer>::call)
        .def("embed", &Callable<&embed>::call)
        .def("rms_norm", &Callable<&rms_norm>::call)
        .def("linear", &Callable<&linear>::call)
        .def("rope_kv_write", &Callable<&rope_kv_write>::call)
        .def("attention", &Callable<&attention>::call)
        .def("gated_activation", &Callable<&gated_activation>::call)
        .def("take_rows", &Callable<&take_rows>::call)
        .def("set_logits", &Callable<&set_logits>::call)
        .def("run", &Callable<&run>::call)
        .def("start", &Callable<&start>::call)
        .def("collect", &Callable<&collect>::call)
        .def("fileno", &Callable<&fileno>::call);
  }
};

}  // namespace pyserve
