// Copies of pages between the pool and pinned host memory: the copy engine.
//
// A sequence's pages come as combs (pyserve/page_runs.py), and there are four ways to move one:
//   contiguous  adjacent pages, one cudaMemcpyAsync for each chunk;
//   2-D         runs at an even distance, one cudaMemcpy2DAsync: what sequences growing side by side leave;
//   batched     many pieces in one call to the driver (12.8 and later): the host's time no longer grows with their number;
//   kernel      pages through the SMs, 16 bytes at a time: for pieces too small for the copy engines, or for old drivers.
// "calls" means contiguous and 2-D by comb. `automatic` takes calls while they are few, then batched when the pieces are large enough to be worth an entry,
// then the kernel where alignment allows it.
//
// Order: all goes to the one stream given, so it is done when an event recorded behind it is. Chunks: the copy engines serve streams in turn between
// operations, so no operation may be large. Nothing is posted before the whole copy was checked (R18); the comb table is read before the return, so it may go
// away. The memory at both ends must stay until the copy is done (R20): that is the caller's to see to.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "../cpu/page_copy.h"
#include "../check.h"
#include "driver.cuh"
#include "page_move.cuh"

namespace pyserve::cuda {

namespace {

constexpr int64_t kMaxPitch = 0x7fffffff;
constexpr int64_t kMaxBatch = 4096;  // entries a call
constexpr int64_t kMaxSlices = 16;   // blocks a page

PageCopy checked(const PoolCopy& request) {
  check(request.pool != nullptr && request.host != nullptr, "pool and host must not be null");
  check(request.num_combs > 0, "combs: a copy of zero pages");
  check(request.tuning.chunk_bytes > 0, "chunk_bytes must be positive");
  PageCopy copy{static_cast<uint8_t*>(request.pool), request.num_pages,  request.page_bytes,   static_cast<uint8_t*>(request.host), request.host_bytes,
                std::vector<Comb>(),                 request.to_host != 0};
  for (int64_t i = 0; i < request.num_combs; ++i) {
    const int32_t* row = request.combs + 5 * i;
    copy.combs.push_back(Comb{row[0], row[1], row[2], row[3], row[4]});
  }
  check_copy(copy);
  return copy;
}

struct Call {  // `rows` pieces of `row_bytes`: `pool_pitch` apart in the pool, back to back on the host
  int64_t pool_offset, host_offset, row_bytes, rows, pool_pitch;
};

void add_contiguous(std::vector<Call>& calls, int64_t pool_offset, int64_t host_offset, int64_t num_bytes, int64_t chunk_bytes) {
  for (int64_t done = 0; done < num_bytes; done += chunk_bytes) {
    const int64_t part = std::min(chunk_bytes, num_bytes - done);
    calls.push_back(Call{pool_offset + done, host_offset + done, part, 1, part});
  }
}

void add_comb(std::vector<Call>& calls, const Comb& comb, const PageCopy& copy, int64_t chunk_bytes, bool can_pitch) {
  const int64_t run_bytes = comb.run_pages * copy.page_bytes, pitch = comb.stride_pages * copy.page_bytes;
  const int64_t pool_offset = comb.start_page * copy.page_bytes, host_offset = comb.list_offset * copy.page_bytes;
  if (comb.count == 1 || comb.stride_pages == comb.run_pages) {
    add_contiguous(calls, pool_offset, host_offset, run_bytes * comb.count, chunk_bytes);
    return;
  }
  if (can_pitch && pitch > run_bytes && pitch <= kMaxPitch && run_bytes <= chunk_bytes) {
    const int64_t max_rows = chunk_bytes / run_bytes;
    for (int64_t row = 0; row < comb.count; row += max_rows) {
      calls.push_back(Call{pool_offset + row * pitch, host_offset + row * run_bytes, run_bytes, std::min(max_rows, comb.count - row), pitch});
    }
    return;
  }
  for (int64_t run = 0; run < comb.count; ++run) add_contiguous(calls, pool_offset + run * pitch, host_offset + run * run_bytes, run_bytes, chunk_bytes);
}

std::vector<Call> calls_of(const PageCopy& copy, int64_t chunk_bytes, bool can_pitch) {
  std::vector<Call> calls;
  for (const Comb& comb : copy.combs) add_comb(calls, comb, copy, chunk_bytes, can_pitch);
  return calls;
}

int post_call(const PageCopy& copy, const Call& call, cudaStream_t stream) {
  void* in_pool = copy.pool + call.pool_offset;
  void* in_host = copy.host + call.host_offset;
  void* to = copy.to_host ? in_host : in_pool;
  const void* from = copy.to_host ? in_pool : in_host;
  const cudaMemcpyKind kind = copy.to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  const size_t row_bytes = static_cast<size_t>(call.row_bytes), pool_pitch = static_cast<size_t>(call.pool_pitch);
  if (call.rows == 1) return cudaMemcpyAsync(to, from, row_bytes, kind, stream);
  return cudaMemcpy2DAsync(to, copy.to_host ? row_bytes : pool_pitch, from, copy.to_host ? pool_pitch : row_bytes, row_bytes, static_cast<size_t>(call.rows),
                           kind, stream);
}

// --- batched: the layout of cuMemcpyBatchAsync as of 12.8, written out so that older toolkits compile it

struct Location {
  int type, id;
};
struct BatchAttributes {
  int source_order;
  Location source_hint, target_hint;
  unsigned flags;
};
using MemcpyBatch = int (*)(uintptr_t* to, uintptr_t* from, size_t* sizes, size_t count, BatchAttributes* attributes, size_t* attribute_starts,
                            size_t num_attributes, size_t* failed, cudaStream_t stream);

MemcpyBatch memcpy_batch() { return driver_function<MemcpyBatch>("cuMemcpyBatchAsync"); }

int post_batched(const PageCopy& copy, const std::vector<Call>& pieces, int64_t chunk_bytes, cudaStream_t stream) {
  constexpr int kInStreamOrder = 1;
  const MemcpyBatch post = memcpy_batch();
  std::vector<uintptr_t> to, from;
  std::vector<size_t> sizes;
  for (size_t next = 0; next < pieces.size();) {
    to.clear();
    from.clear();
    sizes.clear();
    int64_t num_bytes = 0;  // of this call: a driver may make one operation of it
    for (; next < pieces.size() && sizes.size() < kMaxBatch && (sizes.empty() || num_bytes + pieces[next].row_bytes <= chunk_bytes); ++next) {
      num_bytes += pieces[next].row_bytes;
      const uintptr_t in_pool = reinterpret_cast<uintptr_t>(copy.pool + pieces[next].pool_offset);
      const uintptr_t in_host = reinterpret_cast<uintptr_t>(copy.host + pieces[next].host_offset);
      to.push_back(copy.to_host ? in_host : in_pool);
      from.push_back(copy.to_host ? in_pool : in_host);
      sizes.push_back(static_cast<size_t>(pieces[next].row_bytes));
    }
    BatchAttributes attributes = {};
    attributes.source_order = kInStreamOrder;
    size_t start = 0, failed = 0;
    const int error = post(to.data(), from.data(), sizes.data(), sizes.size(), &attributes, &start, 1, &failed, stream);
    if (error != 0) return error;
  }
  return 0;
}

// --- kernel

// Takes combs apart until a launch is full; the rest goes to the next.
class LaunchCutter {
 public:
  LaunchCutter(const std::vector<Comb>& combs, int64_t max_pages) : combs_(combs), max_pages_(max_pages) {}

