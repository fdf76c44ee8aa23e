// The kernels' inner loops, once per instruction set. linear_avx512.cpp, linear_avx2.cpp and linear_generic.cpp compile the same templates
// (linear_quantised.h, linear_float.h, linear_rows.h) over their own vector type V; linear.cpp picks a table at run time.
#pragma once
#include <cstdint>

#include "isa.h"
#include "linear_format.h"

namespace pyserve {

constexpr int kMaxTileM = 6;  // rows of activations that one pass over a weight tile can serve

// Activations of M rows, block by block, as the quantised product reads them:
//   int8 q8[M][32], f32 scale[M], then f32 scale * sum [M] (types with a minimum) or i32 -offset * sum [2][M] (first and second half of the block; the
//   whole block's in [0] unless the type has a scale per half).
constexpr int64_t kActivationBlockBytes = kBlock + 3 * 4;  // a row's

struct Ahead {        // what to ask memory for meanwhile
  const uint8_t* at;
  int lines;          // of 64 bytes, for each block of columns of a quantised tile, each pair of columns of a float one, and each pass
};

struct TileOutput {
  float* out;  // [M, 32] of rows `stride` floats apart
  int64_t stride;
  const float* bias;  // [32], or null
  bool accumulate;
};

struct LinearKernels {
  const char* name;
  int max_tile_m;
  int num_passes;  // over a tile's columns, for some of its rows each
  // M rows times one tile
  using Quantised = void (*)(const uint8_t* tile, Ahead ahead, int64_t num_blocks, const uint8_t* activations, const TileOutput& to);
  using Float = void (*)(const uint8_t* tile, Ahead ahead, int64_t cols, const float* x, int64_t x_stride, const TileOutput& to);
  Quantised quantised[8][kMaxTileM];  // [type - q8_0][M - 1]
  Float floats[3][kMaxTileM];         // [type][M - 1]
  void (*quantise)(const float* x, int64_t width, int8_t* q8, float* scale, int32_t* sum);
  void (*rms_norm)(const float* x, const float* weight, float eps, float* out, int64_t width);
  void (*gated)(Activation kind, const float* gate, const float* up, float* out, int64_t width);
  void (*exp_scaled)(const float* x, float shift, float divisor, float* out, int64_t width);  // exp((x - shift) / divisor)
  float (*largest)(const float* x, int64_t width);                                            // NaN where any is
};

// The table for isa().
const LinearKernels& linear_kernels();

extern const LinearKernels kGenericKernels;
#if PYSERVE_X86
extern const LinearKernels kAvx2Kernels;
extern const LinearKernels kAvx512Kernels;
#endif

}  // namespace pyserve
