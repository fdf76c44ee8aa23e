#include "linear_kernels.h"

namespace pyserve {

void rms_norm(const float* x, const float* weight, float eps, const Activations& out, int64_t num_rows, Share share) {
  const LinearKernels& kernels = linear_kernels();
  const int64_t width = out.width, blocks = width / kBlock;
  const Range part = part_of(num_rows, share);
  for (int64_t m = part.begin; m < part.end; ++m) {
    kernels.rms_norm(x + m * width, weight, eps, out.f32 + m * width, width);
    if (out.q8) kernels.quantise(out.f32 + m * width, width, out.q8 + m * width, out.q8_scale + m * blocks, out.q8_sum + m * blocks);
  }
}

}  // namespace pyserve
