// Every CUDA launcher's signature, once; the types are those of csrc/ops.h with device pointers in them. No torch, no CUDA header: the binding includes this.
//
// A row of position -1 is padding: no KV is written for it, and what attention gives for it is nobody's.
//
// A launcher checks what it cannot do (kInvalid), queues its kernels on the stream and returns 0 or the CUDA error of the launch. It neither waits nor allocates.
// Strides are in elements. Rows of activations are f32; q and the output of attention may be f16 or bf16 too.
#pragma once
#include <cstdint>

#include "../ops.h"

namespace pyserve::cuda {

constexpr int kInvalid = 1;  // cudaErrorInvalidValue: a shape, type or alignment that the kernel does not have

struct Matrix {  // rows of a tensor; 16-byte aligned, stride a multiple of 16 bytes
  void* data;
  int64_t type;  // DType
  int64_t stride;
};

struct Device {
  int32_t num_sms;
  int32_t shared_bytes;  // cudaDevAttrMaxSharedMemoryPerBlockOptin
};

extern "C" {

// --- attention_decode.cu: each row of `rows` on its own; q starts at column 0 of `q`. Heads of 64, 80, 96, 128, 256; KV in f16 or bf16.
int64_t pyserve_cuda_attention_decode_scratch_bytes(int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t context_len,
                                                    int64_t window, const Device* device);
int pyserve_cuda_attention_decode(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out, void* scratch,
                                  int64_t scratch_bytes, const Device* device, void* stream);
// The same, where `scratch` still holds the plan of another layer's call in this step, with the same rows, heads, window and device.
int pyserve_cuda_attention_decode_planned(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out,
                                          void* scratch, int64_t scratch_bytes, const Device* device, void* stream);

// --- attention_prefill.cu: chunks of adjacent rows; `chunks` on the host (3 int32 each: first row, number of rows, last position), `tiles` on the device.
int pyserve_cuda_attention_prefill_queries(int64_t head_dim, const Device* device);  // query rows a tile, 0: not possible
int64_t pyserve_cuda_attention_prefill_tiles(const int32_t* chunks, int64_t num_chunks, int64_t heads_per_kv_head, int64_t tile_queries,
                                             int32_t* tiles, int64_t max_tiles);  // on the host; how many there are, -1: no such tile; writes max_tiles at most
int64_t pyserve_cuda_attention_prefill_scratch_bytes(int64_t num_tiles, int64_t num_kv_heads, int64_t head_dim, const Device* device);
int pyserve_cuda_attention_prefill(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out,
                                   const int32_t* tiles, int64_t num_tiles, void* scratch, int64_t scratch_bytes, const Device* device, void* stream);

// --- attention_f32.cu: any rows, for KV in f32; no scratch. Heads of any multiple of 4 up to 256.
int pyserve_cuda_attention_f32(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out, void* stream);

// --- kv_write.cu: as csrc/cpu/rope.cpp
int pyserve_cuda_rope_kv_write(float* qkv, int64_t num_heads, const RopeTable* rope, const HeadNorm* norm, const Pool* pool, int64_t layer,
                               const StepRows* rows, void* stream);

// --- norm.cu; with a residual [num_rows, width], x + residual takes the residual's place and is what gets normed
int pyserve_cuda_rms_norm(const float* x, float* residual, const float* weight, float eps, const Activations* out, int64_t num_rows, void* stream);

// --- activation.cu
int pyserve_cuda_gated_activation(int64_t kind, const float* gate_up, const Activations* out, int64_t num_rows, void* stream);

// --- pack.cu, on the host: every quantised type
int64_t pyserve_cuda_packed_bytes(int64_t weight_type, int64_t rows, int64_t cols);                          // -1: no such type or shape
int pyserve_cuda_pack(int64_t weight_type, const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* packed);  // out of a file's blocks

// --- linear.cu: every quantised type. More than 32 rows go to linear_tiled.cu, which gives each row the same bits.
int pyserve_cuda_quantise(const Activations* x, int64_t num_rows, void* stream);
int pyserve_cuda_linear(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                        int64_t accumulate, void* stream);
int pyserve_cuda_linear_tiled(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                              int64_t accumulate, int64_t tile, void* stream);  // tile: 64 or 128 outputs square, 0: as fits

// --- linear_float.cu: f32, f16, bf16 weights [rows, cols] as in the file. f16 and bf16 go to the tensor cores of linear_half.cu and, more than 32 rows, of
// linear_half_tiled.cu where their columns are a multiple of 8; what of this runs follows from the weight alone, and each row has the same bits in both.
int pyserve_cuda_linear_float(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                              int64_t accumulate, void* stream);
int pyserve_cuda_linear_half(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                             int64_t accumulate, void* stream);
int pyserve_cuda_linear_half_tiled(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                                   int64_t accumulate, int64_t tile, void* stream);  // tile: as above

// --- embed.cu: out[i] = scale * table[tokens[i]], for the types of both products; out[i] = x[rows[i]]
int pyserve_cuda_embed(const PackedWeight* table, const int32_t* tokens, int64_t num_rows, float scale, float* out, void* stream);
int pyserve_cuda_take_rows(const float* x, int64_t width, const int32_t* rows, int64_t num_rows, float* out, void* stream);

// --- sample.cu: the most probable token of each row, ties to the lower id, or kBrokenRow; int32 [num_rows]
int pyserve_cuda_argmax(const float* logits, int64_t stride, int64_t vocab_size, int64_t num_rows, int32_t* tokens, void* stream);
// A row's changes stand together, no two of one token; rows and tokens must exist. `picked`: of the step before, null where no change is `after` it. A change of
// token -1 - i, which comes first of its row, is that of picked[i], unless one of the row's others is.
int pyserve_cuda_change_logits(float* logits, int64_t stride, const LogitChange* changes, int64_t num_changes, const int32_t* picked, void* stream);
// --- draw.cu: as csrc/cpu/sample.cpp; real f32 [num_rows, 3]: temperature, top_p, min_p; whole int64 [num_rows, 3]: top_k, seed, position
int pyserve_cuda_draw(const float* logits, int64_t stride, int64_t vocab_size, const float* real, const int64_t* whole, int64_t num_rows, int32_t* tokens,
                      void* stream);

// --- follow.cu: tokens[i] < 0 becomes picked[-1 - tokens[i]], or 0 where that is kBrokenRow
int pyserve_cuda_follow(int32_t* tokens, int64_t num_rows, const int32_t* picked, void* stream);

}  // extern "C"

}  // namespace pyserve::cuda
