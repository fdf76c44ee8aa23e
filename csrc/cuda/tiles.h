// How attention's work is cut. Plain integers, no CUDA: the kernels, their launchers and the tests all call these functions.
//
// A sequence's keys are walked in units of 64 positions, counted from position 0 whatever the page size, the chunk or the window. Units form groups of eight
// (512 positions). A row's softmax state is merged unit by unit within a group, then group by group: that order is the definition of the result, and it depends
// on the row's position alone. Where the work is cut does not change it, see attention.cuh.
//
// Decode: the units of all (row, pair) stand in one line, row after row, pair after pair ("pair": one kv head and at most 16 of its query heads). Worker w of W
// takes the places [w * total / W, (w + 1) * total / W): every worker's share is within one unit of the mean, whatever the mix of lengths, no list is built and
// nothing is uploaded. Who has a place is closed arithmetic, which is how the combine kernel finds the pieces. Not modelled: that a unit at the end of a sequence
// may hold fewer keys, and what it costs to begin a sequence.
//
// Prefill: tiles of (tokens x the query heads of one kv head), the ones with most keys first, so that short ones fill the end.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#ifdef __CUDACC__
#define PYSERVE_BOTH __host__ __device__ __forceinline__
#else
#define PYSERVE_BOTH inline
#endif

namespace pyserve::cuda {

constexpr int kUnitLen = 64;      // positions a unit
constexpr int kGroupUnits = 8;    // units a group: the fixed split size is 512 positions
constexpr int kPairHeads = 16;    // query heads that fill one mma tile

struct UnitRange {  // of one row: the units that hold a key it sees
  int first, count;
};

PYSERVE_BOTH int first_visible(int position, int window) { return window > 0 && position >= window ? position - window + 1 : 0; }

PYSERVE_BOTH UnitRange units_of(int position, int window) {
  if (position < 0) return {0, 0};  // a row that is padding
  const int first = first_visible(position, window) / kUnitLen;
  return {first, position / kUnitLen - first + 1};
}

PYSERVE_BOTH int num_groups(UnitRange units) { return (units.first + units.count - 1) / kGroupUnits - units.first / kGroupUnits + 1; }

// First place of a worker's share of `total` places; worker num_workers stands for the end.
PYSERVE_BOTH int share_start(int worker, int num_workers, int total) {
  return static_cast<int>(static_cast<int64_t>(worker) * total / num_workers);
}

// The worker whose share holds the place: the largest w with share_start(w) <= place.
PYSERVE_BOTH int worker_at(int place, int num_workers, int total) {
  return static_cast<int>(((static_cast<int64_t>(place) + 1) * num_workers - 1) / total);
}

// Division by a page size of any value, for dividends below 2^31: multiply and shift (Granlund, Montgomery 1994).
struct Divider {
  uint32_t factor;
  int shift;
  int divisor;
};

inline Divider divider(int divisor) {
  int log = 0;
  while ((int64_t{1} << log) < divisor) ++log;
  const uint64_t power = uint64_t{1} << (31 + log);
  return {static_cast<uint32_t>((power + static_cast<uint64_t>(divisor) - 1) / static_cast<uint64_t>(divisor)), 31 + log, divisor};
}

PYSERVE_BOTH int divide(int dividend, const Divider& by) {
  return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * by.factor >> by.shift);
}

struct Chunk {  // adjacent rows of one sequence
  int first_row, num_rows, last_position;
};

struct PrefillTile {  // query rows [first_query, ...) of the chunk, counted token after token, head after head of one kv head
  int first_row, num_rows, first_query;
};

// Tiles of `tile_queries` query rows, the most expensive first; equal ones in the order of the chunks.
inline std::vector<PrefillTile> prefill_tiles(const std::vector<Chunk>& chunks, int heads_per_kv_head, int tile_queries) {
  struct Costed {
    PrefillTile tile;
    int last_position;
  };
  std::vector<Costed> costed;
  for (const Chunk& chunk : chunks) {
    const int num_queries = chunk.num_rows * heads_per_kv_head;
    for (int first = 0; first < num_queries; first += tile_queries) {
      const int last_row = (std::min(first + tile_queries, num_queries) - 1) / heads_per_kv_head;
      costed.push_back({{chunk.first_row, chunk.num_rows, first}, chunk.last_position - (chunk.num_rows - 1 - last_row)});
    }
  }
  std::stable_sort(costed.begin(), costed.end(), [](const Costed& a, const Costed& b) { return a.last_position > b.last_position; });
  std::vector<PrefillTile> tiles;
  tiles.reserve(costed.size());
  for (const Costed& c : costed) tiles.push_back(c.tile);
  return tiles;
}

}  // namespace pyserve::cuda
