// Tensors to the raw pointers and records of ops.h, checked: what is wrong is said by the argument's name. For what binds to torch: registration.cpp and
// cuda/binding.cpp.
#pragma once
#include <torch/library.h>

#include <optional>
#include <vector>

#include "check.h"
#include "cpu/page_copy.h"
#include "ops.h"
#include "step.h"

namespace pyserve {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

inline void check_on_cpu(const Tensor& tensor, const char* name) { check(tensor.defined() && tensor.device().is_cpu(), name, " must be on the CPU"); }

inline void check_tensor(const Tensor& tensor, const char* name, at::ScalarType type, int64_t num_dims) {
  check_on_cpu(tensor, name);
  check(tensor.scalar_type() == type, name, " must be ", c10::toString(type), ", not ", c10::toString(tensor.scalar_type()));
  check(tensor.dim() == num_dims, name, " must have ", num_dims, " dimensions, not ", tensor.dim());
  check(tensor.is_contiguous(), name, " must be contiguous");
}

inline float* floats(const Tensor& tensor, const char* name, int64_t num_dims) {
  check_tensor(tensor, name, at::kFloat, num_dims);
  return tensor.data_ptr<float>();
}

inline const float* floats_of_len(const MaybeTensor& tensor, const char* name, int64_t len) {
  if (!tensor.has_value()) return nullptr;
  const float* data = floats(*tensor, name, 1);
  check(tensor->size(0) == len, name, " must have ", len, " values, not ", tensor->size(0));
  return data;
}

inline const int32_t* ints(const Tensor& tensor, const char* name, int64_t num_dims) {
  check_tensor(tensor, name, at::kInt, num_dims);
  return tensor.data_ptr<int32_t>();
}

inline WeightType weight_type(int64_t type) {
  check(type >= 0 && type <= static_cast<int64_t>(WeightType::q6_k), "type: there is no weight type ", type);
  return static_cast<WeightType>(type);
}

inline PackedWeight packed_weight(const Tensor& data, int64_t type, int64_t rows, int64_t cols) {
  check_tensor(data, "packed", at::kByte, 1);
  check(rows > 0 && cols > 0, "rows and cols must be positive");
  const PackedWeight weight{weight_type(type), rows, cols, data.data_ptr<uint8_t>()};
  const int64_t wanted = static_cast<int64_t>(packed_bytes(weight.type, rows, cols));
  check(data.numel() >= wanted, "packed must have ", wanted, " bytes, not ", data.numel());
  check(reinterpret_cast<uintptr_t>(weight.data) % 64 == 0, "packed must be 64-byte aligned");
  return weight;
}

inline Pool pool_of(const Tensor& kv) {  // wherever it lies
  check(kv.is_contiguous(), "kv must be contiguous");
  check(kv.dim() == 6 && kv.size(2) == 2, "kv must be [pages, layers, 2, kv_heads, page_size, head_dim]");
  const at::ScalarType type = kv.scalar_type();
  check(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, "kv must be float32, float16 or bfloat16, not ", c10::toString(type));
  const DType as = type == at::kFloat ? DType::f32 : type == at::kHalf ? DType::f16 : DType::bf16;
  return Pool{static_cast<uint8_t*>(kv.data_ptr()), as, kv.size(0), kv.size(1), kv.size(3), kv.size(4), kv.size(5)};
}

inline StepRows step_rows(const Tensor& positions, const Tensor& sequences, const Tensor& page_table) {
  const int32_t* places = ints(positions, "positions", 1);
  const int32_t* owners = ints(sequences, "sequences", 1);
  const int32_t* pages = ints(page_table, "page_table", 2);
  const StepRows rows{positions.size(0), places, owners, pages, page_table.size(1)};
  check(sequences.size(0) == rows.num_rows, "sequences must have ", rows.num_rows, " values, as positions has, not ", sequences.size(0));
  return rows;
}

inline RopeTable rope_table(const Tensor& cos, const Tensor& sin, bool is_interleaved) {
  const float* cosines = floats(cos, "cos", 2);
  const float* sines = floats(sin, "sin", 2);
  check(sin.sizes() == cos.sizes(), "sin must have the shape of cos");
  return RopeTable{cosines, sines, cos.size(0), cos.size(1) * 2, is_interleaved};
}

inline Activation activation_of(int64_t kind) {
  check(kind == 0 || kind == 1, "kind: there is no activation ", kind);
  return static_cast<Activation>(kind);
}

inline Batch batch_of(const Tensor& tokens, const Tensor& positions, const Tensor& sequences, const Tensor& page_table, const Tensor& sample_rows) {
  const Batch batch{ints(tokens, "tokens", 1), step_rows(positions, sequences, page_table), page_table.size(0), ints(sample_rows, "sample_rows", 1),
                    sample_rows.size(0)};
  check(tokens.size(0) == batch.rows.num_rows, "positions must have ", tokens.size(0), " values, as tokens has, not ", batch.rows.num_rows);
  return batch;
}

// The pool is wherever it lies, the rest on the CPU.
inline PageCopy page_copy_of(const Tensor& pool, const Tensor& host, const Tensor& combs, bool to_host, const MaybeTensor& hashes = {}) {
  check(pool.is_contiguous() && pool.dim() >= 1 && pool.size(0) > 0, "pool must be contiguous and [pages, ...]");
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
  return copy;
}

// Pages in host memory whose entry of `hashes` is 0 get their hash there: hash(page, page_bytes), never 0.
template <class Hash>
void hash_pages(const Tensor& host, const Tensor& hashes, int64_t page_bytes, Hash hash) {
  check_tensor(host, "host", at::kByte, 1);
  check_tensor(hashes, "hashes", at::kLong, 1);
  check(page_bytes > 0 && host.numel() == hashes.numel() * page_bytes, "host must have ", page_bytes, " bytes for each of ", hashes.numel(), " hashes");
  const uint8_t* page = host.const_data_ptr<uint8_t>();
  int64_t* to = hashes.data_ptr<int64_t>();
  for (int64_t i = 0; i < hashes.numel(); ++i, page += page_bytes)
    if (to[i] == 0) to[i] = static_cast<int64_t>(hash(page, page_bytes));
}

}  // namespace pyserve
