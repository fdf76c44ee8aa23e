// Streams and events (R14, R15).
//
// Why the query goes to the driver: the runtime's cudaEventQuery leaves cudaErrorNotReady behind as the thread's last error, over whatever was pending there;
// clearing it afterwards would throw someone else's launch failure away. The driver's cuEventQuery has no such memory. The thread that asks must have used
// the device before, as every thread that records has.
#include "driver.cuh"

namespace pyserve::cuda {

extern "C" {

int pyserve_cuda_stream_create(void** stream, int64_t is_urgent) {
  OwnErrors own;
  int least = 0, greatest = 0;
  const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error != cudaSuccess) return error;
  cudaStream_t made = nullptr;
  const cudaError_t result = cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, is_urgent != 0 ? greatest : least);
  *stream = made;
  return result;
}

int pyserve_cuda_stream_destroy(void* stream) {
  OwnErrors own;
  return cudaStreamDestroy(as_stream(stream));
}

int pyserve_cuda_stream_synchronize(void* stream) {
  OwnErrors own;
  return cudaStreamSynchronize(as_stream(stream));
}

int pyserve_cuda_stream_wait(void* stream, void* event) {
  OwnErrors own;
  return cudaStreamWaitEvent(as_stream(stream), as_event(event), 0);
}

int pyserve_cuda_event_create(void** event) {
  OwnErrors own;
  cudaEvent_t made = nullptr;
  const cudaError_t result = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
  *event = made;
  return result;
}

int pyserve_cuda_event_destroy(void* event) {
  OwnErrors own;
  return cudaEventDestroy(as_event(event));
}

int pyserve_cuda_event_record(void* event, void* stream) {
  OwnErrors own;
  return cudaEventRecord(as_event(event), as_stream(stream));
}

int pyserve_cuda_event_query(void* event) {
  using Query = int (*)(cudaEvent_t);
  static const Query query = driver_function<Query>("cuEventQuery");
  if (query == nullptr) return cudaErrorInsufficientDriver;
  return query(as_event(event));  // CUresult and cudaError_t have the same numbers for 0, not ready and failures of the device
}

int pyserve_cuda_event_wait(void* event) {
  OwnErrors own;
  return cudaEventSynchronize(as_event(event));
}

int pyserve_cuda_host_call(void* stream, void (*function)(void*), void* data) {
  OwnErrors own;
  return cudaLaunchHostFunc(as_stream(stream), function, data);
}
}

}  // namespace pyserve::cuda
