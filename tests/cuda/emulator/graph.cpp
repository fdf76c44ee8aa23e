// Recording of streams, and graphs: a list of works that is launched as one.
#include <atomic>
#include <memory>
#include <vector>

#include "quiet.h"
#include "runtime.h"

using Works = std::vector<std::function<cudaError_t()>>;

struct CUgraph_st {
  std::shared_ptr<const Works> works;
};
struct CUgraphExec_st {
  std::shared_ptr<const Works> works;
};

namespace emulator {

namespace {

thread_local Recording* mine = nullptr;  // that this thread has begun
std::atomic<int64_t> num_graph_launches{0}, num_waits{0};

}  // namespace

bool spoils_recording() {
  if (mine == nullptr) return false;
  return mine->is_spoilt = true;
}

void count_wait() { num_waits.fetch_add(1, std::memory_order_relaxed); }

}  // namespace emulator

using namespace emulator;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (device_error() != cudaSuccess) return device_error();
  if (stream == nullptr || mine != nullptr || recording_of(stream) != nullptr) return remember(cudaErrorStreamCaptureUnsupported);
  if (mode != cudaStreamCaptureModeThreadLocal) return remember(cudaErrorNotSupported);
  mine = recording_of(stream) = new Recording;
  if (knobs.recordings_until_failure >= 0 && knobs.recordings_until_failure-- == 0) mine->is_spoilt = true;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (stream == nullptr || mine == nullptr || recording_of(stream) != mine) return remember(cudaErrorStreamCaptureUnmatched);
  const std::unique_ptr<Recording> ended(mine);
  mine = recording_of(stream) = nullptr;
  if (ended->is_spoilt) return remember(cudaErrorStreamCaptureInvalidated);
  *graph = new CUgraph_st{std::make_shared<const Works>(std::move(ended->works))};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = new CUgraphExec_st{graph->works};
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {  // what was launched still runs
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  num_graph_launches.fetch_add(1, std::memory_order_relaxed);
  auto work = [works = graph->works] {
    for (const auto& each : *works) {
      const cudaError_t error = each();
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  };
  return remember(post(stream, work, nullptr, 0, false));
}

void emulator_fail_recordings(int64_t after) { knobs.recordings_until_failure = after; }
int64_t emulator_num_graph_launches() { return num_graph_launches.load(std::memory_order_relaxed); }
int64_t emulator_num_waits() { return num_waits.load(std::memory_order_relaxed); }  // of host threads for the device
}
