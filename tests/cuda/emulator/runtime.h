// The part of CUDA's runtime that pyserve uses, emulated: streams, events, copies, device and pinned memory, errors.
//
// Streams are in-order queues, each with a thread of its own, so that a copy really is not done when the call returns. Events are captured by record: query
// and wait speak of the latest record before them. Legacy null stream: what is posted there runs at once in the caller.
//
// Memory: "device" memory is host memory that was allocated by cudaMalloc or registered by a test (emulator_register). Copies are checked against what was
// registered, both ends in full. Memory that nobody registered is pageable: a copy of it blocks the caller, as CUDA's does. Freeing or unregistering memory
// that an outstanding copy uses is refused with an error, stricter than CUDA.
//
// Errors: every call that returns something other than cudaSuccess, cudaErrorNotReady included, leaves that as the calling thread's last error until
// cudaGetLastError takes it; a failure in a stream is the device's and never goes away. Driver functions, found by driver_symbol, touch no last error.
//
// TSan: orders exactly what CUDA orders. Posting happens before the work; work before the later work of its stream; a record before what waited for it. The
// queues' own locks are hidden from it.
//
// Recording (stream capture, thread-local): what is posted to the stream is kept and not run; waiting for such a stream, recording an event in it, a copy of pageable
// memory, and taking or giving up memory in the thread that records spoil it. A graph is launched as one piece of work.
//
// Knobs for tests are at the end. Not here: graphs that fork, managed memory, peer access, several devices.
#pragma once
#include <cuda_runtime_api.h>

#include <vector>

#include "engine.h"

namespace emulator {

void* driver_symbol(const char* name);  // cuEventQuery, cuMemcpyBatchAsync (from driver 12.8 on); null for what the emulated driver lacks

// What the runtime remembers as the calling thread's last error; returns it.
cudaError_t remember(cudaError_t error);
cudaError_t device_error();
void fail_device(cudaError_t error);

enum class Place { device, pinned, pageable };
struct Range {
  const char* begin;
  size_t num_bytes;
};
// Runs `work` in stream order. `uses`: memory that must stay until then. Blocks until it ran if `must_block`.
cudaError_t post(cudaStream_t stream, std::function<cudaError_t()> work, const Range* uses, int num_uses, bool must_block);
// Streams that are recorded (graph.cpp). `works` is what the stream was given.
struct Recording {
  std::vector<std::function<cudaError_t()>> works;
  bool is_spoilt = false;
};
Recording*& recording_of(cudaStream_t stream);
bool spoils_recording();  // by the calling thread; to be asked by whatever must not be done meanwhile
void count_wait();        // a host thread waits for the device
bool is_in_use(Range range);  // by work that has not run yet
void wait_for_all();
void wait_until_idle();  // and destroyed streams are gone; also on a device that has failed, whose work comes to nothing

struct Knobs {
  int delay_us = 0;                  // before each operation of the copy engines
  int64_t posts_until_failure = -1;  // copies posted well before posting one fails; negative: never
  int64_t runs_until_failure = -1;   // copies carried out well before one fails in its stream, which is the end of the device
  int64_t pins_until_failure = -1;
  bool are_pins_refused = false;
  int pin_delay_us = 0;
  int driver_version = 13000;
  int64_t recordings_until_failure = -1;
  int64_t device_bytes = int64_t{141} << 30;  // of memory
};
extern Knobs knobs;

// Counts a call that allocates, frees, pins or waits: what the steady state must do without.
void count_slow_call();

}  // namespace emulator
