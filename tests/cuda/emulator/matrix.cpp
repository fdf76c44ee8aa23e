// mma.sync and ldmatrix in software. Register layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" and ".m16n8k32", and "ldmatrix".
#include <cstring>

#include "engine.h"

namespace emulator {

namespace {

float bf16_value(uint32_t bits) {
  const uint32_t wide = bits << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}

float f16_value(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 0) return (sign ? -1.f : 1.f) * static_cast<float>(fraction) * 0x1p-24f;
  const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}

// d[16, 8] += a[16, 16] x b[8, 16] transposed. Lane l holds of a the rows l/4 and l/4 + 8, the columns 2 (l%4) + {0, 1} and those + 8.
struct FloatTile {
  uint32_t a[4], b[2];
  float d[4];
  bool is_bf16;

  static void finish(Warp& warp, uint32_t) {
    float a[16][16], b[8][16];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const FloatTile& tile = *static_cast<FloatTile*>(warp.payloads[lane]);
      const auto value = [&](uint32_t pair, int half) { return tile.is_bf16 ? bf16_value(pair >> 16 * half & 0xffff) : f16_value(pair >> 16 * half & 0xffff); };
      const int row = lane / 4, col = lane % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i) a[row + i % 2 * 8][col + half + i / 2 * 8] = value(tile.a[i], half);
        for (int i = 0; i < 2; ++i) b[row][col + half + i * 8] = value(tile.b[i], half);
      }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      FloatTile& tile = *static_cast<FloatTile*>(warp.payloads[lane]);
      for (int i = 0; i < 4; ++i) {
        const float* x = a[lane / 4 + i / 2 * 8];
        const float* y = b[lane % 4 * 2 + i % 2];
        float sum = tile.d[i];
        for (int k = 0; k < 16; ++k) sum += x[k] * y[k];
        tile.d[i] = sum;
      }
    }
  }
};

// d[16, 8] += a[16, 32] x b[8, 32] transposed, of int8. Lane l holds of a the rows l/4 and l/4 + 8, the columns 4 (l%4) + {0..3} and those + 16.
struct ByteTile {
  uint32_t a[4], b[2];
  int32_t d[4];

  static void finish(Warp& warp, uint32_t) {
    int a[16][32], b[8][32];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const ByteTile& tile = *static_cast<ByteTile*>(warp.payloads[lane]);
      const int row = lane / 4, col = lane % 4 * 4;
      for (int byte = 0; byte < 4; ++byte) {
        for (int i = 0; i < 4; ++i) a[row + i % 2 * 8][col + byte + i / 2 * 16] = static_cast<int8_t>(tile.a[i] >> 8 * byte);
        for (int i = 0; i < 2; ++i) b[row][col + byte + i * 16] = static_cast<int8_t>(tile.b[i] >> 8 * byte);
      }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      ByteTile& tile = *static_cast<ByteTile*>(warp.payloads[lane]);
      for (int i = 0; i < 4; ++i) {
        const int* x = a[lane / 4 + i / 2 * 8];
        const int* y = b[lane % 4 * 2 + i % 2];
        for (int k = 0; k < 32; ++k) tile.d[i] += x[k] * y[k];
      }
    }
  }
};

// Matrix i has its rows' addresses in lanes 8 i .. 8 i + 7; lane l gets row l/4, columns 2 (l%4) + {0, 1} of it, or of its transpose.
struct MatrixLoad {
  const void* row;
  int num_matrices;
  bool is_transposed;
  uint32_t* out;
  const void** sources;

  static void finish(Warp& warp, uint32_t) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      MatrixLoad& load = *static_cast<MatrixLoad*>(warp.payloads[lane]);
      for (int i = 0; i < load.num_matrices; ++i) {
        load.out[i] = 0;
        for (int half = 0; half < 2; ++half) {
          const int along = lane % 4 * 2 + half, across = lane / 4;
          const int row = load.is_transposed ? along : across, col = load.is_transposed ? across : along;
          const char* source = static_cast<const char*>(static_cast<MatrixLoad*>(warp.payloads[8 * i + row])->row) + 2 * col;
          load.sources[2 * i + half] = source;
          load.out[i] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(source)) << 16 * half;
        }
      }
    }
  }
};

void check_whole_warp(const char* what, Site site) {
  if (engine.current->warp->existing != 0xffffffffu) fail("%s at %s:%d in a warp of fewer than 32 threads", what, site.file, site.line);
}

}  // namespace

void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, bool is_bf16, Site site) {
  check_whole_warp("mma.sync", site);
  FloatTile tile{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d[0], d[1], d[2], d[3]}, is_bf16};
  meet(0xffffffffu, &tile, &FloatTile::finish, false, "mma.sync", site);
  for (int i = 0; i < 4; ++i) d[i] = tile.d[i];
}

void mma_m16n8k32_s8(int32_t* d, const uint32_t* a, const uint32_t* b, Site site) {
  check_whole_warp("mma.sync", site);
  ByteTile tile{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d[0], d[1], d[2], d[3]}};
  meet(0xffffffffu, &tile, &ByteTile::finish, false, "mma.sync", site);
  for (int i = 0; i < 4; ++i) d[i] = tile.d[i];
}

void load_matrices(uint32_t* out, const void* row, int num_matrices, bool is_transposed, const void** sources, Site site) {
  check_whole_warp("ldmatrix", site);
  const bool gives_address = engine.current->lane < static_cast<unsigned>(8 * num_matrices);
  if (gives_address && reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix at %s:%d: row address %p is not 16-byte aligned", site.file, site.line, row);
  MatrixLoad load{row, num_matrices, is_transposed, out, sources};
  meet(0xffffffffu, &load, &MatrixLoad::finish, false, "ldmatrix", site);
}

}  // namespace emulator
