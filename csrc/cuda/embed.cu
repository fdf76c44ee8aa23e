// Rows picked out of a matrix: an embedding table in its packed form, and the rows whose logits are wanted.
//
// One block a row, a thread for each column in turn. A value is computed by itself, as csrc/cpu/embed.cpp does, bit for bit.
//
// Layout: floats as in the file, [rows, cols]; quantised types as in packed.cuh.
// Not handled: types that the products do not have either.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "packed.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ float half_at(const uint8_t* at) { return __half2float(*reinterpret_cast<const __half*>(at)); }

template <class W>
__device__ __forceinline__ float value_at(const uint8_t* data, int64_t row, int column, int cols) {
  const int r = static_cast<int>(row % kTileRows), block = column % kPairCols / kBlockLen, inner = column % kBlockLen;
  const int64_t num_records = (cols + kPairCols - 1) / kPairCols;
  const uint8_t* record = data + (row / kTileRows * num_records + column / kPairCols) * kRecordBytes<W>;
  const int lane = r % 8 * 4 + inner % 16 / 4, word = r / 8 + 2 * (inner / 16), byte = lane * 16 + word * 4 + inner % 4;
  const int quant = W::is_4bit ? record[byte] >> (4 * block) & 15 : static_cast<int8_t>(record[block * 512 + byte]);
  const uint8_t* scale = record + W::quant_bytes + ((block * 8 + r % 8) * 2 + r / 8) * 2;
  const int offset = W::is_4bit && !W::has_min ? 8 : 0;
  const float value = __fmul_rn(half_at(scale), static_cast<float>(quant - offset));
  return W::has_min ? __fadd_rn(value, half_at(scale + kScaleBytes)) : value;
}

template <class W>
__global__ void __launch_bounds__(kThreads) embed_kernel(const uint8_t* table, const int32_t* tokens, int cols, float factor, float* out) {
  const int64_t token = tokens[blockIdx.x];
  float* to = out + static_cast<int64_t>(blockIdx.x) * cols;
  for (int column = threadIdx.x; column < cols; column += kThreads) to[column] = __fmul_rn(value_at<W>(table, token, column, cols), factor);
}

template <class T>
__global__ void __launch_bounds__(kThreads) embed_float_kernel(const T* table, const int32_t* tokens, int cols, float factor, float* out) {
  const T* from = table + static_cast<int64_t>(tokens[blockIdx.x]) * cols;
  float* to = out + static_cast<int64_t>(blockIdx.x) * cols;
  for (int column = threadIdx.x; column < cols; column += kThreads) to[column] = __fmul_rn(to_float(from[column]), factor);
}

}  // namespace

extern "C" int pyserve_cuda_embed(const PackedWeight* table, const int32_t* tokens, int64_t num_rows, float scale, float* out, void* stream) {
  if (num_rows == 0) return 0;
  const dim3 grid(static_cast<unsigned>(num_rows)), block(kThreads);
  const auto on = static_cast<cudaStream_t>(stream);
  const int cols = static_cast<int>(table->cols);
  const int error = with_float_type(static_cast<int64_t>(table->type), kNoSuchType, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    return launch(embed_float_kernel<T>, grid, block, 0, on, reinterpret_cast<const T*>(table->data), tokens, cols, scale, out);
  });
  if (error != kNoSuchType) return error;
  return with_type(static_cast<int64_t>(table->type), kInvalid, [&](auto tag) {
    return launch(embed_kernel<typename decltype(tag)::Type>, grid, block, 0, on, table->data, tokens, cols, scale, out);
  });
}

extern "C" int pyserve_cuda_take_rows(const float* x, int64_t width, const int32_t* rows, int64_t num_rows, float* out, void* stream) {
  if (num_rows == 0) return 0;
  return launch(embed_float_kernel<float>, dim3(static_cast<unsigned>(num_rows)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), x, rows,
                static_cast<int>(width), 1.f, out);
}

}  // namespace pyserve::cuda
