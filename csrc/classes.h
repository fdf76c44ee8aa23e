// torch.classes.pyserve.*: programs, and copies with their events and fences. Included by registration.cpp alone.
#pragma once
#include <torch/library.h>

#include "callable.h"
#include "cpu/driver.h"
#include "cpu/page_hash.h"
#include "cpu/program.h"
#include "cpu/stream.h"
#include "event_class.h"
#include "program_class.h"
#include "tensors.h"

namespace pyserve {
namespace {

// --- programs

Pool cpu_pool(const Tensor& kv) {
  check_on_cpu(kv, "kv");
  return pool_of(kv);
}

// Row i of `real` is (temperature, top_p, min_p), of `whole` (top_k, seed, position).
std::vector<SampleRow> sample_rows_of(const Tensor& real, const Tensor& whole) {
  const float* r = real.const_data_ptr<float>();
  const int64_t* w = whole.const_data_ptr<int64_t>();
  std::vector<SampleRow> rows;
  for (int64_t i = 0; i < real.size(0); ++i, r += 3, w += 3)
    rows.push_back({r[0], w[0], r[1], r[2], static_cast<uint64_t>(w[1]), static_cast<uint64_t>(w[2])});
  return rows;
}

struct CpuProgram : ProgramState {
  Program program;
  Driver steps;  // after the program, so that it ends first

  CpuProgram(int64_t max_tokens, int64_t max_samples, int64_t num_threads) : program(max_tokens, max_samples, static_cast<int>(num_threads)) {}

  PackedWeight weight(const Tensor& data, int64_t type, int64_t rows, int64_t cols) {
    kept.push_back(data);
    return packed_weight(data, type, rows, cols);
  }
  static Pool pool(const Tensor& kv) { return cpu_pool(kv); }

  void post(const Batch& batch, const Pool& pool, const Picking& picking, const std::vector<LogitChange>& changes, bool, Started& step) {
    auto* logits = const_cast<float*>(program.run(batch, pool));
    const int64_t width = program.logits_width();
    change_logits(logits, width, changes.data(), static_cast<int64_t>(changes.size()));
    if (batch.num_samples > 0) program.sample(logits, width, sample_rows_of(picking.real, picking.whole), step.picked.data_ptr<int32_t>());
  }
};
using ProgramPtr = c10::intrusive_ptr<CpuProgram>;

// [8 kinds, 2]: seconds of all members together in kernels of this kind, and waiting for what they need.
Tensor profile_program(const ProgramPtr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                       const Tensor& sample_rows, const Tensor& kv) {
  Program::Profile profile;
  self->program.run(batch_of(tokens, positions, sequences, page_table, sample_rows), cpu_pool(kv), &profile);
  Tensor out = at::empty({num_kinds, 2}, at::kDouble);
  for (int kind = 0; kind < num_kinds; ++kind) {
    out.data_ptr<double>()[2 * kind] = profile.kernel_s[kind];
    out.data_ptr<double>()[2 * kind + 1] = profile.wait_s[kind];
  }
  return out;
}

Tensor sample_program(const ProgramPtr& self, const Tensor& logits, const Tensor& real, const Tensor& whole) {
  const float* data = floats(logits, "logits", 2);
  check(logits.size(0) > 0 && logits.size(1) > 0, "logits must not be empty");
  check_samplers(real, whole, logits.size(0));
  Tensor tokens = at::empty({logits.size(0)}, logits.options().dtype(at::kInt));
  self->program.sample(data, logits.size(1), sample_rows_of(real, whole), tokens.data_ptr<int32_t>());
  return tokens;
}

// --- copies

struct FenceHolder : torch::CustomClassHolder {
  Fence fence;
};
struct StreamHolder : torch::CustomClassHolder {
  CopyStream stream;
  StreamHolder(double delay_ms, std::optional<int64_t> fail_after) : stream(delay_ms, fail_after) {}
};
using FencePtr = c10::intrusive_ptr<FenceHolder>;
using StreamPtr = c10::intrusive_ptr<StreamHolder>;

EventPtr<Event> post_copy(const StreamPtr& self, const Tensor& pool, const Tensor& host, const Tensor& combs, bool to_host,
                          const std::optional<FencePtr>& fence, const MaybeTensor& hashes) {
  check_on_cpu(pool, "pool");
  PageCopy copy = page_copy_of(pool, host, combs, to_host, hashes);
  const std::shared_ptr<Event> behind = fence ? (*fence)->fence.event() : nullptr;
  return c10::make_intrusive<EventHolder<Event>>(self->stream.post(std::move(copy), behind, kept_alive(pool, host, hashes)));
}

void hash_on_host(const StreamPtr&, const Tensor& host, const Tensor& hashes, int64_t page_bytes) {
  hash_pages(host, hashes, page_bytes, [](const uint8_t* page, int64_t num_bytes) {
    PageHash hash;
    hash.update(page, static_cast<size_t>(num_bytes));
    return hash.result();
  });
}

// --- all of them

void define_classes(torch::Library& m) {
  auto program = m.class_<CpuProgram>("Program").def(torch::init<int64_t, int64_t, int64_t>());
  ProgramClass<CpuProgram>::define(program);
  program.def("profile", &Callable<&profile_program>::call).def("sample", &Callable<&sample_program>::call);
  define_event<Event>(m);
  m.class_<FenceHolder>("Fence").def(torch::init<>()).def("signal", [](const FencePtr& self) { self->fence.signal(); });
  m.class_<StreamHolder>("CopyStream")
      .def(torch::init<double, std::optional<int64_t>>())
      .def("copy_pages", &Callable<&post_copy>::call)
      .def("hash_pages", &Callable<&hash_on_host>::call)
      .def("pause", [](const StreamPtr& self) { self->stream.pause(); })
      .def("resume", [](const StreamPtr& self) { self->stream.resume(); })
      .def("num_outstanding", [](const StreamPtr& self) { return self->stream.num_outstanding(); })
      .def("close", [](const StreamPtr& self) { self->stream.close(); });
}

}  // namespace
}  // namespace pyserve
