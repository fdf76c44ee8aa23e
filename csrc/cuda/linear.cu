// Products with 8- and 4-bit weights for decode rows: out[m, n] (+)= sum_k x[m, k] * w[n, k] + bias[n], activations int8 by blocks of 32 columns.
//
// mma.m16n8k32 of int8: 16 weight rows by 8 activation rows by exactly one block of 32 columns, so that each product of blocks is an exact integer,
// scaled once. One CUDA block for 16 weight rows; its eight warps take pairs of blocks in turn (warp, warp + 8, ...), which keeps enough 16-byte loads in flight where
// there are few rows; then the warps' sums are added in order. Up to 32 activation rows share what is read of the weights.
//
// Exactness (R37): an output is, for each warp, one chain of fused products over its blocks in ascending order, then the eight sums in order; which other rows
// there are changes nothing. The definition (activations rounded as `quantise`, products of blocks exact) is that of csrc/cpu/linear.cpp; only the order differs.
//
// Layout of packed weights: packed.cuh.
//
// Not handled: other types, int8 sums over columns that are not a multiple of 32. Many rows (prompts) are right but leave most of the chip idle.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include <cstring>
#include <type_traits>

#include "packed.cuh"
#include "ptx.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kWarps = 8;

// One record's part of a lane: the A operands of two blocks, and scales (and minima) of rows g and g + 8.
template <class W>
struct Record {
  uint32_t quants[2][4];
  float scale[2][2], least[2][2];

  __device__ __forceinline__ void load(const uint8_t* record, int lane) {
    const uint4* words = reinterpret_cast<const uint4*>(record) + lane;
    put(0, __ldcs(words));
    if constexpr (W::is_4bit) split();
    else put(1, __ldcs(words + 32));
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      load_pair(scale[block], record + W::quant_bytes, block, lane);
      if constexpr (W::has_min) load_pair(least[block], record + W::quant_bytes + kScaleBytes, block, lane);
    }
  }

 private:
  __device__ __forceinline__ void put(int block, uint4 words) {
    quants[block][0] = words.x, quants[block][1] = words.y, quants[block][2] = words.z, quants[block][3] = words.w;
  }
  __device__ __forceinline__ void split() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      quants[1][i] = quants[0][i] >> 4 & 0x0f0f0f0fu;
      quants[0][i] &= 0x0f0f0f0fu;
    }
  }
  __device__ __forceinline__ static void load_pair(float (&to)[2], const uint8_t* scales, int block, int lane) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2*>(scales)[block * 8 + (lane >> 2)]);
    to[0] = pair.x, to[1] = pair.y;
  }
};

// One block of 8 activation rows: the B operand, and what belongs to this lane's two columns of the result.
struct Inputs {
  uint32_t q8[2];
  float scale[2];
  int sum[2];

  __device__ __forceinline__ void load(const Activations& x, int first_row, int num_rows, int block, int num_blocks, int lane) {
    const int row = first_row + (lane >> 2), column = block * kBlockLen + (lane & 3) * 4;
    const bool is_inside = block < num_blocks;
    const int8_t* from = x.q8 + row * x.width + column;
    q8[0] = is_inside && row < num_rows ? *reinterpret_cast<const uint32_t*>(from) : 0;
    q8[1] = is_inside && row < num_rows ? *reinterpret_cast<const uint32_t*>(from + 16) : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int result_row = first_row + (lane & 3) * 2 + i;
      const bool is_wanted = is_inside && result_row < num_rows;
      scale[i] = is_wanted ? x.q8_scale[static_cast<int64_t>(result_row) * num_blocks + block] : 0.f;
      sum[i] = is_wanted ? x.q8_sum[static_cast<int64_t>(result_row) * num_blocks + block] : 0;
    }
  }
};