  bool next(PieceList& list) {
    list.num_pieces = list.num_pages = 0;
    while (comb_ < combs_.size() && list.num_pieces < kMaxPieces && list.num_pages < max_pages_) {
      const Comb& comb = combs_[comb_];
      const int64_t run = done_ / comb.run_pages, in_run = done_ % comb.run_pages;
      const int64_t left = comb.run_pages * comb.count - done_, room = max_pages_ - list.num_pages;
      // A piece that starts inside a run ends with it: a Piece has no such offset.
      const int64_t taken = std::min({left, room, in_run > 0 ? comb.run_pages - in_run : left});
      const bool is_whole_runs = in_run == 0 && taken > comb.run_pages;
      list.pieces[list.num_pieces++] =
          Piece{static_cast<int32_t>(comb.start_page + run * comb.stride_pages + in_run), static_cast<int32_t>(is_whole_runs ? comb.run_pages : taken),
                static_cast<int32_t>(comb.stride_pages), static_cast<int32_t>(comb.list_offset + done_), list.num_pages};
      list.num_pages += static_cast<int32_t>(taken);
      done_ += taken;
      if (done_ < comb.run_pages * comb.count) continue;
      done_ = 0;
      ++comb_;
    }
    return list.num_pages > 0;
  }

 private:
  const std::vector<Comb>& combs_;
  const int64_t max_pages_;
  size_t comb_ = 0;
  int64_t done_ = 0;  // pages of the comb
};

bool can_move(const PageCopy& copy, const void* packed) {
  const auto is_aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0; };
  return copy.page_bytes % static_cast<int64_t>(sizeof(uint4)) == 0 && is_aligned(copy.pool) && is_aligned(packed);
}

template <bool has_hash>
auto move_kernel(Move move) {
  if (move == Move::hash) return page_move_kernel<Move::hash, true>;
  return move == Move::gather ? page_move_kernel<Move::gather, has_hash> : page_move_kernel<Move::scatter, has_hash>;
}

int launch_move(const PageCopy& copy, Move move, void* packed, int64_t packed_base, uint64_t* hashes, const PieceList& list, cudaStream_t stream) {
  const int64_t vectors = copy.page_bytes / static_cast<int64_t>(sizeof(uint4));
  const int64_t a_slice = kMoveThreads * kMoveUnroll;
  const int64_t slices = hashes != nullptr ? 1 : std::clamp<int64_t>((vectors + a_slice - 1) / a_slice, 1, kMaxSlices);
  const dim3 grid(static_cast<unsigned>(slices), static_cast<unsigned>(std::min<int64_t>(list.num_pages, kMoveBlocks / slices)));
  return launch(hashes != nullptr ? move_kernel<true>(move) : move_kernel<false>(move), grid, dim3(kMoveThreads), 0, stream,
                reinterpret_cast<uint4*>(copy.pool), static_cast<uint4*>(packed), hashes, vectors, packed_base, list);
}

int hash_pages(const PageCopy& copy, uint64_t* hashes, cudaStream_t stream) {
  LaunchCutter cutter(copy.combs, INT32_MAX);
  PieceList list;
  while (cutter.next(list)) {
    const int error = launch_move(copy, Move::hash, nullptr, 0, hashes, list, stream);
    if (error != 0) return error;
  }
  return 0;
}

// Between the pool and the host buffer itself, which the device sees at an address of its own.
int move_directly(const PageCopy& copy, int64_t chunk_bytes, uint64_t* hashes, cudaStream_t stream) {
  void* packed = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&packed, copy.host, 0);
  if (error != cudaSuccess) return error;
  LaunchCutter cutter(copy.combs, std::max<int64_t>(1, chunk_bytes / copy.page_bytes));
  PieceList list;
  while (cutter.next(list)) {
    const int failed = launch_move(copy, copy.to_host ? Move::gather : Move::scatter, packed, 0, hashes, list, stream);
    if (failed != 0) return failed;
  }
  return 0;
}

