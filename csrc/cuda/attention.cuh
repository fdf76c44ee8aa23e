// What decode and prefill attention share: one warp's walk over the keys of one sequence.
//
// Purpose. A row is one query head of one token. Warps hold 16 rows (M = 1; M = 2 spills) as mma.m16n8k16 tiles; keys come in units of 64 positions (tiles.h), K and V as
// separate halves through a ring of shared memory that cp.async fills ahead. A team is who fills and reads one ring: a warp (decode) or a block (prefill).
//
// Per unit and row: scores by mma over the head's dimensions in ascending order; softcap; keys the row does not see get minus infinity; the unit's own maximum
// and weights 2^(score - maximum), rounded to the pool's type; their sum; V weighed by mma from zero, four steps of 16 keys. Then the unit is merged:
//     m' = max(m, mu), c = 2^(m - m'), d = 2^(mu - m'):  sum = fma(sum, c, su * d),  o = fma(o, c, ou * d)
// A unit of which the row sees no key is no merge at all. Every eighth unit ends a group: its state is set aside and a fresh one begins; groups are merged in
// order by the same formula. A state is (o [head_dim], m, sum) in float, stored and read back without loss.
//
// Exactness (R37). Units, groups and orders are functions of a row's position. A row of an mma tile does not depend on the other rows, and a unit that a row
// does not see changes nothing of its state. So a row's bits are the same in decode and in prefill, in any tile, chunk, page size, company, and however the
// units were dealt to workers: a worker that begins inside a group hands in its units one by one, and the combine kernel merges them as the worker would have.
// This holds within one build on one kind of device.
//
// Cells outside [first visible, last] of the tile are never read: cp.async fills zeros there, so NaN left by others cannot leak through 0 * NaN. A sequence's
// own infinity in V can reach rows of its tile that do not see it.
//
// Not handled: negative scale, KV in f32 (attention_f32.cu), heads of other sizes, attention sinks, ALiBi, tree masks.
// Not run on hardware so far: proved on the emulator of tests/cuda, compiled for sm_80 to sm_120.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "ptx.cuh"
#include "tiles.h"

namespace pyserve::cuda {

constexpr float kLog2e = 1.4426950408889634f;

template <int D>
struct Shape {  // of shared memory, in elements of 2 bytes
  static_assert(D % 16 == 0 && D <= 256, "heads are cut into mma tiles of 16 dimensions");
  static constexpr int pitch = D + 8;             // 16 bytes more, an odd number of 16-byte words: ldmatrix has no bank conflicts
  static constexpr int slot = kUnitLen * pitch;   // one half of a unit: K or V
  static constexpr int num_slots = D <= 128 ? 3 : 2;
};

template <class T>
struct Cells {  // one sequence's keys and values of one layer and kv head
  const T* plane;          // K of page 0
  const int32_t* pages;
  Divider page_size;
  int64_t page_stride, value_offset;

  template <int D>
  __device__ const T* at(int position, bool is_value) const {
    const int page = divide(position, page_size), place = position - page * page_size.divisor;
    return plane + __ldg(pages + page) * page_stride + (is_value ? value_offset : 0) + place * D;
  }
};

struct Scoring {
  float softcap, inner;  // score = softcap > 0 ? softcap * tanh(dot * inner) : dot
  float exponent;        // weight = 2^(exponent * (score - maximum))
};

template <int M>
struct Reach {  // keys that this thread's rows see: `last` and the span - 1 before it; last -1: none
  int last[M][2];
  int span;
};

__device__ __forceinline__ int span_of(int window) { return window > 0 ? window : 0x7fffffff; }

template <int D, int M>
struct State {  // of this thread's rows: row i * 16 + lane / 4 + 8 r, columns n * 8 + lane % 4 * 2 + e at o[i][n][2 r + e]
  float o[M][D / 8][4];
  float largest[M][2], sum[M][2];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0.f;
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[i][r] = -INFINITY, sum[i][r] = 0.f;
    }
  }
};

struct Factors {
  float keep, add;  // add 0: keep is 1, and nothing is touched
};

// The one formula by which states are merged. Updates the maximum and the sum; `merge` does an element.
__device__ __forceinline__ Factors merge_factors(float& largest, float& sum, float new_largest, float new_sum, float exponent) {
  if (new_largest == -INFINITY) return {1.f, 0.f};
  const float both = fmaxf(largest, new_largest);
  const float keep = exp2_approx(__fmul_rn(largest - both, exponent)), add = exp2_approx(__fmul_rn(new_largest - both, exponent));
  sum = __fmaf_rn(sum, keep, __fmul_rn(new_sum, add));
  largest = both;
  return {keep, add};
}

