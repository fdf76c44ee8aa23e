// Head norm, rotation by position, and the write of K and V into the pool, in one pass over the rows.
//
// The unit of work is one head of one row: it is computed by one thread in one order, so a row's bits depend on nothing but the row. Threads never write one
// cell: a cell belongs to one (row, kv head).
#include <cmath>

#include "../ops.h"
#include "half.h"
#include "isa.h"

#if PYSERVE_X86
#include <immintrin.h>
#endif

namespace pyserve {
namespace {

constexpr int64_t max_head_dim = 256;

// x *= weight / sqrt(mean(x^2) + eps); eight partial sums in a fixed order.
void norm_head(float* x, const float* weight, float eps, int64_t head_dim) {
  float partial[8] = {};
  for (int64_t i = 0; i < head_dim; i += 8) {
    for (int lane = 0; lane < 8; ++lane) partial[lane] += x[i + lane] * x[i + lane];
  }
  const float sum = ((partial[0] + partial[4]) + (partial[2] + partial[6])) + ((partial[1] + partial[5]) + (partial[3] + partial[7]));
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(head_dim) + eps);
  for (int64_t i = 0; i < head_dim; ++i) x[i] = x[i] * factor * weight[i];
}

void rotate_head(float* x, const float* cos, const float* sin, int64_t half, bool is_interleaved) {
  if (is_interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

#if PYSERVE_X86
PYSERVE_TARGET_BEGIN(PYSERVE_AVX2)
void store_f16_avx2(const float* x, uint16_t* cell, int64_t head_dim) {
  for (int64_t i = 0; i < head_dim; i += 8) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(cell + i), packed);
  }
}

// The rounding of float_to_bf16, eight at a time; a processor's own conversion takes small numbers for zero.
void store_bf16_avx2(const float* x, uint16_t* cell, int64_t head_dim) {
  const __m256i half = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1), quiet = _mm256_set1_epi32(0x40);
  for (int64_t i = 0; i < head_dim; i += 8) {
    const __m256 value = _mm256_loadu_ps(x + i);
    const __m256i bits = _mm256_castps_si256(value), cut = _mm256_srli_epi32(bits, 16);
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(half, _mm256_and_si256(cut, one))), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(rounded, _mm256_or_si256(cut, quiet), is_nan);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(cell + i), packed);
  }
}
PYSERVE_TARGET_END
#endif

void store_f16(const float* x, uint16_t* cell, int64_t head_dim) {
#if PYSERVE_X86
  if (isa() >= Isa::avx2) return store_f16_avx2(x, cell, head_dim);
#endif
  for (int64_t i = 0; i < head_dim; ++i) cell[i] = float_to_f16(x[i]);
}

void store_bf16(const float* x, uint16_t* cell, int64_t head_dim) {
#if PYSERVE_X86
  if (isa() >= Isa::avx2) return store_bf16_avx2(x, cell, head_dim);
#endif
  for (int64_t i = 0; i < head_dim; ++i) cell[i] = float_to_bf16(x[i]);
}

void store_cell(const float* x, uint8_t* cell, DType type, int64_t head_dim) {
  if (type == DType::f32) {
    std::memcpy(cell, x, static_cast<size_t>(head_dim) * sizeof(float));
  } else if (type == DType::f16) {
    store_f16(x, reinterpret_cast<uint16_t*>(cell), head_dim);
  } else {
    store_bf16(x, reinterpret_cast<uint16_t*>(cell), head_dim);
  }
}

uint8_t* cell_of(const Pool& pool, const StepRows& rows, int64_t row, int64_t layer, int64_t is_value, int64_t head) {
  const int64_t position = rows.positions[row];
  const int64_t page = rows.page_table[rows.sequences[row] * rows.page_table_width + position / pool.page_size];
  const int64_t plane = ((page * pool.num_layers + layer) * 2 + is_value) * pool.num_kv_heads + head;
  const int64_t width = pool.type == DType::f32 ? 4 : 2;
  return pool.data + (plane * pool.page_size + position % pool.page_size) * pool.head_dim * width;
}

}  // namespace

void rope_kv_write(float* qkv, int64_t num_heads, const RopeTable& rope, const HeadNorm& norm, const Pool& pool, int64_t layer, const StepRows& rows,
                   Share share) {
  const int64_t head_dim = pool.head_dim, num_kv_heads = pool.num_kv_heads, half = rope.rotary_dim / 2;
  const int64_t heads_per_row = num_heads + 2 * num_kv_heads, num_items = rows.num_rows * heads_per_row;
  const int64_t last = num_items * (share.index + 1) / share.count;
  for (int64_t item = num_items * share.index / share.count; item < last; ++item) {
    const int64_t row = item / heads_per_row, head = item % heads_per_row, kv_head = (head - num_heads) % num_kv_heads;
    const float* cos = rope.cos + rows.positions[row] * half;
    const float* sin = rope.sin + rows.positions[row] * half;
    float* x = qkv + item * head_dim;
    if (head < num_heads) {
      if (norm.q_weight != nullptr) norm_head(x, norm.q_weight, norm.eps, head_dim);
      rotate_head(x, cos, sin, half, rope.is_interleaved);
    } else if (head < num_heads + num_kv_heads) {
      float key[max_head_dim];
      std::memcpy(key, x, static_cast<size_t>(head_dim) * sizeof(float));
      if (norm.k_weight != nullptr) norm_head(key, norm.k_weight, norm.eps, head_dim);
      rotate_head(key, cos, sin, half, rope.is_interleaved);
      store_cell(key, cell_of(pool, rows, row, layer, 0, kv_head), pool.type, head_dim);
    } else {
      store_cell(x, cell_of(pool, rows, row, layer, 1, kv_head), pool.type, head_dim);
    }
  }
}

}  // namespace pyserve
