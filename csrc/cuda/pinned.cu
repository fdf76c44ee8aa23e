// Host memory that the device reaches by itself: only then does a copy go on behind the caller's back.
#include "driver.cuh"

namespace pyserve::cuda {

extern "C" {

int pyserve_cuda_pin(void* memory, int64_t num_bytes) {
  if (memory == nullptr || num_bytes <= 0) return kRefused;
  OwnErrors own;
  return cudaHostRegister(memory, static_cast<size_t>(num_bytes), cudaHostRegisterPortable | cudaHostRegisterMapped);
}

int pyserve_cuda_unpin(void* memory) {
  OwnErrors own;
  return cudaHostUnregister(memory);
}

// Both ends of the real buffer, not of a small probe: large registrations are what systems turn down.
int pyserve_cuda_is_pinned(const void* memory, int64_t num_bytes) {
  if (memory == nullptr || num_bytes <= 0) return 0;
  OwnErrors own;
  const char* first = static_cast<const char*>(memory);
  for (const char* byte : {first, first + num_bytes - 1}) {
    cudaPointerAttributes attributes = {};
    if (cudaPointerGetAttributes(&attributes, byte) != cudaSuccess || attributes.type != cudaMemoryTypeHost) return 0;
  }
  return 1;
}
}

}  // namespace pyserve::cuda