__device__ __forceinline__ float merge(float o, float added, const Factors& f) {
  return f.add != 0.f ? __fmaf_rn(o, f.keep, __fmul_rn(added, f.add)) : o;
}

// What o is multiplied with at the end: rcp.approx, the same in both kernels.
__device__ __forceinline__ float inverse(float sum) { return __fdividef(1.f, sum); }

template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b) {
  const uint32_t pair[2] = {b[0], b[1]};
  if constexpr (std::is_same_v<T, __half>) mma_m16n8k16_f16(d, a, pair);
  else mma_m16n8k16_bf16(d, a, pair);
}

// Two values rounded to T, in one register; x and y become what was kept of them.
template <class T>
__device__ __forceinline__ uint32_t round_pair(float& x, float& y) {
  uint32_t bits;
  float2 kept;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x, y);
    kept = __half22float2(pair);
    bits = *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    kept = __bfloat1622float2(pair);
    bits = *reinterpret_cast<const uint32_t*>(&pair);
  }
  x = kept.x, y = kept.y;
  return bits;
}

__device__ __forceinline__ float2 unpack_pair(uint32_t bits, bool is_f16) {
  if (is_f16) return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
}

// Eight values of a matrix to T in shared memory.
template <class T>
__device__ __forceinline__ void load_query(T* to, const Matrix& q, int64_t offset) {
  float x[8];
  if (q.type == static_cast<int64_t>(DType::f32)) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(q.data) + offset);
    const float4 low = from[0], high = from[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
    const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(q.data) + offset);
    const bool is_f16 = q.type == static_cast<int64_t>(DType::f16);
    const float2 a = unpack_pair(bits.x, is_f16), b = unpack_pair(bits.y, is_f16), c = unpack_pair(bits.z, is_f16), d = unpack_pair(bits.w, is_f16);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
  }
  *reinterpret_cast<uint4*>(to) =
      make_uint4(round_pair<T>(x[0], x[1]), round_pair<T>(x[2], x[3]), round_pair<T>(x[4], x[5]), round_pair<T>(x[6], x[7]));
}

__device__ __forceinline__ void store_output(const Matrix& out, int64_t offset, float value) {
  if (out.type == static_cast<int64_t>(DType::f32)) static_cast<float*>(out.data)[offset] = value;
  else if (out.type == static_cast<int64_t>(DType::f16)) static_cast<__half*>(out.data)[offset] = __float2half_rn(value);
  else static_cast<__nv_bfloat16*>(out.data)[offset] = __float2bfloat16_rn(value);
}

// scores[M][8][4] = queries x keys transposed; `queries` are the warp's own rows.
template <class T, int D, int M>
__device__ __forceinline__ void multiply_keys(float (&scores)[M][8][4], const T* queries, const T* keys, int lane) {
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[i][n][e] = 0.f;
#pragma unroll(D == 256 ? 1 : D / 16)
  for (int step = 0; step < D; step += 16) {
    uint32_t a[M][4];
#pragma unroll
    for (int i = 0; i < M; ++i) ldmatrix_x4(a[i], queries + (i * 16 + (lane & 15)) * Shape<D>::pitch + step + (lane >> 4) * 8);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, keys + (n * 8 + (lane & 7) + (lane >> 4) * 8) * Shape<D>::pitch + step + (lane >> 3 & 1) * 8);
#pragma unroll
      for (int i = 0; i < M; ++i) {
        multiply<T>(scores[i][n], a[i], b);
        multiply<T>(scores[i][n + 1], a[i], b + 2);
      }
    }
  }
}

template <int M>
struct Weights {  // of one unit: in pairs, as the A operand of the next product wants them
  uint32_t pairs[M][8][2];
  Factors factors[M][2];
};

