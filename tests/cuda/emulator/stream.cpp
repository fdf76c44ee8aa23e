// Streams and events.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "quiet.h"
#include "runtime.h"

namespace emulator {

struct Mark {  // a place in a stream: what a record captures
  bool is_reached = false;
  std::chrono::steady_clock::time_point time;  // when it was
};

}  // namespace emulator

struct CUevent_st {
  std::shared_ptr<emulator::Mark> mark;  // of the latest record; null: never recorded, which counts as reached
};

namespace emulator {

struct Job {
  std::function<cudaError_t()> work;
  std::shared_ptr<Mark> waits_for;
  bool is_mark = false;  // is done on a dead device too: nobody waits for ever, not even after emulator_reset
  std::vector<Range> uses;
  std::shared_ptr<Job> next;  // no container: TSan sees what containers allocate and move behind the lock that it does not see
  char posted;                // its address stands for the moment of posting
};

}  // namespace emulator

struct CUstream_st {
  std::shared_ptr<emulator::Job> first;  // is being worked on
  emulator::Job* last = nullptr;
  int64_t num_jobs = 0;
  bool is_closing = false;
  emulator::Recording* recording = nullptr;
};

namespace emulator {

namespace {

// One lock for all queues: they are short and this is a test. Never destroyed, for threads may outlive main.
constexpr int kMaxStreams = 256;
struct Queues {
  std::mutex mutex;
  std::condition_variable changed;
  CUstream_st* streams[kMaxStreams] = {};
  int num_streams = 0;
  bool is_paused = false;
};
Queues& queues() {
  static Queues* all = new Queues;
  return *all;
}

bool can_run(const CUstream_st& stream) {
  if (stream.first == nullptr || queues().is_paused) return false;
  return stream.first->waits_for == nullptr || stream.first->waits_for->is_reached || device_error() != cudaSuccess;
}

void run(Job& job) {
  happens_after(&job.posted);
  if (job.waits_for != nullptr) happens_after(job.waits_for.get());
  if (!job.work || (device_error() != cudaSuccess && !job.is_mark)) return;
  const cudaError_t error = job.work();
  if (error != cudaSuccess) fail_device(error);
}

void serve(CUstream_st* stream) {
  Queues& all = queues();
  for (;;) {
    std::shared_ptr<Job> job;
    {
      Quiet quiet;
      std::unique_lock<std::mutex> lock(all.mutex);
      all.changed.wait(lock, [&] { return can_run(*stream) || (stream->is_closing && stream->first == nullptr); });
      if (stream->first == nullptr) break;
      job = stream->first;
    }
    run(*job);
    Quiet quiet;
    {
      std::lock_guard<std::mutex> lock(all.mutex);
      stream->first = job->next;
      --stream->num_jobs;
    }
    all.changed.notify_all();
  }
  Quiet quiet;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    for (int i = 0; i < all.num_streams; ++i) {
      if (all.streams[i] == stream) all.streams[i] = all.streams[--all.num_streams];
    }
    delete stream;
  }
  all.changed.notify_all();
}

// The caller keeps nothing of the job: the thread that runs it is also the one that frees it.
void enqueue(CUstream_st* stream, std::shared_ptr<Job> job) {
  happens_before(&job->posted);
  Quiet quiet;
  {
    std::lock_guard<std::mutex> lock(queues().mutex);
    auto& place = stream->first == nullptr ? stream->first : stream->last->next;
    stream->last = job.get();
    place = std::move(job);
    ++stream->num_jobs;
  }
  queues().changed.notify_all();
}

// A mark that is reached when all that was posted to the stream so far has run.
std::shared_ptr<Mark> mark_now(CUstream_st* stream) {
  auto mark = std::make_shared<Mark>();
  auto job = std::make_shared<Job>();
  job->is_mark = true;
  job->work = [mark] {
    happens_before(mark.get());
    Quiet quiet;
    std::lock_guard<std::mutex> lock(queues().mutex);
    mark->is_reached = true;
    mark->time = std::chrono::steady_clock::now();
    return cudaSuccess;
  };
  if (stream == nullptr) {
    job->work();
  } else {
    enqueue(stream, std::move(job));
  }
  return mark;
}

// A dead device reaches every mark, so that nobody waits for ever.
bool is_reached(const std::shared_ptr<Mark>& mark) { return mark == nullptr || mark->is_reached || device_error() != cudaSuccess; }

bool query(const std::shared_ptr<Mark>& mark) {
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(queues().mutex);
    if (!is_reached(mark)) return false;
  }
  if (mark != nullptr) happens_after(mark.get());
  return true;
}