// Combs that are adjacent on the host: one staged copy can take them together.
std::vector<std::vector<Comb>> host_ranges(const std::vector<Comb>& combs) {
  std::vector<std::vector<Comb>> ranges;
  int64_t end = -1;
  for (const Comb& comb : combs) {
    if (comb.list_offset != end) ranges.emplace_back();
    ranges.back().push_back(comb);
    end = comb.list_offset + comb.run_pages * comb.count;
  }
  return ranges;
}

int move_staged(const PageCopy& copy, void* staging, int64_t staging_pages, uint64_t* hashes, cudaStream_t stream) {
  for (const std::vector<Comb>& range : host_ranges(copy.combs)) {
    LaunchCutter cutter(range, staging_pages);
    PieceList list;
    while (cutter.next(list)) {
      const int64_t first = list.pieces[0].list_offset;
      uint8_t* in_host = copy.host + first * copy.page_bytes;
      const size_t num_bytes = static_cast<size_t>(list.num_pages * copy.page_bytes);
      int error = copy.to_host ? 0 : cudaMemcpyAsync(staging, in_host, num_bytes, cudaMemcpyHostToDevice, stream);
      if (error == 0) error = launch_move(copy, copy.to_host ? Move::gather : Move::scatter, staging, first, hashes, list, stream);
      if (error == 0 && copy.to_host) error = cudaMemcpyAsync(in_host, staging, num_bytes, cudaMemcpyDeviceToHost, stream);
      if (error != 0) return error;
    }
  }
  return 0;
}

