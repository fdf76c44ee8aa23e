// Every op's schema, once: torch.ops.pyserve.*; classes.h has torch.classes.pyserve.*. The only source that includes torch: it checks tensors, takes raw pointers
// and calls the kernels of ops.h. torch gives the GIL back around each of these calls, so a running program or a wait stops no Python thread.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include "callable.h"
#include "check.h"
#include "classes.h"
#include "cpu/isa.h"
#include "cpu/memory.h"
#include "cpu/page_runs.h"
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

int64_t broken_row_op(int64_t type, const Tensor& raw, int64_t rows, int64_t cols) {
  check_tensor(raw, "raw", at::kByte, 1);
  check(rows > 0 && cols > 0, "rows and cols must be positive");
  return broken_row(weight_type(type), raw.const_data_ptr<uint8_t>(), rows, cols);
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
      : pool(cpu_pool(kv)), rows(step_rows(positions, sequences, page_table)), qkv(floats(qkv_tensor, "qkv", 2)) {
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
  check_on_cpu(pool, "pool");
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

}  // namespace

TORCH_LIBRARY(pyserve, m) {
  m.def("pack(int type, Tensor raw, int rows, int cols) -> Tensor");
  m.def("broken_row(int type, Tensor raw, int rows, int cols) -> int");
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

  define_classes(m);
}

TORCH_LIBRARY_IMPL(pyserve, CPU, m) {
  m.impl("pack", &Callable<&pack_op>::call);
  m.impl("broken_row", &Callable<&broken_row_op>::call);
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
