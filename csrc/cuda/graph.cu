// CUDA graphs: what a thread posts to a stream, recorded once and posted again in one call.
//
// Recording is the calling thread's own affair (thread-local capture): other threads may allocate, pin and copy meanwhile. What would need the device while it is
// recorded spoils the recording, and `capture_end` says so; nothing is left of it then.
#include "driver.cuh"

namespace pyserve::cuda {

extern "C" {

int pyserve_cuda_capture_begin(void* stream) {
  OwnErrors own;
  return cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeThreadLocal);
}

int pyserve_cuda_capture_end(void* stream, void** graph) {
  OwnErrors own;
  cudaGraph_t recorded = nullptr;
  cudaGraphExec_t made = nullptr;
  cudaError_t error = cudaStreamEndCapture(as_stream(stream), &recorded);
  if (error == cudaSuccess) error = cudaGraphInstantiate(&made, recorded, 0);
  if (recorded != nullptr) (void)cudaGraphDestroy(recorded);
  *graph = error == cudaSuccess ? made : nullptr;
  return error;
}

int pyserve_cuda_graph_launch(void* graph, void* stream) {
  OwnErrors own;
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), as_stream(stream));
}

int pyserve_cuda_graph_destroy(void* graph) {
  OwnErrors own;
  return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}
}

}  // namespace pyserve::cuda
