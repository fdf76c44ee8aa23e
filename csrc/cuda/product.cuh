// What every product that is made of mma tiles shares: the eight spans of the columns, and how results reach memory.
//
// Two kernels make each product: a narrow one for few rows of activations, a warp for each span, and a tiled one for many, which walks the spans one after the
// other. Both add the same numbers in the same order, so which one ran, and what other rows there were, cannot be seen in a row's bits (R37). Attention has the
// same property (attention.cuh), and so have the kernels by row: there is no exact mode to switch on.
#pragma once
#include "rows.cuh"

namespace pyserve::cuda {

constexpr int kSpans = 8, kMmaRows = 16, kMmaCols = 8;  // of weights, of activations
constexpr int kNarrowRows = 32;                         // up to so many rows of activations the narrow kernel reads the weights once

// Where a span of `count` steps begins; span 8 stands for the end.
__device__ __forceinline__ int span_start(int span, int count) { return static_cast<int>(static_cast<int64_t>(span) * count / kSpans); }

struct Output {
  float* data;
  int64_t stride;
  const float* bias;
  bool accumulate;

  __device__ __forceinline__ void store(int64_t m, int row, float sum) const {
    if (bias != nullptr) sum = __fadd_rn(sum, bias[row]);
    float* to = data + m * stride + row;
    *to = accumulate ? __fadd_rn(*to, sum) : sum;
  }
};

// The end of a narrow kernel of eight warps: warp w has the sums of span w, sums[n][i] of weight row lane / 4 + 8 (i / 2) and activation row 8 n + lane % 4 * 2 + i % 2.
template <int N>
__device__ __forceinline__ void add_spans(const float (&sums)[N][4], int first_weight, int num_weights, int first_row, int num_rows, const Output& out) {
  PYSERVE_SHARED(float, partial, [kSpans][kMmaCols * N][kMmaRows + 1]);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][kMmaCols * n + (lane & 3) * 2 + (i & 1)][(lane >> 2) + 8 * (i >> 1)] = sums[n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < kMmaCols * N * kMmaRows; i += 32 * kSpans) {
    const int m = i / kMmaRows, row = first_weight + i % kMmaRows;
    if (first_row + m >= num_rows || row >= num_weights) continue;
    float sum = 0.f;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) sum = __fadd_rn(sum, partial[span][m][i % kMmaRows]);
    out.store(first_row + m, row, sum);
  }
}

// Eight warps of a tiled kernel: two by the weights, four by the activations.
constexpr int kTiledWarps = 8, kTiledThreads = 32 * kTiledWarps, kWeightWarps = 2, kRowWarps = 4;

// A tiled kernel's sums: a warp has M tiles of 16 weight rows and N of 8 activation rows. Totals lie in shared memory, [values][threads]: each thread has its own,
// touches them eight times, and keeps its registers for the span.
template <int M, int N>
struct TileSums {
  static constexpr int total_bytes = M * N * 4 * kTiledThreads * 4;
  float span[M][N][4];
  float* total;

  __device__ __forceinline__ explicit TileSums(float* totals) : total(totals + threadIdx.x) {
    each([this](int place, float& sum) { sum = total[place] = 0.f; });
  }
  // To be called when `done` of `count` steps are added; returns the span that the next step belongs to.
  __device__ __forceinline__ int after_step(int current, int done, int count) {
    if (done < span_start(current + 1, count)) return current;
    each([this](int place, float& sum) { total[place] = __fadd_rn(total[place], sum), sum = 0.f; });
    while (current < kSpans && span_start(current + 1, count) <= done) ++current;  // spans may be empty
    return current;
  }
  __device__ __forceinline__ void store(int first_weight, int num_weights, int first_row, int num_rows, const Output& out) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int weight = first_weight + kMmaRows * m + (lane >> 2) + 8 * (i >> 1), row = first_row + kMmaCols * n + (lane & 3) * 2 + (i & 1);
          if (weight < num_weights && row < num_rows) out.store(row, weight, total[((m * N + n) * 4 + i) * kTiledThreads]);
        }
  }

 private:
  template <class Action>
  __device__ __forceinline__ void each(Action&& action) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) action(((m * N + n) * 4 + i) * kTiledThreads, span[m][n][i]);
  }
};

// The tiles that a grid of blocks needs, [activation tiles, weight tiles]: neighbours share weights.
inline dim3 tiled_grid(int64_t num_weights, int64_t num_rows, int tile_weights, int tile_rows) {
  return dim3(static_cast<unsigned>((num_rows + tile_rows - 1) / tile_rows), static_cast<unsigned>((num_weights + tile_weights - 1) / tile_weights));
}

inline bool is_tile(int64_t tile) { return tile == 0 || tile == 64 || tile == 128; }

// Large tiles read less, small ones occupy a device sooner and need less shared memory; either gives the same bits. `tile` 0 leaves the choice to this function.
inline bool is_large(int64_t tile, int64_t num_weights, int64_t num_rows, int64_t shared_bytes) {
  constexpr int64_t enough_blocks = 128;
  if (tile != 0) return tile == 128;
  const dim3 grid = tiled_grid(num_weights, num_rows, 128, 128);
  int device = 0, limit = 0;
  return static_cast<int64_t>(grid.x) * grid.y >= enough_blocks && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess && limit >= shared_bytes;
}

}  // namespace pyserve::cuda
