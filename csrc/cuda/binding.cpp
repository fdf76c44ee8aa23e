// torch.ops.pyserve_cuda.* and torch.classes.pyserve_cuda.*: the CUDA backend for Python. The only file of csrc/cuda that includes torch, and no CUDA header.
//
// The same binding serves nvcc's build and the emulated one of tests/cuda; there, memory of the device is the host's and the pool is a CPU tensor. torch gives
// the GIL back around each of these calls.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <utility>

#include "../callable.h"
#include "../event_class.h"
#include "../program_class.h"
#include "../tensors.h"
#include "copies.h"
#include "host_hash.h"
#include "program.h"
#include "steps.h"

namespace pyserve::cuda {
namespace {

void check_on_device(const Tensor& tensor, const char* name) {
  const bool is_there = tensor.defined() && (pyserve_cuda_is_emulated() ? tensor.device().is_cpu() : tensor.device().is_cuda());
  check(is_there, name, " must be on the CUDA device");
  check(tensor.is_contiguous(), name, " must be contiguous");
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

struct CudaProgram : ProgramState {  // what is kept: until everything is on the device, since what is uploaded once is known by its address
  Program program;
  Steps steps;  // after the program, so that they end first

  CudaProgram(const DevicePtr& device, int64_t max_tokens, int64_t max_samples)
      : program(device->context, max_tokens, max_samples), steps(device->context) {}

  PackedWeight weight(const Tensor& data, int64_t type, int64_t rows, int64_t cols) {
    check_tensor(data, "packed", at::kByte, 1);
    const int64_t wanted = packed_size(weight_type(type), rows, cols);
    check(rows > 0 && cols > 0 && wanted > 0, "weights: type ", type, " has no product on the device");
    check(data.numel() >= wanted, "packed must have ", wanted, " bytes, not ", data.numel());
    kept.push_back(data);
    return PackedWeight{weight_type(type), rows, cols, data.data_ptr<uint8_t>()};
  }
  static Pool pool(const Tensor& kv) {
    check_on_device(kv, "kv");
    return pool_of(kv);
  }

  void post(const Batch& batch, const Pool& pool, const Picking& picking, const std::vector<LogitChange>& changes, bool follows, Started& step) {
    const Samplers samplers{picking.real.const_data_ptr<float>(), picking.whole.const_data_ptr<int64_t>(), changes};
    const bool is_greedy = changes.empty() && !is_any_drawn(picking.real);
    step.in_pinned = is_greedy ? program.post_greedy(batch, pool, follows) : program.post_drawn(batch, pool, follows, samplers);
  }

 private:
  static bool is_any_drawn(const Tensor& real) {
    const float* row = real.const_data_ptr<float>();
    for (int64_t i = 0; i < real.size(0); ++i)
      if (row[3 * i] > 0) return true;
    return false;
  }
};
using ProgramPtr = c10::intrusive_ptr<CudaProgram>;

void expect(const ProgramPtr& self, int64_t num_sequences, int64_t num_pages, int64_t page_size) {
  self->program.expect(num_sequences, num_pages, page_size);
}

// bytes of weights, bytes to work in
Shape needs(const ProgramPtr& self) {
  const Program::Needs needs = self->program.needs();
  return {needs.weight_bytes, needs.work_bytes};
}

void upload(const ProgramPtr& self) {
  self->program.upload();
  self->kept.clear();
}

// The most probable token of each sample, int32 [num_samples].
Tensor run_greedy(const ProgramPtr& self, const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table,
                  const Tensor& sample_rows, const Tensor& kv) {
  const int32_t* picked = self->program.run_greedy(batch_of(tokens, positions, sequences, page_table, sample_rows), CudaProgram::pool(kv));
  Tensor out = at::empty({sample_rows.size(0)}, at::kInt);
  std::copy_n(picked, sample_rows.size(0), out.data_ptr<int32_t>());
  return out;
}

// graphs made, attempts that failed; and why the latest did
std::tuple<int64_t, int64_t, std::string> graph_counts(const ProgramPtr& self) {
  const Graphs::Counts counts = self->program.graph_counts();
  return {counts.num_recorded, counts.num_failed, self->program.graph_error()};
}

// --- copies

struct StreamHolder : torch::CustomClassHolder {
  std::shared_ptr<CopyStream> stream;
  explicit StreamHolder(const DevicePtr& device) : stream(std::make_shared<CopyStream>(device->context)) {}
};
using StreamPtr = c10::intrusive_ptr<StreamHolder>;

EventPtr<CopyEvent> post_copy(const StreamPtr& self, const Tensor& pool, const Tensor& host, const Tensor& combs, bool to_host, const MaybeTensor& hashes) {
  check_on_device(pool, "pool");
  const PageCopy copy = page_copy_of(pool, host, combs, to_host, hashes);
  return c10::make_intrusive<EventHolder<CopyEvent>>(self->stream->post(copy, kept_alive(pool, host, hashes)));
}

void hash_on_host(const StreamPtr&, const Tensor& host, const Tensor& hashes, int64_t page_bytes) {
  hash_pages(host, hashes, page_bytes, &host_page_hash);
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
  auto program = m.class_<CudaProgram>("Program").def(torch::init<const DevicePtr&, int64_t, int64_t>());
  ProgramClass<CudaProgram>::define(program);
  program.def("expect", &Callable<&expect>::call)
      .def("needs", &Callable<&needs>::call)
      .def("upload", &Callable<&upload>::call)
      .def("use_graphs", [](const ProgramPtr& self, bool are_used) { self->program.use_graphs(are_used); })
      .def("graph_counts", &Callable<&graph_counts>::call)
      .def("run_greedy", &Callable<&run_greedy>::call);
  define_event<CopyEvent>(m);
  m.class_<StreamHolder>("CopyStream")
      .def(torch::init<const DevicePtr&>())
      .def("copy_pages", &Callable<&post_copy>::call)
      .def("hash_pages", &Callable<&hash_on_host>::call)
      .def("calibrate", &Callable<&calibrate>::call)
      .def("num_outstanding", [](const StreamPtr& self) { return self->stream->num_outstanding(); })
      .def("close", [](const StreamPtr& self) { self->stream->close(); });
}

TORCH_LIBRARY_IMPL(pyserve_cuda, CPU, m) {
  m.impl("pack", &Callable<&pack>::call);
  m.impl("is_pinned", &Callable<&is_pinned>::call);
}

}  // namespace pyserve::cuda