// Scores of one row of this thread to weights. Returns the maximum; `sum` is that of the weights as rounded.
template <class T, int M>
__device__ __forceinline__ float soften(float (&scores)[M][8][4], Weights<M>& weights, float& sum, int i, int r, int last, int span, int key,
                                        const Scoring& scoring) {
  float largest = -INFINITY;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& score = scores[i][n][2 * r + e];
      const int at = key + n * 8 + e;
      if (scoring.softcap > 0.f) score = scoring.softcap * tanhf(score * scoring.inner);
      if (at > last || last - at >= span) score = -INFINITY;
      largest = fmaxf(largest, score);
    }
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  const float base = largest == -INFINITY ? 0.f : -__fmul_rn(largest, scoring.exponent);
  sum = 0.f;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float x = exp2_approx(__fmaf_rn(scores[i][n][2 * r], scoring.exponent, base)), y = exp2_approx(__fmaf_rn(scores[i][n][2 * r + 1], scoring.exponent, base));
    weights.pairs[i][n][r] = round_pair<T>(x, y);
    sum += x + y;
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return largest;
}

template <class T, int D, int M>
__device__ __forceinline__ void attend_keys(State<D, M>& state, Weights<M>& weights, const T* queries, const T* keys, int first_key, const Reach<M>& reach,
                                            const Scoring& scoring, int lane) {
  float scores[M][8][4];
  multiply_keys<T, D, M>(scores, queries, keys, lane);
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum;
      const float largest = soften<T, M>(scores, weights, sum, i, r, reach.last[i][r], reach.span, first_key + (lane & 3) * 2, scoring);
      weights.factors[i][r] = merge_factors(state.largest[i][r], state.sum[i][r], largest, sum, scoring.exponent);
    }
}

template <class T, int D, int M>
__device__ __forceinline__ void attend_values(State<D, M>& state, const Weights<M>& weights, const T* values, int lane) {
#pragma unroll
  for (int n = 0; n < D / 8; n += 2) {
    // Never taken: a branch keeps the compiler from overlapping more than the registers hold.
    if (D >= (kReadsFarAhead ? 96 : 256) && n % 8 == 0 && static_cast<int>(blockDim.x) <= n) break;
    float added[M][2][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, values + (step * 16 + (lane & 15)) * Shape<D>::pitch + n * 8 + (lane >> 4) * 8);
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const uint32_t a[4] = {weights.pairs[i][2 * step][0], weights.pairs[i][2 * step][1], weights.pairs[i][2 * step + 1][0],
                               weights.pairs[i][2 * step + 1][1]};
        multiply<T>(added[i][0], a, b);
        multiply<T>(added[i][1], a, b + 2);
      }
    }
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 4; ++e) state.o[i][n + h][e] = merge(state.o[i][n + h][e], added[i][h][e], weights.factors[i][e >> 1]);
  }
}

struct Team {  // who shares a ring
  int thread, num_threads;
};

// Queues the copies of one half of a unit: half 2 u is K of unit u, 2 u + 1 its V. Positions outside [first, last] become zeros.
template <class T, int D>
__device__ __forceinline__ void fill(T* slot, const Cells<T>& cells, int half, int first, int last, Team team) {
  constexpr int words = D / 8;  // of 16 bytes
  const int first_key = half / 2 * kUnitLen;
#pragma unroll(D == 256 ? 1 : 2)
  for (int i = team.thread; i < kUnitLen * words; i += team.num_threads) {
    const int key = i / words, word = i % words, position = first_key + key;
    const bool is_wanted = position >= first && position <= last;
    const T* from = is_wanted ? cells.template at<D>(position, half & 1) + word * 8 : cells.plane;
    cp_async16(slot + key * Shape<D>::pitch + word * 8, from, is_wanted);
  }
}

struct Extent {
  int first, last;  // positions, both included
};

