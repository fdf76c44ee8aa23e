// Head norm, rotation by position, and the write of K and V into the pool, in one pass over the rows.
//
// One warp for each head of each row: the head is read into shared memory once, normed (q and k, where the model has weights for it), rotated from there, and
// written 8 columns a lane: q back in place as f32, k and v into their cell as f32, f16 or bf16 with 16-byte stores.
//
// Exactness (R37): the norm's sum is each lane's columns (lane, lane + 32, ...) in ascending order, then a tree over the lanes; the rest is by element. A head's
// bits depend on the head alone. A cell belongs to one (row, kv head), so no two warps write one address.
//
// Layout: qkv f32 [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], 16-byte aligned; head_dim a multiple of 8, at most 256; rotary_dim even, at most
// head_dim, the columns behind it are not rotated. rope.cos and sin hold every position of the rows.
// Not handled: KV narrower than 16 bits.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "rows.cuh"
#include "tiles.h"

namespace pyserve::cuda {
namespace {

constexpr int kMaxHeadDim = 256, kWarps = 4;

struct Arguments {
  float* qkv;
  int num_heads;
  RopeTable rope;
  HeadNorm norm;
  Pool pool;
  Divider page_size;
  int64_t layer;
  StepRows rows;
};

// Where the cell of K or V of a row and kv head begins, in elements.
__device__ int64_t cell_at(const Arguments& a, int64_t row, int is_value, int kv_head) {
  const int position = a.rows.positions[row], index = divide(position, a.page_size);
  const int64_t page = a.rows.page_table[a.rows.sequences[row] * a.rows.page_table_width + index];
  const int64_t plane = ((page * a.pool.num_layers + a.layer) * 2 + is_value) * a.pool.num_kv_heads + kv_head;
  return (plane * a.pool.page_size + position - index * a.page_size.divisor) * a.pool.head_dim;
}

__device__ __forceinline__ float rotated(const float* x, int column, const float* cos, const float* sin, int half, bool is_interleaved) {
  if (column >= 2 * half) return x[column];
  const int pair = is_interleaved ? column / 2 : column % half;
  const bool is_second = is_interleaved ? column % 2 != 0 : column >= half;
  const int first = is_interleaved ? 2 * pair : pair, second = is_interleaved ? first + 1 : pair + half;
  const float c = cos[pair], s = sin[pair];
  return is_second ? __fmaf_rn(x[second], c, __fmul_rn(x[first], s)) : __fmaf_rn(x[first], c, -__fmul_rn(x[second], s));
}

__device__ void norm_head(float* x, const float* weight, float eps, int head_dim, int lane) {
  float sum = 0.f;
  for (int column = lane; column < head_dim; column += 32) sum = __fmaf_rn(x[column], x[column], sum);
  sum = warp_sum(sum);
  const float scale = __frcp_rn(__fsqrt_rn(__fdiv_rn(sum, static_cast<float>(head_dim)) + eps));
  for (int column = lane; column < head_dim; column += 32) x[column] = __fmul_rn(__fmul_rn(x[column], scale), weight[column]);
}

__device__ __forceinline__ uint32_t to_pair(float x, float y, bool is_f16) {
  if (is_f16) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_floats(float* to, const float (&x)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void store_cell(const Pool& pool, int64_t at, const float (&x)[8]) {
  if (pool.type == DType::f32) return store_floats(reinterpret_cast<float*>(pool.data) + at, x);
  const bool is_f16 = pool.type == DType::f16;
  *reinterpret_cast<uint4*>(reinterpret_cast<uint16_t*>(pool.data) + at) =
      make_uint4(to_pair(x[0], x[1], is_f16), to_pair(x[2], x[3], is_f16), to_pair(x[4], x[5], is_f16), to_pair(x[6], x[7], is_f16));
}

__global__ void __launch_bounds__(32 * kWarps) rope_kv_write_kernel(Arguments a) {
  PYSERVE_SHARED(float, heads, [kWarps][kMaxHeadDim]);
  const int lane = threadIdx.x & 31, head_dim = static_cast<int>(a.pool.head_dim), num_kv_heads = static_cast<int>(a.pool.num_kv_heads);
  const int heads_a_row = a.num_heads + 2 * num_kv_heads;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, row = item / heads_a_row;
  if (row >= a.rows.num_rows || a.rows.positions[row] < 0) return;  // a row of position -1 is padding
  const int head = static_cast<int>(item % heads_a_row), half = static_cast<int>(a.rope.rotary_dim / 2);
  const bool is_query = head < a.num_heads, is_value = head >= a.num_heads + num_kv_heads;
  float* x = heads[threadIdx.x / 32];
  float* from = a.qkv + item * head_dim;
  for (int column = lane * 4; column < head_dim; column += 128) *reinterpret_cast<float4*>(x + column) = *reinterpret_cast<const float4*>(from + column);
  __syncwarp();
  const float* weight = is_query ? a.norm.q_weight : is_value ? nullptr : a.norm.k_weight;
  if (weight != nullptr) {
    norm_head(x, weight, a.norm.eps, head_dim, lane);
    __syncwarp();
  }
  const int64_t position = a.rows.positions[row];
  const int turned = is_value ? 0 : half;
  const int64_t cell = is_query ? 0 : cell_at(a, row, is_value, (head - a.num_heads) % num_kv_heads);
  if (lane * 8 >= head_dim) return;
  float out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = rotated(x, lane * 8 + i, a.rope.cos + position * half, a.rope.sin + position * half, turned, a.rope.is_interleaved);
  if (is_query) store_floats(from + lane * 8, out);
  else store_cell(a.pool, cell + lane * 8, out);
}

bool is_valid(const RopeTable& rope, const Pool& pool, const float* qkv) {
  return pool.head_dim % 8 == 0 && pool.head_dim <= kMaxHeadDim && rope.rotary_dim % 2 == 0 && rope.rotary_dim <= pool.head_dim && pool.page_size > 0 &&
         reinterpret_cast<uintptr_t>(qkv) % 16 == 0 && reinterpret_cast<uintptr_t>(pool.data) % 16 == 0;
}

}  // namespace

extern "C" int pyserve_cuda_rope_kv_write(float* qkv, int64_t num_heads, const RopeTable* rope, const HeadNorm* norm, const Pool* pool, int64_t layer,
                                          const StepRows* rows, void* stream) {
  if (rows->num_rows == 0) return 0;
  if (!is_valid(*rope, *pool, qkv) || layer < 0 || layer >= pool->num_layers) return kInvalid;
  const Arguments arguments = {qkv, static_cast<int>(num_heads), *rope, *norm, *pool, divider(static_cast<int>(pool->page_size)), layer, *rows};
  const int64_t num_items = rows->num_rows * (num_heads + 2 * pool->num_kv_heads);
  return launch(rope_kv_write_kernel, dim3(static_cast<unsigned>((num_items + kWarps - 1) / kWarps)), dim3(32 * kWarps), 0, static_cast<cudaStream_t>(stream),
                arguments);
}

}  // namespace pyserve::cuda
