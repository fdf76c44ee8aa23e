// activation(gate) * up, to f32 and, where a quantised product reads it, int8.
//
// One warp for each 32 columns of a row: each lane has one, and a warp's columns are one block of the int8 half. No value depends on another one, except for that
// block's scale; so nothing depends on the company (R37).
//
// Layout: gate_up [num_rows, 2 * width], gate first; out [num_rows, width]. With the int8 half, width is a multiple of 32.
// silu: x / (1 + exp(-x)), right at both infinities. gelu_tanh: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
// Not handled: other activations, clamped gates.
// Not run on hardware so far: proved on the emulator of tests/cuda.
#include "rows.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float activate(Activation kind, float x) {
  if (kind == Activation::silu) return __fdiv_rn(x, 1.f + expf(-x));
  const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.f + tanhf(inner));
}

__global__ void __launch_bounds__(kThreads) gated_activation_kernel(Activation kind, const float* gate_up, Activations out, int64_t num_blocks) {
  const int width = static_cast<int>(out.width), blocks_a_row = (width + kBlockLen - 1) / kBlockLen, lane = threadIdx.x & 31;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (block >= num_blocks) return;
  const int64_t row = block / blocks_a_row;
  const int column = static_cast<int>(block % blocks_a_row) * kBlockLen + lane;
  const bool is_inside = column < width;
  const float* gate = gate_up + row * 2 * width + column;
  const float value = is_inside ? __fmul_rn(activate(kind, gate[0]), gate[width]) : 0.f;
  if (is_inside) out.f32[row * width + column] = value;
  if (out.q8 != nullptr) quantise_block(out, block, value, lane);
}

}  // namespace

extern "C" int pyserve_cuda_gated_activation(int64_t kind, const float* gate_up, const Activations* out, int64_t num_rows, void* stream) {
  if (num_rows == 0) return 0;
  const auto activation = static_cast<Activation>(kind);
  if (!is_valid(*out) || (activation != Activation::silu && activation != Activation::gelu_tanh)) return kInvalid;
  const int64_t num_blocks = num_rows * ((out->width + kBlockLen - 1) / kBlockLen), warps = kThreads / 32;
  return launch(gated_activation_kernel, dim3(static_cast<unsigned>((num_blocks + warps - 1) / warps)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream),
                activation, gate_up, *out, num_blocks);
}

}  // namespace pyserve::cuda
