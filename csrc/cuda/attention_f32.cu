// Attention over KV in f32: any rows, prompts and decode alike, without tensor cores. Plain and right; for models that are asked to keep their cache in full.
//
// A block for each row and query head. The keys are walked in units of 64 positions counted from position 0 (tiles.h); warp w of eight takes the units w, w + 8, ..
// A unit: each lane has the scores of two keys, dimensions in ascending order; the unit's maximum and weights, their sum over the lanes by a tree; values are
// added key after key in ascending order, a lane having the dimensions lane, lane + 32, .. The unit is merged into the warp's state as attention.cuh does it, the
// eight states in order at the end.
//
// Exactness (R37): units, warps and orders follow from the row's position alone; there is no other kernel for the same pool.
//
// Cells that the row does not see are never read. Layout: as attention.cuh; q and out any of f32, f16, bf16; head_dim a multiple of 4, at most 256.
// Not handled: grouped heads reading K and V once, one long sequence spread over several blocks.
// Not run on hardware so far: proved on the emulator of tests/cuda. No time has been measured.
#include "attention.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kWarps = 8, kMaxHeadDim = 256, kColumns = kMaxHeadDim / 32;

struct FullArguments {
  Matrix q, out;
  Sequences<float> sequences;
  Scoring scoring;
  const int32_t* positions;
  int num_heads, head_dim, window;
};

__device__ const float* cell_at(const Cells<float>& cells, int position, int head_dim, bool is_value) {
  const int page = divide(position, cells.page_size), place = position - page * cells.page_size.divisor;
  return cells.plane + cells.pages[page] * cells.page_stride + (is_value ? cells.value_offset : 0) + static_cast<int64_t>(place) * head_dim;
}

__device__ float value_of(const Matrix& matrix, int64_t offset) {
  if (matrix.type == static_cast<int64_t>(DType::f32)) return static_cast<const float*>(matrix.data)[offset];
  if (matrix.type == static_cast<int64_t>(DType::f16)) return __half2float(static_cast<const __half*>(matrix.data)[offset]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(matrix.data)[offset]);
}

struct FullState {  // of a warp: column lane + 32 i of the head
  float o[kColumns];
  float largest, sum;

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] = 0.f;
    largest = -INFINITY, sum = 0.f;
  }
  __device__ void add(const float (&other)[kColumns], float other_largest, float other_sum, float exponent) {
    const Factors factors = merge_factors(largest, sum, other_largest, other_sum, exponent);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] = merge(o[i], other[i], factors);
  }
};

// The score of one key; minus infinity where the row does not see it.
__device__ float score_of(const FullArguments& a, const Cells<float>& cells, const float* query, Extent seen, int position) {
  if (position < seen.first || position > seen.last) return -INFINITY;
  const float4* key = reinterpret_cast<const float4*>(cell_at(cells, position, a.head_dim, false));
  float dot = 0.f;
  for (int i = 0; i < a.head_dim / 4; ++i) {
    const float4 k = __ldg(key + i);
    dot = __fmaf_rn(query[4 * i], k.x, dot), dot = __fmaf_rn(query[4 * i + 1], k.y, dot);
    dot = __fmaf_rn(query[4 * i + 2], k.z, dot), dot = __fmaf_rn(query[4 * i + 3], k.w, dot);
  }
  return a.scoring.softcap > 0.f ? a.scoring.softcap * tanhf(dot * a.scoring.inner) : dot;
}

__device__ float warp_largest(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ float warp_total(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ void add_unit(FullState& state, const FullArguments& a, const Cells<float>& cells, const float* query, Extent seen, int unit, int lane) {
  const int first = unit * kUnitLen;
  const float scores[2] = {score_of(a, cells, query, seen, first + lane), score_of(a, cells, query, seen, first + 32 + lane)};
  const float largest = warp_largest(fmaxf(scores[0], scores[1]));
  float weights[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) weights[half] = exp2_approx(__fmul_rn(scores[half] - largest, a.scoring.exponent));
  float added[kColumns] = {};
  const int begin = max(first, seen.first), end = min(first + kUnitLen - 1, seen.last);
  for (int position = begin; position <= end; ++position) {
    const int at = position - first;
    const float weight = __shfl_sync(0xffffffffu, at < 32 ? weights[0] : weights[1], at & 31);
    const float* value = cell_at(cells, position, a.head_dim, true);
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (lane + 32 * i < a.head_dim) added[i] = __fmaf_rn(weight, __ldg(value + lane + 32 * i), added[i]);
  }
  state.add(added, largest, warp_total(weights[0] + weights[1]), a.scoring.exponent);
}

// grid (rows, query heads)
__global__ void __launch_bounds__(32 * kWarps) full_kernel(FullArguments a) {
  PYSERVE_SHARED(float, query, [kMaxHeadDim]);
  PYSERVE_SHARED(float, outputs, [kWarps][kMaxHeadDim]);
  PYSERVE_SHARED(float, maxima, [kWarps]);
  PYSERVE_SHARED(float, sums, [kWarps]);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, row = blockIdx.x, head = blockIdx.y, position = a.positions[row];
  const Extent seen = {first_visible(position, a.window), position};
  const UnitRange units = units_of(position, a.window);
  const Cells<float> cells = a.sequences.cells(row, head / (a.num_heads / a.sequences.num_kv_heads));
  for (int i = threadIdx.x; i < a.head_dim; i += 32 * kWarps) query[i] = value_of(a.q, row * a.q.stride + static_cast<int64_t>(head) * a.head_dim + i);
  __syncthreads();  // the query is there
  FullState state;
  state.clear();
  const int end = units.first + units.count, first = units.first + (warp - units.first % kWarps + kWarps) % kWarps;
  for (int unit = first; unit < end; unit += kWarps) add_unit(state, a, cells, query, seen, unit, lane);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) outputs[warp][lane + 32 * i] = state.o[i];
  if (lane == 0) maxima[warp] = state.largest, sums[warp] = state.sum;
  __syncthreads();  // everyone's state is there
  if (warp != 0) return;
  state.clear();
  for (int w = 0; w < kWarps; ++w) {
    float other[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) other[i] = outputs[w][lane + 32 * i];
    float sum = sums[w];
    state.add(other, maxima[w], sum, a.scoring.exponent);
  }
  const float scale = inverse(state.sum);
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (lane + 32 * i < a.head_dim) store_output(a.out, row * a.out.stride + static_cast<int64_t>(head) * a.head_dim + lane + 32 * i, state.o[i] * scale);
}

}  // namespace

extern "C" int pyserve_cuda_attention_f32(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out, void* stream) {
  if (rows->num_rows == 0) return 0;
  if (!is_valid(*q, *spec, *pool) || pool->type != DType::f32 || pool->head_dim % 4 != 0 || pool->head_dim > kMaxHeadDim || spec->num_heads > 65535)
    return kInvalid;
  const FullArguments arguments = {*q,
                                   *out,
                                   sequences_of<float>(*pool, *spec, *rows),
                                   scoring_of(*spec),
                                   rows->positions,
                                   static_cast<int>(spec->num_heads),
                                   static_cast<int>(pool->head_dim),
                                   static_cast<int>(spec->window)};
  const dim3 grid(static_cast<unsigned>(rows->num_rows), static_cast<unsigned>(spec->num_heads));
  return launch(full_kernel, grid, dim3(32 * kWarps), 0, static_cast<cudaStream_t>(stream), arguments);
}

}  // namespace pyserve::cuda