template <class W>
__device__ __forceinline__ void add_block(float (&sums)[4], const Record<W>& record, int block, const Inputs& inputs) {
  int dot[4] = {};
  mma_m16n8k32_s8(dot, record.quants[block], inputs.q8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scale = record.scale[block][i >> 1], x_scale = inputs.scale[i & 1];
    const int sum = inputs.sum[i & 1];
    if constexpr (W::has_min) {
      const float value = __fmaf_rn(scale, __int2float_rn(dot[i]), __fmul_rn(record.least[block][i >> 1], __int2float_rn(sum)));
      sums[i] = __fmaf_rn(x_scale, value, sums[i]);
    } else {
      const int value = W::is_4bit ? dot[i] - 8 * sum : dot[i];
      sums[i] = __fmaf_rn(__fmul_rn(scale, x_scale), __int2float_rn(value), sums[i]);
    }
  }
}

struct Output {
  float* data;
  int64_t stride;
  const float* bias;
  bool accumulate;
};

// grid (tiles of 16 weight rows, tiles of 8 * N activation rows)
template <class W, int N>
__global__ void __launch_bounds__(32 * kWarps, N == 1 ? 4 : N == 2 ? 2 : 1)
    linear_kernel(const uint8_t* weights, int rows, int cols, Activations x, int num_rows, Output out) {
  PYSERVE_SHARED(float, partial, [kWarps][8 * N][kTileRows + 1]);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, first_row = blockIdx.y * 8 * N;
  const int num_blocks = cols / kBlockLen, num_records = (cols + kPairCols - 1) / kPairCols;
  const uint8_t* tile = weights + static_cast<int64_t>(blockIdx.x) * num_records * kRecordBytes<W>;
  float sums[N][4] = {};
#pragma unroll 2
  for (int at = warp; at < num_records; at += kWarps) {
    Record<W> record;
    record.load(tile + static_cast<int64_t>(at) * kRecordBytes<W>, lane);
#pragma unroll
    for (int block = 0; block < 2; ++block)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        Inputs inputs;
        inputs.load(x, first_row + 8 * n, num_rows, 2 * at + block, num_blocks, lane);
        add_block<W>(sums[n], record, block, inputs);
      }
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][8 * n + (lane & 3) * 2 + (i & 1)][(lane >> 2) + 8 * (i >> 1)] = sums[n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * N * kTileRows; i += 32 * kWarps) {
    const int m = i / kTileRows, row = blockIdx.x * kTileRows + i % kTileRows;
    if (first_row + m >= num_rows || row >= rows) continue;
    float sum = partial[0][m][i % kTileRows];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum = __fadd_rn(sum, partial[w][m][i % kTileRows]);
    if (out.bias != nullptr) sum = __fadd_rn(sum, out.bias[row]);
    float* to = out.data + (first_row + m) * out.stride + row;
    *to = out.accumulate ? __fadd_rn(*to, sum) : sum;
  }
}

// One warp for each block of 32 columns.
__global__ void __launch_bounds__(256) quantise_kernel(Activations x, int64_t num_blocks) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane = threadIdx.x & 31;
  if (block < num_blocks) quantise_block(x, block, x.f32[block * kBlockLen + lane], lane);
}

uint8_t file_quant(const uint8_t* quants, int column, bool is_4bit) {  // 4 bits: columns 0-15 in the low nibbles, 16-31 in the high ones
  if (!is_4bit) return quants[column];
  return column < 16 ? quants[column] & 15 : quants[column - 16] >> 4;
}

template <class W>
void pack_block(const uint8_t* from, int row, int block, uint8_t* record) {  // row of the tile, block of the record
  const uint8_t* quants = from + W::file_quants;
  for (int column = 0; column < kBlockLen; ++column) {
    const int lane = row % 8 * 4 + column % 16 / 4, word = row / 8 + 2 * (column / 16), byte = lane * 16 + word * 4 + column % 4;
    const uint8_t quant = file_quant(quants, column, W::is_4bit);
    if (W::is_4bit) record[byte] = static_cast<uint8_t>(record[byte] | quant << (4 * block));
    else record[block * 512 + byte] = quant;
  }
  const int at = W::quant_bytes + ((block * 8 + row % 8) * 2 + row / 8) * 2;
  std::memcpy(record + at, from, 2);
  if (W::has_min) std::memcpy(record + at + kScaleBytes, from + 2, 2);
}

