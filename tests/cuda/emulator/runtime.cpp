// Errors, the device, the driver's functions.
#include "runtime.h"

#include <atomic>
#include <cstring>

#include "quiet.h"

extern "C" int emulator_cuEventQuery(cudaEvent_t event);
extern "C" int emulator_cuMemcpyBatchAsync(const uintptr_t* to, const uintptr_t* from, const size_t* sizes, size_t count, const void* attributes,
                                           const size_t* attribute_starts, size_t num_attributes, size_t* failed, cudaStream_t stream);
extern "C" void emulator_pause(int is_paused);
extern "C" void emulator_slow_launches(int delay_us);

namespace emulator {

namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<int> error_of_device{cudaSuccess};  // no lock, no order

}  // namespace

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t device_error() { return static_cast<cudaError_t>(error_of_device.load(std::memory_order_relaxed)); }

void fail_device(cudaError_t error) {
  int none = cudaSuccess;
  error_of_device.compare_exchange_strong(none, error, std::memory_order_relaxed);
}

void* driver_symbol(const char* name) {
  constexpr int kFirstWithBatch = 12080;
  if (std::strcmp(name, "cuEventQuery") == 0) return reinterpret_cast<void*>(&emulator_cuEventQuery);
  if (std::strcmp(name, "cuMemcpyBatchAsync") == 0 && knobs.driver_version >= kFirstWithBatch) return reinterpret_cast<void*>(&emulator_cuMemcpyBatchAsync);
  return nullptr;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return device_error() != cudaSuccess ? device_error() : last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidPitchValue: return "cudaErrorInvalidPitchValue";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return remember(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {  // an H200's
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrWarpSize: *value = kWarpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = kMaxThreads; break;
    default: return remember(cudaErrorNotSupported);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = knobs.driver_version;
  return cudaSuccess;
}

void emulator_set_last_error(int error) { last_error = static_cast<cudaError_t>(error); }

// As a new process would be: nothing runs, knobs at rest, no error. Memory and streams stay.
void emulator_reset() {
  knobs = Knobs{};
  emulator_slow_launches(0);
  emulator_pause(0);
  wait_until_idle();
  error_of_device.store(cudaSuccess, std::memory_order_relaxed);
  last_error = cudaSuccess;
  emulator::engine.error = nullptr;
}
}