CopyWay chosen(const PoolCopy& request, const PageCopy& copy) {
  if (request.way != static_cast<int64_t>(CopyWay::automatic)) return static_cast<CopyWay>(request.way);
  const CopyTuning& tuning = request.tuning;
  if (static_cast<int64_t>(calls_of(copy, tuning.chunk_bytes, true).size()) <= tuning.max_calls) return CopyWay::calls;
  int64_t num_runs = 0;
  for (const Comb& comb : copy.combs) num_runs += comb.count;
  const bool can_batch = memcpy_batch() != nullptr;
  if (can_batch && num_pages(copy) * copy.page_bytes / num_runs >= tuning.min_batch_bytes) return CopyWay::batched;
  if (can_move(copy, request.staging != nullptr ? request.staging : request.host)) return CopyWay::kernel;
  return can_batch ? CopyWay::batched : CopyWay::calls;
}

int post_kernel(const PoolCopy& request, const PageCopy& copy, cudaStream_t stream) {
  const int64_t chunk_bytes = request.tuning.chunk_bytes;
  check(can_move(copy, request.staging != nullptr ? request.staging : request.host), "way: the kernel moves 16 bytes at a time, and page_bytes (",
        copy.page_bytes, ") or an address is no multiple of that");
  if (request.staging == nullptr) return move_directly(copy, chunk_bytes, request.hashes, stream);
  check(request.staging_bytes >= copy.page_bytes, "staging_bytes must hold a page");
  const int64_t at_once = std::min(request.staging_bytes, std::max(chunk_bytes, copy.page_bytes));
  return move_staged(copy, request.staging, at_once / copy.page_bytes, request.hashes, stream);
}

int post(const PoolCopy& request, const PageCopy& copy, cudaStream_t stream) {
  const int64_t chunk_bytes = request.tuning.chunk_bytes;
  const CopyWay way = chosen(request, copy);
  check(way >= CopyWay::calls && way <= CopyWay::kernel, "way must be 0..3, not ", request.way);
  check(request.hashes == nullptr || can_move(copy, nullptr), "hashes: page_bytes and the pool's address must be multiples of 16");
  if (way == CopyWay::kernel) return post_kernel(request, copy, stream);
  check(way != CopyWay::batched || memcpy_batch() != nullptr, "way: the driver has no batched copy");
  const std::vector<Call> calls = calls_of(copy, chunk_bytes, way == CopyWay::calls);
  int error = 0;
  if (way == CopyWay::batched) error = post_batched(copy, calls, chunk_bytes, stream);
  for (size_t i = 0; way == CopyWay::calls && error == 0 && i < calls.size(); ++i) error = post_call(copy, calls[i], stream);
  if (error == 0 && request.hashes != nullptr) error = hash_pages(copy, request.hashes, stream);
  return error;
}

// Runs `work`, and turns what it throws into kRefused and the message.
template <class Work>
int guarded(char* message, int64_t message_bytes, Work work) {
  OwnErrors own;
  try {
    return work();
  } catch (const std::exception& error) {
    if (message != nullptr && message_bytes > 0) std::snprintf(message, static_cast<size_t>(message_bytes), "%s", error.what());
    return kRefused;
  }
}

}  // namespace

extern "C" {

int pyserve_cuda_page_copy(const PoolCopy* request, void* stream, char* message, int64_t message_bytes) {
  return guarded(message, message_bytes, [&] { return post(*request, checked(*request), as_stream(stream)); });
}

int64_t pyserve_cuda_page_copy_way(const PoolCopy* request) {
  try {
    return static_cast<int64_t>(chosen(*request, checked(*request)));
  } catch (const std::exception&) {
    return 0;
  }
}

int pyserve_cuda_page_hash(const PoolCopy* request, uint64_t* hashes, void* stream, char* message, int64_t message_bytes) {
  return guarded(message, message_bytes, [&] {
    const PageCopy copy = checked(*request);
    check(can_move(copy, nullptr), "page_bytes must be a multiple of 16");
    return hash_pages(copy, hashes, as_stream(stream));
  });
}

int pyserve_cuda_can_batch() { return memcpy_batch() != nullptr ? 1 : 0; }
}

}  // namespace pyserve::cuda
