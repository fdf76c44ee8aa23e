#include <algorithm>

#include "linear_kernels.h"

namespace pyserve {

void gated_activation(Activation kind, const float* gate_up, const Activations& out, int64_t num_rows, Share share) {
  const LinearKernels& kernels = linear_kernels();
  const int64_t width = out.width, pieces = ceil_div(width, kBlock);  // a row is cut too: with one row, every thread has work
  const Range part = part_of(num_rows * pieces, share);
  for (int64_t at = part.begin; at < part.end;) {
    const int64_t m = at / pieces, first = at % pieces, last = std::min(pieces, first + part.end - at);
    const int64_t column = first * kBlock, count = std::min(width, last * kBlock) - column, offset = m * width + column;
    const float* gate = gate_up + m * 2 * width + column;
    kernels.gated(kind, gate, gate + width, out.f32 + offset, count);
    if (out.q8) kernels.quantise(out.f32 + offset, count, out.q8 + offset, out.q8_scale + offset / kBlock, out.q8_sum + offset / kBlock);
    at += last - first;
  }
}

}  // namespace pyserve
