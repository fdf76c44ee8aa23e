// What the backend asks of CUDA besides computing: streams, events, pinned memory, and copies of pages between the pool and the host. Plain pointers and
// sizes, no torch and no CUDA header; a stream or an event is a void*.
//
// All return 0 or a cudaError_t. What these calls get wrong themselves is returned and not left behind as the thread's last error, unless another error was
// pending already (R14).
#pragma once
#include <cstdint>

namespace pyserve::cuda {

constexpr int kRefused = 1;     // cudaErrorInvalidValue
constexpr int kNotReady = 600;  // cudaErrorNotReady: an answer

// --- how pages are copied; page_copy.cu says why
enum class CopyWay : int64_t { automatic = 0, calls = 1, batched = 2, kernel = 3 };

struct CopyTuning {         // measured once at start
  int64_t chunk_bytes;      // no call and no launch moves more, so that another stream's small copy need not wait for gigabytes
  int64_t max_calls;        // up to so many calls are posted one by one
  int64_t min_batch_bytes;  // from this size on, pieces go by one batched call; smaller ones by the kernel
};
constexpr CopyTuning kDefaultTuning{16 << 20, 16, 64 << 10};

struct PoolCopy {
  void* pool;  // device memory [num_pages, page_bytes]
  int64_t num_pages, page_bytes;
  void* host;  // pinned, else the caller waits for the copy
  int64_t host_bytes;
  const int32_t* combs;  // [num_combs, 5] on the host: start, run_pages, stride_pages, count, list_offset, as in pyserve/page_runs.py; read before the return
  int64_t num_combs;
  int64_t to_host;  // 1: pool to host, 0: host to pool
  int64_t way;      // CopyWay
  CopyTuning tuning;
  void* staging;  // device memory through which the kernel's pages go; null: the kernel reads and writes pinned memory itself
  int64_t staging_bytes;
  uint64_t* hashes;  // on the device, or null: gets the hash of the page at each list position (page_move.cuh)
};

extern "C" {

// Posts the whole copy, or nothing: kRefused with the reason in `message` [message_bytes] when nothing would be copied, a page lies outside the pool or the
// host buffer, or the way asked for is not possible (R18). Another error: posting failed half way; what was posted still runs.
int pyserve_cuda_page_copy(const PoolCopy* copy, void* stream, char* message, int64_t message_bytes);
int64_t pyserve_cuda_page_copy_way(const PoolCopy* copy);  // the CopyWay that `automatic` means for it; 0 when it would be refused
// hashes[list position] = hash of that page of the pool, nothing copied
int pyserve_cuda_page_hash(const PoolCopy* copy, uint64_t* hashes, void* stream, char* message, int64_t message_bytes);
// calibrate.cu: measures the tuning with the pool and host memory that `memory` names (2 MiB of both at least serve best); overwrites the host's, waits.
// kNotReady, and the defaults, when it takes longer than limit_us.
int pyserve_cuda_calibrate(const PoolCopy* memory, CopyTuning* tuning, int64_t limit_us, void* stream);
int pyserve_cuda_can_batch();  // 1: the driver has the batched copy (12.8 and later)

// --- event.cu
int pyserve_cuda_stream_create(void** stream, int64_t is_urgent);
int pyserve_cuda_stream_destroy(void* stream);  // what was posted still runs
int pyserve_cuda_stream_synchronize(void* stream);
int pyserve_cuda_stream_wait(void* stream, void* event);  // later work of the stream waits for the event's latest record, on the device
int pyserve_cuda_event_create(void** event);
int pyserve_cuda_event_destroy(void* event);
int pyserve_cuda_event_record(void* event, void* stream);
int pyserve_cuda_event_query(void* event);  // 0 done, kNotReady not yet. Never waits; touches no last error at all (R14)
int pyserve_cuda_event_wait(void* event);   // the host waits
// In stream order `function` is called with `data`, by a thread of CUDA's, in which nothing of CUDA may be called. Never when the device has failed.
int pyserve_cuda_host_call(void* stream, void (*function)(void*), void* data);

// --- graph.cu
int pyserve_cuda_capture_begin(void* stream);              // what this thread posts to it from now on is recorded, and not run
int pyserve_cuda_capture_end(void* stream, void** graph);  // ready to be launched any number of times; null with an error: the recording is spoilt
int pyserve_cuda_graph_launch(void* graph, void* stream);
int pyserve_cuda_graph_destroy(void* graph);

// --- pinned.cu
int pyserve_cuda_pin(void* memory, int64_t num_bytes);  // slow: tenths of a second a gigabyte, so not on the event loop
int pyserve_cuda_unpin(void* memory);
int pyserve_cuda_is_pinned(const void* memory, int64_t num_bytes);  // 1: all of it is

// --- memory.cu; device memory is not zeroed, pinned memory is seen by the device at its own address
int64_t pyserve_cuda_num_devices();
int pyserve_cuda_use_device(int64_t index);  // by the calling thread
int pyserve_cuda_device_limits(int64_t index, int64_t* num_sms, int64_t* shared_bytes);  // as kernels.h's Device wants them
int pyserve_cuda_memory_info(int64_t* free_bytes, int64_t* total_bytes);  // of the calling thread's device
int pyserve_cuda_allocate(void** memory, int64_t num_bytes);
int pyserve_cuda_free(void* memory);
int pyserve_cuda_allocate_pinned(void** memory, int64_t num_bytes);
int pyserve_cuda_free_pinned(void* memory);
int pyserve_cuda_copy(void* to, const void* from, int64_t num_bytes, int64_t to_host, void* stream);  // pinned memory, else the caller waits
const char* pyserve_cuda_error_text(int error);
int pyserve_cuda_is_emulated();
}

}  // namespace pyserve::cuda