// Walks the units [begin, end) in runs, each with a state of its own: last_of_run(unit) is where the run that begins with the unit ends, emit(state, unit) gets
// its state. Positions of `tile` are fetched; a unit beyond `warp_last` is skipped by this warp. The ring and the queries must not be in use any more by anyone of
// the team; the queries may still be on their way: the first barrier is in here.
template <class T, int D, int M, bool is_block, class LastOfRun, class Emit>
__device__ __forceinline__ void walk(const Cells<T>& cells, T* ring, const T* queries, int begin, int end, Extent tile, int warp_last, const Reach<M>& reach,
                                     const Scoring& scoring, Team team, LastOfRun&& last_of_run, Emit&& emit) {
  constexpr int ahead = Shape<D>::num_slots - 1;
  const int lane = threadIdx.x & 31, stop = 2 * end;
#pragma unroll
  for (int i = 0; i < ahead; ++i) {
    if (2 * begin + i < stop) fill<T, D>(ring + i * Shape<D>::slot, cells, 2 * begin + i, tile.first, tile.last, team);
    cp_async_commit();
  }
  int slot = 0;
  const auto next_half = [&](int half) {  // waits for a half and queues the one that goes where the half before it was
    cp_async_wait<ahead - 1>();
    if constexpr (is_block) __syncthreads();  // everyone's copies have landed, and everyone is through with the slot that is filled next
    else __syncwarp();                        // as above
    const int free_slot = slot == 0 ? ahead : slot - 1;
    if (half + ahead < stop) fill<T, D>(ring + free_slot * Shape<D>::slot, cells, half + ahead, tile.first, tile.last, team);
    cp_async_commit();
    const T* here = ring + slot * Shape<D>::slot;
    slot = slot == ahead ? 0 : slot + 1;
    return here;
  };
  for (int unit = begin; unit < end;) {
    State<D, M> state;
    state.clear();
    const int run_end = min(end, last_of_run(unit) + 1);
#pragma unroll 1
    for (; unit < run_end; ++unit) {
      const bool is_needed = unit * kUnitLen <= warp_last;
      Weights<M> weights;
      const T* keys = next_half(2 * unit);
      if (is_needed) attend_keys<T, D, M>(state, weights, queries, keys, unit * kUnitLen, reach, scoring, lane);
      const T* values = next_half(2 * unit + 1);
      if (is_needed) attend_values<T, D, M>(state, weights, values, lane);
    }
    emit(state, unit - 1);
  }
}

inline Scoring scoring_of(const AttentionSpec& spec) {
  if (spec.softcap > 0) return {spec.softcap, spec.scale / spec.softcap, kLog2e};
  return {0.f, 0.f, spec.scale * kLog2e};
}

template <class T>
struct Sequences {  // of all rows: where each one's cells are
  const T* data;
  const int32_t *page_table, *sequences;
  int64_t page_table_width, page_stride, plane_stride, layer_offset;
  Divider page_size;
  int num_kv_heads;

  __device__ Cells<T> cells(int row, int kv_head) const {
    return {data + layer_offset + kv_head * plane_stride, page_table + sequences[row] * page_table_width, page_size, page_stride,
            num_kv_heads * plane_stride};
  }
};

template <class T>
Sequences<T> sequences_of(const Pool& pool, const AttentionSpec& spec, const StepRows& rows) {
  const int64_t plane = pool.page_size * pool.head_dim, layer = 2 * pool.num_kv_heads * plane;
  return {reinterpret_cast<const T*>(pool.data), rows.page_table, rows.sequences,     rows.page_table_width, pool.num_layers * layer, plane,
          spec.layer * layer,                    divider(static_cast<int>(pool.page_size)), static_cast<int>(pool.num_kv_heads)};
}

inline bool is_aligned(const Matrix& matrix) {
  const int64_t width = matrix.type == static_cast<int64_t>(DType::f32) ? 4 : 2;
  return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.stride * width % 16 == 0;
}

inline bool is_valid(const Matrix& q, const AttentionSpec& spec, const Pool& pool) {
  return is_aligned(q) && reinterpret_cast<uintptr_t>(pool.data) % 16 == 0 && pool.num_kv_heads > 0 && spec.num_heads % pool.num_kv_heads == 0 &&
         spec.scale > 0 && pool.page_size > 0 && spec.layer >= 0 && spec.layer < pool.num_layers;
}

// Calls action with the pool's type and head size as template arguments: action(Tag<T, D>{}).
template <class T, int D>
struct Tag {
  using Type = T;
  static constexpr int head_dim = D;
};

template <class T, class Action>
int with_head_dim(int64_t head_dim, Action&& action) {
  switch (head_dim) {
    case 64: return action(Tag<T, 64>{});
    case 80: return action(Tag<T, 80>{});
    case 256: return action(Tag<T, 256>{});
#ifndef PYSERVE_FEW_HEAD_DIMS  // the sanitizers' builds: the sizes with two and three slots, and the one that is no multiple of 32
    case 96: return action(Tag<T, 96>{});
    case 128: return action(Tag<T, 128>{});
#endif
    default: return kInvalid;
  }
}

template <class Action>
int with_pool_type(const Pool& pool, Action&& action) {
  if (pool.type == DType::bf16) return with_head_dim<__nv_bfloat16>(pool.head_dim, action);
#ifndef PYSERVE_FEW_HEAD_DIMS
  if (pool.type == DType::f16) return with_head_dim<__half>(pool.head_dim, action);
#endif
  return kInvalid;
}

}  // namespace pyserve::cuda
