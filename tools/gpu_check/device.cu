// What the checks need of a device besides pyserve's own launchers: memory, the clock, a measure of how fast memory can be read, and an allocator for numpy
// whose arrays both sides reach. Built with csrc/cuda by nvcc, or against the emulator for a dry run.
#include <cstring>
#include <vector>

#include "portable.cuh"

namespace {

__global__ void read_kernel(const uint4* data, int64_t num_vectors, uint32_t* sums) {
  uint32_t sum = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < num_vectors; i += 4 * step) {
    uint4 values[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) values[k] = __ldcs(data + i + k * step);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += values[k].x ^ values[k].y ^ values[k].z ^ values[k].w;
  }
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

enum class Kind : int64_t { device, pinned, managed };

// Freed blocks are kept by size for the next array: managed memory is slow to come by, and numpy asks often. Each starts with its size, which numpy's realloc
// does not say.
constexpr size_t kHeader = 256;
constexpr int kNumSizes = 48;
std::vector<void*> free_blocks[kNumSizes];  // of 2^i bytes; numpy calls with the interpreter's lock held

int size_class(size_t num_bytes) {
  int i = 9;
  while ((size_t{1} << i) < num_bytes + kHeader) ++i;
  return i;
}

void* managed(size_t num_bytes) {
  const int size = size_class(num_bytes);
  void* memory = nullptr;
  if (!free_blocks[size].empty()) {
    memory = free_blocks[size].back();
    free_blocks[size].pop_back();
  } else if (cudaMallocManaged(&memory, size_t{1} << size, cudaMemAttachGlobal) != cudaSuccess) {
    return nullptr;
  }
  std::memcpy(memory, &num_bytes, sizeof num_bytes);
  return static_cast<char*>(memory) + kHeader;
}

void give_back(void* memory) {
  char* block = static_cast<char*>(memory) - kHeader;
  size_t num_bytes = 0;
  std::memcpy(&num_bytes, block, sizeof num_bytes);
  free_blocks[size_class(num_bytes)].push_back(block);
}

}  // namespace

extern "C" {

int gpu_check_open(int64_t device) {
  const cudaError_t error = cudaSetDevice(static_cast<int>(device));
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}

int gpu_check_attributes(int32_t* num_sms, int32_t* shared_bytes, int32_t* major, int32_t* minor) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device);
  return error;
}

int gpu_check_allocate(void** memory, int64_t num_bytes, int64_t kind) {
  const size_t size = static_cast<size_t>(num_bytes);
  switch (static_cast<Kind>(kind)) {
    case Kind::device: return cudaMalloc(memory, size);
    case Kind::pinned: return cudaHostAlloc(memory, size, cudaHostAllocDefault);
    default: return cudaMallocManaged(memory, size, cudaMemAttachGlobal);
  }
}

int gpu_check_release(void* memory, int64_t kind) { return static_cast<Kind>(kind) == Kind::pinned ? cudaFreeHost(memory) : cudaFree(memory); }

int gpu_check_copy(void* to, const void* from, int64_t num_bytes) {  // done when it returns
  const cudaError_t error = cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault, nullptr);
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}

int gpu_check_synchronize() { return cudaDeviceSynchronize(); }

int gpu_check_leave_error() {  // someone else's, pending
  (void)cudaSetDevice(12345);
  return 0;
}
int gpu_check_pending_error() { return cudaPeekAtLastError(); }
int gpu_check_take_error() { return cudaGetLastError(); }

const char* gpu_check_error_name(int64_t error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

int gpu_check_clock_create(void** clock) {
  cudaEvent_t event = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDefault);
  *clock = event;
  return error;
}

int gpu_check_elapsed_ms(void* start, void* end, float* ms) {
  return cudaEventElapsedTime(ms, static_cast<cudaEvent_t>(start), static_cast<cudaEvent_t>(end));
}

// Reads all of it once; sums uint32 [num_blocks * 256].
int gpu_check_read(const void* data, int64_t num_bytes, uint32_t* sums, int64_t num_blocks, void* stream) {
  return pyserve::cuda::launch(read_kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(256), 0, static_cast<cudaStream_t>(stream),
                               static_cast<const uint4*>(data), num_bytes / static_cast<int64_t>(sizeof(uint4)), sums);
}

// --- numpy's allocator (NEP 49)
void* gpu_check_numpy_malloc(void*, size_t num_bytes) { return managed(num_bytes); }
void* gpu_check_numpy_calloc(void*, size_t count, size_t num_bytes) {
  void* memory = managed(count * num_bytes);
  if (memory != nullptr) std::memset(memory, 0, count * num_bytes);
  return memory;
}
void gpu_check_numpy_free(void*, void* memory, size_t) {
  if (memory != nullptr) give_back(memory);
}
void* gpu_check_numpy_realloc(void*, void* memory, size_t num_bytes) {
  void* larger = managed(num_bytes);
  if (larger == nullptr || memory == nullptr) return larger;
  size_t old_bytes = 0;
  std::memcpy(&old_bytes, static_cast<char*>(memory) - kHeader, sizeof old_bytes);
  std::memcpy(larger, memory, old_bytes < num_bytes ? old_bytes : num_bytes);
  give_back(memory);
  return larger;
}
}
