// Moves scattered pages to one place or back, or hashes them: one launch for a whole sequence, or for a chunk of it where it is large. A block that runs is not
// put aside for a step's, however urgent the step: so no launch may take longer than a copy engine's operation (page_copy.cu). Hashes alone take one launch.
//
// The pieces are in the launch's parameters (the 4 KiB that every toolkit allows), so there is no list on the device whose lifetime someone must mind. Few
// blocks, each with many loads in flight: enough for the bus, and most of the device stays free for the step that runs beside it.
//
// A page's hash is the sum, modulo 2^64, of mix(word i + (i + 1) * 0x9e3779b97f4a7c15) over its 64-bit little-endian words; mix is the finaliser of MurmurHash3.
// A sum, so that it does not depend on who reads what.
#pragma once
#include "portable.cuh"

namespace pyserve::cuda {

struct Piece {  // runs of adjacent pages
  int32_t start_page, run_pages, stride_pages, list_offset;
  int32_t first;  // pages of the launch before it
};

constexpr int kMaxPieces = 196;
struct PieceList {
  int32_t num_pieces, num_pages;
  Piece pieces[kMaxPieces];
};
static_assert(sizeof(PieceList) <= 4096 - 64, "must fit a launch's parameters");

enum class Move { gather, scatter, hash };

constexpr int kMoveThreads = 256;
constexpr int kMoveWarps = kMoveThreads / 32;
constexpr int kMoveUnroll = 4;
constexpr int kMoveBlocks = 64;

struct PagePlace {
  int64_t in_pool, in_list;
};

__device__ __forceinline__ PagePlace find_page(const PieceList& list, int page) {
  int low = 0, high = list.num_pieces - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (list.pieces[middle].first <= page) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Piece& piece = list.pieces[low];
  const int offset = page - piece.first;
  const int64_t run = offset / piece.run_pages, in_run = offset % piece.run_pages;
  return {piece.start_page + run * piece.stride_pages + in_run, static_cast<int64_t>(piece.list_offset) + offset};
}

__device__ __forceinline__ uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

__device__ __forceinline__ uint64_t vector_hash(uint4 value, int64_t vector) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ull;
  const uint64_t low = static_cast<uint64_t>(value.y) << 32 | value.x, high = static_cast<uint64_t>(value.w) << 32 | value.z;
  const uint64_t word = static_cast<uint64_t>(vector) * 2;
  return mix(low + (word + 1) * kStep) + mix(high + (word + 2) * kStep);
}

__device__ __forceinline__ uint64_t warp_total(uint64_t value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(value), lanes);
  return value;
}

// grid (slices of a page, pages at a time). `packed` holds the page at list position p at p - packed_base.
template <Move move, bool has_hash>
__global__ void __launch_bounds__(kMoveThreads)
    page_move_kernel(uint4* __restrict__ pool, uint4* __restrict__ packed, uint64_t* __restrict__ hashes, int64_t page_vectors, int64_t packed_base,
                     const __grid_constant__ PieceList list) {
  PYSERVE_SHARED(uint64_t, totals, [kMoveWarps]);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kMoveThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMoveThreads;
  for (int page = blockIdx.y; page < list.num_pages; page += gridDim.y) {
    const PagePlace place = find_page(list, page);
    uint4* in_pool = pool + place.in_pool * page_vectors;
    uint4* in_packed = packed + (place.in_list - packed_base) * page_vectors;
    const uint4* from = move == Move::scatter ? in_packed : in_pool;
    uint4* to = move == Move::scatter ? in_pool : in_packed;
    uint64_t total = 0;
    int64_t i = first;
    for (; i + (kMoveUnroll - 1) * step < page_vectors; i += kMoveUnroll * step) {
      uint4 values[kMoveUnroll];
#pragma unroll
      for (int k = 0; k < kMoveUnroll; ++k) values[k] = __ldcs(from + i + k * step);
#pragma unroll
      for (int k = 0; k < kMoveUnroll; ++k) {
        if constexpr (move != Move::hash) __stcs(to + i + k * step, values[k]);
        if constexpr (has_hash) total += vector_hash(values[k], i + k * step);
      }
    }
    for (; i < page_vectors; i += step) {
      const uint4 value = __ldcs(from + i);
      if constexpr (move != Move::hash) __stcs(to + i, value);
      if constexpr (has_hash) total += vector_hash(value, i);
    }
    if constexpr (has_hash) {  // one slice: gridDim.x is 1
      total = warp_total(total);
      if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32] = total;
      __syncthreads();
      if (threadIdx.x == 0) {
        uint64_t sum = 0;
        for (int warp = 0; warp < kMoveWarps; ++warp) sum += totals[warp];
        hashes[place.in_list] = sum;
      }
      __syncthreads();  // the next page overwrites the totals
    }
  }
}

}  // namespace pyserve::cuda
