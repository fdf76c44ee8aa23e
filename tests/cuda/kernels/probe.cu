// Feeds raw register fragments to the wrappers of ptx.cuh, so that a test can check the layouts: against an independent formula here, against the emulator's
// software bodies on a GPU.
#include "ptx.cuh"

namespace {

using namespace pyserve::cuda;

enum class Kind { bf16, f16 };

template <Kind kind>
__global__ void mma_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  const int lane = threadIdx.x;
  uint32_t a_part[4], b_part[2];
  float sum[4];
  for (int i = 0; i < 4; ++i) a_part[i] = a[lane * 4 + i];
  for (int i = 0; i < 2; ++i) b_part[i] = b[lane * 2 + i];
  for (int i = 0; i < 4; ++i) sum[i] = c[lane * 4 + i];
  if constexpr (kind == Kind::bf16) {
    mma_m16n8k16_bf16(sum, a_part, b_part);
  } else {
    mma_m16n8k16_f16(sum, a_part, b_part);
  }
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}

__global__ void mma_s8_kernel(const uint32_t* a, const uint32_t* b, const int32_t* c, int32_t* d) {
  const int lane = threadIdx.x;
  uint32_t a_part[4], b_part[2];
  int32_t sum[4];
  for (int i = 0; i < 4; ++i) a_part[i] = a[lane * 4 + i];
  for (int i = 0; i < 2; ++i) b_part[i] = b[lane * 2 + i];
  for (int i = 0; i < 4; ++i) sum[i] = c[lane * 4 + i];
  mma_m16n8k32_s8(sum, a_part, b_part);
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}

template <bool is_transposed>
__global__ void ldmatrix_kernel(const uint4* rows /* [32] */, uint32_t* out /* [32, 4] */, uint32_t* out_of_two /* [32, 2] */) {
  PYSERVE_SHARED(uint4, tile, [32]);
  const int lane = threadIdx.x;
  uint32_t four[4], two[2];
  tile[lane] = rows[lane];
  __syncwarp();
  if constexpr (is_transposed) {
    ldmatrix_x4_trans(four, &tile[lane]);
    ldmatrix_x2_trans(two, &tile[lane]);
  } else {
    ldmatrix_x4(four, &tile[lane]);
    ldmatrix_x2(two, &tile[lane]);
  }
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = four[i];
  for (int i = 0; i < 2; ++i) out_of_two[lane * 2 + i] = two[i];
}

}  // namespace

extern "C" int probe_mma(int is_f16, const uint32_t* a, const uint32_t* b, const float* c, float* d, cudaStream_t stream) {
  return launch(is_f16 ? mma_kernel<Kind::f16> : mma_kernel<Kind::bf16>, dim3(1), dim3(32), 0, stream, a, b, c, d);
}
extern "C" int probe_mma_s8(const uint32_t* a, const uint32_t* b, const int32_t* c, int32_t* d, cudaStream_t stream) {
  return launch(mma_s8_kernel, dim3(1), dim3(32), 0, stream, a, b, c, d);
}
extern "C" int probe_ldmatrix(int is_transposed, const uint4* rows, uint32_t* out, uint32_t* out_of_two, cudaStream_t stream) {
  return launch(is_transposed ? ldmatrix_kernel<true> : ldmatrix_kernel<false>, dim3(1), dim3(32), 0, stream, rows, out, out_of_two);
}
