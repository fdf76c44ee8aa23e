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

// The value as the file has it: with its offset, or unsigned where there is a minimum.
template <class W>
__device__ __forceinline__ int quant_at(const uint8_t* record, int r, int block, int inner) {
  const int lane = r % 8 * 4 + inner % 16 / 4, word = r / 8 + 2 * (inner / 16), in_word = inner % 4, byte = lane * 16 + word * 4 + in_word;
  if constexpr (W::bits == 8) return static_cast<int8_t>(record[block * 512 + byte]);
  const uint8_t* upper = record + W::low_bytes;
  int quant = record[byte] >> 4 * block & 15;
  if constexpr (W::bits == 5) quant |= (upper[lane * 4 + in_word] >> (4 * block + word) & 1) << 4;
  if constexpr (W::bits == 6) quant |= (upper[lane * 8 + block * 4 + in_word] >> 2 * word & 3) << 4;
  return (quant ^ W::offset) - W::offset;
}

template <class W>
__device__ __forceinline__ float value_at(const uint8_t* data, int64_t row, int column, int cols) {
  const int r = static_cast<int>(row % kTileRows), at = column / kPairCols, block = column % kPairCols / kBlockLen, inner = column % kBlockLen;
  const uint8_t* tile = data + row / kTileRows * tile_bytes<W>(cols);
  const uint8_t *header = tile + header_at<W>(at), *record = tile + record_at<W>(at), *scales = record + W::quant_bytes;
  const int place = r % 8, which = r / 8;
  const float quant = static_cast<float>(quant_at<W>(record, r, block, inner));
  if constexpr (W::is_k) {
    constexpr int width = W::has_min ? 4 : 2;
    const uint8_t* small = scales + (block * 8 + place) * 4 + which;
    const float d = half_at(header + (place * width + which) * 2);
    if constexpr (W::has_halves) return __fmul_rn(__fmul_rn(d, static_cast<float>(static_cast<int8_t>(small[inner / 16 * 2]))), quant);
    const float least = __fmul_rn(half_at(header + (place * width + 2 + which) * 2), static_cast<float>(small[2]));
    return __fadd_rn(__fmul_rn(__fmul_rn(d, static_cast<float>(small[0])), quant), -least);
  } else {
    const uint8_t* scale = scales + ((block * 8 + place) * 2 + which) * 2;
    const float value = __fmul_rn(half_at(scale), quant);
    return W::has_min ? __fadd_rn(value, half_at(scale + 64)) : value;
  }
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