void wait_for(const std::shared_ptr<Mark>& mark) {
  {
    Quiet quiet;
    std::unique_lock<std::mutex> lock(queues().mutex);
    queues().changed.wait(lock, [&] { return is_reached(mark); });
  }
  if (mark != nullptr) happens_after(mark.get());
}

bool overlap(Range a, Range b) { return a.begin < b.begin + b.num_bytes && b.begin < a.begin + a.num_bytes; }

}  // namespace

Recording*& recording_of(cudaStream_t stream) { return stream->recording; }

// Is the stream recorded? Then what is about to be done spoils it.
static bool spoils(cudaStream_t stream) {
  if (stream == nullptr || stream->recording == nullptr) return false;
  return stream->recording->is_spoilt = true;
}

cudaError_t post(cudaStream_t stream, std::function<cudaError_t()> work, const Range* uses, int num_uses, bool must_block) {
  if (device_error() != cudaSuccess) return device_error();
  if (stream == nullptr) return work();
  if (must_block && spoils(stream)) return cudaErrorStreamCaptureUnsupported;
  if (stream->recording != nullptr) {
    stream->recording->works.push_back(std::move(work));
    return cudaSuccess;
  }
  auto job = std::make_shared<Job>();
  job->work = std::move(work);
  job->uses.assign(uses, uses + num_uses);
  enqueue(stream, std::move(job));
  if (must_block) wait_for(mark_now(stream));
  return cudaSuccess;
}

bool is_in_use(Range range) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(queues().mutex);
  for (int i = 0; i < queues().num_streams; ++i) {
    for (const Job* job = queues().streams[i]->first.get(); job != nullptr; job = job->next.get()) {
      for (const Range& used : job->uses) {
        if (overlap(used, range)) return true;
      }
    }
  }
  return false;
}

void wait_for_all() {
  std::vector<std::shared_ptr<Mark>> marks;
  std::vector<CUstream_st*> streams;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(queues().mutex);
    for (int i = 0; i < queues().num_streams; ++i) {
      if (!queues().streams[i]->is_closing) streams.push_back(queues().streams[i]);
    }
  }
  for (CUstream_st* stream : streams) marks.push_back(mark_now(stream));
  for (const auto& mark : marks) wait_for(mark);
}

void wait_until_idle() {
  Quiet quiet;
  std::unique_lock<std::mutex> lock(queues().mutex);
  queues().changed.wait(lock, [] {
    for (int i = 0; i < queues().num_streams; ++i) {
      if (queues().streams[i]->first != nullptr || queues().streams[i]->is_closing) return false;
    }
    return true;
  });
}

static std::atomic<int64_t> num_launches{0};  // kernels, one by one
static std::atomic<int> launch_delay_us{0};   // before each of them

cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, std::function<void()> body) {
  num_launches.fetch_add(1, std::memory_order_relaxed);
  const cudaError_t shape = check_shape(grid, block, shared_bytes);
  if (shape != cudaSuccess) return remember(shape);
  auto work = [=, body = std::move(body)] {
    if (const int delay_us = launch_delay_us.load(std::memory_order_relaxed); delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    return run_kernel(grid, block, shared_bytes, body);
  };
  return remember(post(stream, std::move(work), nullptr, 0, false));
}

}  // namespace emulator

