// Devices and memory.
#include "driver.cuh"

namespace pyserve::cuda {

extern "C" {

int64_t pyserve_cuda_num_devices() {
  OwnErrors own;
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int pyserve_cuda_use_device(int64_t index) {
  OwnErrors own;
  return cudaSetDevice(static_cast<int>(index));
}

int pyserve_cuda_device_limits(int64_t index, int64_t* num_sms, int64_t* shared_bytes) {
  OwnErrors own;
  int value = 0;
  cudaError_t error = cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, static_cast<int>(index));
  *num_sms = value;
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(index));
  *shared_bytes = value;
  return error;
}

int pyserve_cuda_memory_info(int64_t* free_bytes, int64_t* total_bytes) {
  OwnErrors own;
  size_t free = 0, total = 0;
  const cudaError_t error = cudaMemGetInfo(&free, &total);
  *free_bytes = static_cast<int64_t>(free);
  *total_bytes = static_cast<int64_t>(total);
  return error;
}

int pyserve_cuda_allocate(void** memory, int64_t num_bytes) {
  OwnErrors own;
  return cudaMalloc(memory, static_cast<size_t>(num_bytes));
}

int pyserve_cuda_free(void* memory) {
  OwnErrors own;
  return cudaFree(memory);
}

int pyserve_cuda_allocate_pinned(void** memory, int64_t num_bytes) {
  OwnErrors own;
  return cudaHostAlloc(memory, static_cast<size_t>(num_bytes), cudaHostAllocPortable | cudaHostAllocMapped);
}

int pyserve_cuda_free_pinned(void* memory) {
  OwnErrors own;
  return cudaFreeHost(memory);
}

int pyserve_cuda_copy(void* to, const void* from, int64_t num_bytes, int64_t to_host, void* stream) {
  OwnErrors own;
  return cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), to_host != 0 ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, as_stream(stream));
}

const char* pyserve_cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int pyserve_cuda_is_emulated() {
#ifdef __CUDACC__
  return 0;
#else
  return 1;
#endif
}
}

}  // namespace pyserve::cuda