template <class W>
int64_t packed_bytes_of(int64_t rows, int64_t cols) {
  return (rows + kTileRows - 1) / kTileRows * ((cols + kPairCols - 1) / kPairCols) * kRecordBytes<W>;
}

template <class W>
int run(const PackedWeight& weight, const Activations& x, int64_t num_rows, const Output& out, cudaStream_t stream) {
  const auto start = [&](auto n) {
    constexpr int N = decltype(n)::value;
    const dim3 grid(static_cast<unsigned>((weight.rows + kTileRows - 1) / kTileRows), static_cast<unsigned>((num_rows + 8 * N - 1) / (8 * N)));
    return launch(linear_kernel<W, N>, grid, dim3(32 * kWarps), 0, stream, weight.data, static_cast<int>(weight.rows), static_cast<int>(weight.cols), x,
                  static_cast<int>(num_rows), out);
  };
  if (num_rows <= 8) return start(std::integral_constant<int, 1>{});
  if (num_rows <= 16) return start(std::integral_constant<int, 2>{});
  return start(std::integral_constant<int, 4>{});
}

}  // namespace

extern "C" int64_t pyserve_cuda_packed_bytes(int64_t weight_type, int64_t rows, int64_t cols) {
  if (rows <= 0 || cols <= 0 || cols % kBlockLen != 0) return -1;
  return with_type(weight_type, int64_t{-1}, [&](auto tag) { return packed_bytes_of<typename decltype(tag)::Type>(rows, cols); });
}

extern "C" int pyserve_cuda_pack(int64_t weight_type, const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* packed) {
  const int64_t size = pyserve_cuda_packed_bytes(weight_type, rows, cols);
  if (size < 0) return kInvalid;
  std::memset(packed, 0, static_cast<size_t>(size));
  return with_type(weight_type, kInvalid, [&](auto tag) {
    using W = typename decltype(tag)::Type;
    const int64_t blocks = cols / kBlockLen, records = (cols + kPairCols - 1) / kPairCols;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t block = 0; block < blocks; ++block)
        pack_block<W>(raw + (row * blocks + block) * W::file_bytes, static_cast<int>(row % kTileRows), static_cast<int>(block % 2),
                      packed + (row / kTileRows * records + block / 2) * kRecordBytes<W>);
    return 0;
  });
}

extern "C" int pyserve_cuda_quantise(const Activations* x, int64_t num_rows, void* stream) {
  if (num_rows == 0) return 0;
  if (!is_valid(*x) || x->q8 == nullptr) return kInvalid;
  const int64_t num_blocks = num_rows * x->width / kBlockLen;
  return launch(quantise_kernel, dim3(static_cast<unsigned>((num_blocks + 7) / 8)), dim3(256), 0, static_cast<cudaStream_t>(stream), *x, num_blocks);
}

extern "C" int pyserve_cuda_linear(const PackedWeight* weight, const Activations* x, const float* bias, float* out, int64_t out_stride, int64_t num_rows,
                                   int64_t accumulate, void* stream) {
  if (num_rows == 0) return 0;
  const bool is_shaped = weight->rows > 0 && weight->cols > 0 && weight->cols == x->width && out_stride >= weight->rows && num_rows <= 65535 * 32;
  if (!is_shaped || !is_valid(*x) || x->q8 == nullptr || reinterpret_cast<uintptr_t>(weight->data) % 16 != 0) return kInvalid;
  const Output output = {out, out_stride, bias, accumulate != 0};
  return with_type(static_cast<int64_t>(weight->type), kInvalid, [&](auto tag) {
    return run<typename decltype(tag)::Type>(*weight, *x, num_rows, output, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace pyserve::cuda