using namespace emulator;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  if (flags != cudaStreamNonBlocking) return remember(cudaErrorNotSupported);  // the emulator orders nothing behind the null stream
  if (device_error() != cudaSuccess) return device_error();
  *stream = new CUstream_st;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(queues().mutex);
    if (queues().num_streams == kMaxStreams) return remember(cudaErrorMemoryAllocation);
    queues().streams[queues().num_streams++] = *stream;
  }
  std::thread(serve, *stream).detach();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  count_slow_call();
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  Quiet quiet;
  {
    std::lock_guard<std::mutex> lock(queues().mutex);
    stream->is_closing = true;
  }
  queues().changed.notify_all();
  return device_error();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count_slow_call();
  count_wait();
  if (spoils(stream)) return remember(cudaErrorStreamCaptureUnsupported);
  if (stream != nullptr) wait_for(mark_now(stream));
  return remember(device_error());
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (stream == nullptr) return remember(device_error());
  if (spoils(stream)) return remember(cudaErrorStreamCaptureUnsupported);
  Quiet quiet;
  std::lock_guard<std::mutex> lock(queues().mutex);
  if (device_error() != cudaSuccess) return device_error();
  return remember(stream->first == nullptr ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (device_error() != cudaSuccess) return device_error();
  if (spoils(stream)) return remember(cudaErrorStreamCaptureUnsupported);
  if (event->mark == nullptr) return cudaSuccess;
  if (stream == nullptr) {
    wait_for(event->mark);
    return cudaSuccess;
  }
  auto job = std::make_shared<Job>();
  job->waits_for = event->mark;
  enqueue(stream, std::move(job));
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  auto work = [=] {
    function(data);
    return cudaSuccess;
  };
  return remember(post(stream, work, nullptr, 0, false));
}

cudaError_t cudaDeviceSynchronize() {
  count_slow_call();
  count_wait();
  wait_for_all();
  return remember(device_error());
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (device_error() != cudaSuccess) return device_error();
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {  // work that was told to wait for it still does
  if (event == nullptr) return remember(cudaErrorInvalidResourceHandle);
  delete event;
  return device_error();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (event == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (device_error() != cudaSuccess) return device_error();
  if (spoils(stream)) return remember(cudaErrorStreamCaptureUnsupported);
  event->mark = mark_now(stream);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event == nullptr) return remember(cudaErrorInvalidResourceHandle);
  const bool is_done = query(event->mark);
  if (device_error() != cudaSuccess) return device_error();
  return remember(is_done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count_slow_call();
  if (event == nullptr) return remember(cudaErrorInvalidResourceHandle);
  count_wait();
  wait_for(event->mark);
  return remember(device_error());
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  if (start == nullptr || end == nullptr || start->mark == nullptr || end->mark == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (!query(start->mark) || !query(end->mark)) return remember(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
  return remember(device_error());
}

// The driver's own: no last error.
int emulator_cuEventQuery(cudaEvent_t event) {
  constexpr int kInvalidHandle = 400, kNotReady = 600;
  if (event == nullptr) return kInvalidHandle;
  const bool is_done = query(event->mark);
  if (device_error() != cudaSuccess) return static_cast<int>(device_error());
  return is_done ? 0 : kNotReady;
}

void emulator_slow_launches(int delay_us) { launch_delay_us.store(delay_us, std::memory_order_relaxed); }

int64_t emulator_num_launches() { return num_launches.load(std::memory_order_relaxed); }

void emulator_pause(int is_paused) {  // holds back work that has not started
  Quiet quiet;
  {
    std::lock_guard<std::mutex> lock(queues().mutex);
    queues().is_paused = is_paused != 0;
  }
  queues().changed.notify_all();
}

int64_t emulator_num_outstanding() {  // work that has not run
  Quiet quiet;
  std::lock_guard<std::mutex> lock(queues().mutex);
  int64_t total = 0;
  for (int i = 0; i < queues().num_streams; ++i) total += queues().streams[i]->num_jobs;
  return total;
}

int64_t emulator_num_streams() {  // whose work is not over, or that nobody has destroyed
  Quiet quiet;
  std::lock_guard<std::mutex> lock(queues().mutex);
  return queues().num_streams;
}
}
