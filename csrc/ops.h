// Every kernel's signature, once. No torch here: raw pointers and sizes; registration.cpp checks tensors and calls these.
//
// A kernel is called by each thread of the team with its Share and does that part of the work. How the work is cut never changes a result: every output
// element is computed by one thread in one fixed order (over the columns of a product, over the positions of a sequence), whatever else is in the batch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pyserve {

struct Share {  // part `index` of `count`
  int index;
  int count;
  uint64_t call = 0;  // the same for all parts of one kernel call and no other; 0: unknown. What a thread prepared for one part may serve its next one.
  const uint8_t* next = nullptr;  // weights that the thread reads after this part; null: those that follow it
};

enum class DType : int64_t { f32 = 0, f16 = 1, bf16 = 2 };

enum class WeightType : int64_t { f32 = 0, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };

// A matrix [rows, cols] (rows = outputs) in the layout that `pack` makes of a file's bytes; no value is changed.
struct PackedWeight {
  WeightType type;
  int64_t rows, cols;
  const uint8_t* data;  // 64-byte aligned
};

// Rows of activations. The int8 half (one scale per block of 32 columns, value = scale * q8) is null when no quantised product reads it.
struct Activations {
  float* f32;       // [num_rows, width]
  int8_t* q8;       // [num_rows, width]
  float* q8_scale;  // [num_rows, width / 32]
  int32_t* q8_sum;  // [num_rows, width / 32]: sum of the block's q8 values
  int64_t width;
};

// --- linear.cpp
size_t packed_bytes(WeightType type, int64_t rows, int64_t cols);
void pack(WeightType type, const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* out, Share share);
int64_t broken_row(WeightType type, const uint8_t* raw, int64_t rows, int64_t cols);  // the first with a value that is NaN or infinite; -1: none
struct Product {
  PackedWeight weight;
  const float* bias;  // [rows], or null
};
// out[m, n] (+)= sum_k x[m, k] * w[n, k] + bias[n] for each product, the outputs side by side; out_stride in floats.
void linear(const Product* products, int num_products, const Activations& x, float* out, int64_t out_stride, int64_t num_rows, bool accumulate, Share share);
// The weights that the share reads first.
const uint8_t* linear_start(const Product* products, int num_products, int64_t num_rows, Share share);
void quantise(const Activations& x, int64_t num_rows, Share share);  // f32 -> q8
void embed(const PackedWeight& table, const int32_t* tokens, int64_t num_rows, float scale, float* out, Share share);

// --- norm.cpp, activation.cpp: write f32, and q8 where out.q8 is not null
void rms_norm(const float* x, const float* weight, float eps, const Activations& out, int64_t num_rows, Share share);
enum class Activation : int64_t { silu = 0, gelu_tanh = 1 };
void gated_activation(Activation kind, const float* gate_up /* [num_rows, 2 * width]: gate | up */, const Activations& out, int64_t num_rows, Share share);

// --- rope.cpp, attention.cpp: over the page-major pool [pages, layers, 2, kv_heads, page_size, head_dim]
struct Pool {
  uint8_t* data;
  DType type;
  int64_t num_pages, num_layers, num_kv_heads, page_size, head_dim;
};

struct StepRows {                // one entry per token of the step
  int64_t num_rows;
  const int32_t* positions;      // [num_rows]
  const int32_t* sequences;      // [num_rows]: row of the page table; rows of one sequence are adjacent, in ascending position
  const int32_t* page_table;     // [num_sequences, page_table_width]
  int64_t page_table_width;
};

struct RopeTable {
  const float* cos;              // [max_positions, rotary_dim / 2]
  const float* sin;
  int64_t max_positions, rotary_dim;
  bool is_interleaved;           // pairs (2i, 2i + 1) as in GGUF's llama files, else (i, i + rotary_dim / 2)
};

struct HeadNorm {                // Qwen3: each head of q and k is normed before rope; null weights switch it off
  const float* q_weight;
  const float* k_weight;
  float eps;
};

// qkv [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]: q is rotated in place, k (rotated) and v go to the pool.
void rope_kv_write(float* qkv, int64_t num_heads, const RopeTable& rope, const HeadNorm& norm, const Pool& pool, int64_t layer, const StepRows& rows,
                   Share share);

struct AttentionSpec {
  int64_t num_heads, layer;
  float scale;                   // of q . k
  float softcap;                 // 0: none
  int64_t window;                // positions seen, the row's own included; 0: all
};
// Where members that share a row's positions leave their parts: 64-byte aligned, zero before the first call; 0 bytes where no row can be shared.
size_t attention_workspace_bytes(int64_t num_heads, const Pool& pool, const StepRows& rows, int num_members);
void attention(const float* qkv, const AttentionSpec& spec, const Pool& pool, const StepRows& rows, const Activations& out, uint8_t* workspace, Share share);

// --- sample.cpp
struct SampleRow {               // one row's sampler; 0 switches top_k and min_p off, top_p >= 1 too
  float temperature;             // <= 0: the most probable token, ties to the lower id
  int64_t top_k;
  float top_p, min_p;
  uint64_t seed, position;       // the random number is a function of these two
};
struct LogitChange {             // of one row's token, before sampling: bias, then penalties, then a ban
  int32_t row, token;
  float bias;                    // 0: none
  float count;                   // how often the token is in the window of the penalties; 0: they do not touch it
  float repeat, presence, frequency;  // 1, 0, 0: none
  int32_t is_banned;
  int32_t after = 0;             // -1 - i: once more where the token is the one that the step before picked for its sample i, which only a device knows
};
// No two changes are of one (row, token); rows are `stride` apart.
void change_logits(float* logits, int64_t stride, const LogitChange* changes, int64_t num_changes);
constexpr int32_t kBrokenRow = -1;  // in place of a token: a logit of the row is NaN, or its largest is not finite; a fault of weights or kernels
int32_t sample_row(const float* logits, int64_t vocab_size, const SampleRow& row, float* scratch /* [2 * vocab_size] */);

}  // namespace pyserve
