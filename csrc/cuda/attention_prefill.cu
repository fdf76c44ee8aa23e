// Prefill attention: chunks of adjacent rows of one sequence against its pages, causal by absolute position.
//
// A block has one tile: up to 128 query rows of one kv head, counted token after token and within a token head after head, so that grouped query heads share
// what is read of K and V. Its warps, at most eight, have 16 rows each and share one ring in shared memory, filled by all of them with cp.async ahead of use;
// one barrier for each half of a unit. How many warps a block has follows from the device's shared memory. (32 rows a warp would halve what ldmatrix reads for
// each mma, but heads of 128 then spill registers. ldmatrix is what bounds the kernel on paper, at two thirds of what mma.sync could do.)
//
// Order: units ascending, groups merged in order, see attention.cuh. A group's state is merged into the tile's total in scratch, laid out [value, thread] so
// that a warp's accesses are whole lines; a tile whose rows see only one group never touches scratch. Total 64 KiB a tile at 128 rows of 128.
//
// Tiles come from `pyserve_cuda_attention_prefill_tiles`, the most expensive first. Blocks of one tile's kv heads are neighbours in the grid.
//
// Exactness and what is not handled: see attention.cuh. Rows must ascend in position within a chunk.
// Not run on hardware so far: proved on the emulator of tests/cuda. No time has been measured.
#include "attention.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kTilesPerWarp = 1;  // mma tiles of 16 query rows
constexpr int kQueriesPerWarp = 16 * kTilesPerWarp;

template <class T, int D>
struct PrefillArguments {
  Matrix q, out;
  Sequences<T> sequences;
  Scoring scoring;
  const int32_t* positions;
  const PrefillTile* tiles;
  float* totals;
  int num_heads, window;
};

struct Queries {  // the query rows of a block
  PrefillTile tile;
  int heads_per_kv_head, kv_head, count;

  __device__ int row(int query) const { return tile.first_row + (tile.first_query + query) / heads_per_kv_head; }
  __device__ int head(int query) const { return kv_head * heads_per_kv_head + (tile.first_query + query) % heads_per_kv_head; }
};

template <class T, int D>
__device__ Queries queries_of(const PrefillArguments<T, D>& arguments, int tile_queries) {
  const PrefillTile tile = arguments.tiles[blockIdx.y];
  const int group = arguments.num_heads / arguments.sequences.num_kv_heads;
  return {tile, group, static_cast<int>(blockIdx.x), min(tile_queries, tile.num_rows * group - tile.first_query)};
}

template <class T, int D>
__device__ void load_queries(T* to, const Matrix& q, const Queries& queries, int tile_queries) {
  constexpr int words = D / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < tile_queries * words; i += blockDim.x) {
    const int query = i / words, word = i % words;
    T* place = to + query * Shape<D>::pitch + word * 8;
    if (query < queries.count) load_query<T>(place, q, queries.row(query) * q.stride + queries.head(query) * D + word * 8);
    else *reinterpret_cast<uint4*>(place) = make_uint4(0, 0, 0, 0);
  }
}

// What the query rows [first, first + count) of the block see together; none: last < first.
__device__ Extent extent_of(const Queries& queries, const int32_t* positions, int window, int first, int count) {
  const int last = min(first + count, queries.count) - 1;
  if (last < first) return {0, -1};
  return {first_visible(positions[queries.row(first)], window), positions[queries.row(last)]};
}

__device__ __forceinline__ void store_pair(const Matrix& out, int64_t offset, float x, float y) {
  if (out.type == static_cast<int64_t>(DType::f32)) *reinterpret_cast<float2*>(static_cast<float*>(out.data) + offset) = make_float2(x, y);
  else if (out.type == static_cast<int64_t>(DType::f16)) *reinterpret_cast<__half2*>(static_cast<__half*>(out.data) + offset) = __floats2half2_rn(x, y);
  else *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(out.data) + offset) = __floats2bfloat162_rn(x, y);
}

template <int M>
struct Total {  // of this thread's rows: the values are in scratch, [M * D / 2, threads of the block]
  float* values;
  float largest[M][2], sum[M][2];
  bool is_begun;
};

// Merges a group into the total: into scratch or, the last one, into the output.
template <int D, int M>
__device__ __forceinline__ void add_group(Total<M>& total, const State<D, M>& group, float exponent, bool is_last, const Matrix& out, const Queries& queries,
                                          int first) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Factors factors = merge_factors(total.largest[i][r], total.sum[i][r], group.largest[i][r], group.sum[i][r], exponent);
      const int query = first + i * 16 + (lane >> 2) + 8 * r;
      const bool is_output = is_last && query < queries.count;
      const float scale = inverse(total.sum[i][r]);
      const int64_t offset = is_output ? queries.row(query) * out.stride + queries.head(query) * D + (lane & 3) * 2 : 0;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        float* values = total.values + ((i * (D / 8) + n) * 4 + 2 * r) * blockDim.x;
        const float x = merge(total.is_begun ? values[0] : 0.f, group.o[i][n][2 * r], factors);
        const float y = merge(total.is_begun ? values[blockDim.x] : 0.f, group.o[i][n][2 * r + 1], factors);
        if (is_output) store_pair(out, offset + n * 8, x * scale, y * scale);
        if (!is_last) values[0] = x, values[blockDim.x] = y;
      }
    }
  total.is_begun = true;
}

template <class T, int D>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) prefill_kernel(PrefillArguments<T, D> arguments) {
  constexpr int M = kTilesPerWarp;
  PYSERVE_DYN_SHARED(T, shared);
  const int lane = threadIdx.x & 31, tile_queries = blockDim.x / 32 * kQueriesPerWarp, first = threadIdx.x / 32 * kQueriesPerWarp;
  const Queries queries = queries_of(arguments, tile_queries);
  T* my_queries = shared + Shape<D>::num_slots * Shape<D>::slot;
  load_queries<T, D>(my_queries, arguments.q, queries, tile_queries);
  const Extent tile = extent_of(queries, arguments.positions, arguments.window, 0, tile_queries);
  const Extent warp = extent_of(queries, arguments.positions, arguments.window, first, kQueriesPerWarp);
  Reach<M> reach;
  Total<M> total;
  reach.span = span_of(arguments.window);
  total.is_begun = false;
  total.values = arguments.totals + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * (tile_queries * D) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first + i * 16 + (lane >> 2) + 8 * r;
      reach.last[i][r] = query < queries.count ? arguments.positions[queries.row(query)] : -1;
      total.largest[i][r] = -INFINITY, total.sum[i][r] = 0.f;
    }
  const int begin = tile.first / kUnitLen, end = tile.last / kUnitLen + 1;
  const auto last_of_run = [](int unit) { return unit / kGroupUnits * kGroupUnits + kGroupUnits - 1; };
  const auto emit = [&](const State<D, M>& state, int unit) {
    add_group<D, M>(total, state, arguments.scoring.exponent, unit + 1 == end, arguments.out, queries_of(arguments, tile_queries), first);
  };
  const Cells<T> cells = arguments.sequences.cells(queries.tile.first_row, queries.kv_head);
  walk<T, D, M, true>(cells, shared, my_queries + first * Shape<D>::pitch, begin, end, tile, warp.last, reach, arguments.scoring,
                      Team{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)}, last_of_run, emit);
}

int64_t block_bytes(int64_t head_dim, int num_warps) {  // of shared memory
  const int64_t num_slots = head_dim <= 128 ? 3 : 2;
  return (num_slots * kUnitLen + num_warps * kQueriesPerWarp) * (head_dim + 8) * 2;
}

int warps_per_block(int64_t head_dim, const Device& device) {
  int num_warps = kMaxWarps;
  while (num_warps > 0 && block_bytes(head_dim, num_warps) > device.shared_bytes) --num_warps;
  return num_warps;
}

template <class T, int D>
int run(const Matrix& q, const AttentionSpec& spec, const Pool& pool, const StepRows& rows, const Matrix& out, const int32_t* tiles, int64_t num_tiles,
        float* totals, const Device& device, cudaStream_t stream) {
  const int num_warps = warps_per_block(D, device);
  const PrefillArguments<T, D> arguments = {q,
                                            out,
                                            sequences_of<T>(pool, spec, rows),
                                            scoring_of(spec),
                                            rows.positions,
                                            reinterpret_cast<const PrefillTile*>(tiles),
                                            totals,
                                            static_cast<int>(spec.num_heads),
                                            static_cast<int>(spec.window)};
  const dim3 grid(static_cast<unsigned>(pool.num_kv_heads), static_cast<unsigned>(num_tiles));
  return launch(prefill_kernel<T, D>, grid, dim3(32 * num_warps), block_bytes(D, num_warps), stream, arguments);
}

}  // namespace

extern "C" int pyserve_cuda_attention_prefill_queries(int64_t head_dim, const Device* device) {
  return warps_per_block(head_dim, *device) * kQueriesPerWarp;
}

extern "C" int64_t pyserve_cuda_attention_prefill_tiles(const int32_t* chunks, int64_t num_chunks, int64_t heads_per_kv_head, int64_t tile_queries,
                                                        int32_t* tiles, int64_t max_tiles) {
  if (heads_per_kv_head < 1 || tile_queries < 1) return -1;
  std::vector<Chunk> all;
  for (int64_t i = 0; i < num_chunks; ++i) all.push_back({chunks[3 * i], chunks[3 * i + 1], chunks[3 * i + 2]});
  const std::vector<PrefillTile> cut = prefill_tiles(all, static_cast<int>(heads_per_kv_head), static_cast<int>(tile_queries));
  for (int64_t i = 0; i < std::min(max_tiles, static_cast<int64_t>(cut.size())); ++i) {
    tiles[3 * i] = cut[i].first_row, tiles[3 * i + 1] = cut[i].num_rows, tiles[3 * i + 2] = cut[i].first_query;
  }
  return static_cast<int64_t>(cut.size());
}

extern "C" int64_t pyserve_cuda_attention_prefill_scratch_bytes(int64_t num_tiles, int64_t num_kv_heads, int64_t head_dim, const Device* device) {
  return num_tiles * num_kv_heads * pyserve_cuda_attention_prefill_queries(head_dim, device) * head_dim * 4;
}

extern "C" int pyserve_cuda_attention_prefill(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out,
                                              const int32_t* tiles, int64_t num_tiles, void* scratch, int64_t scratch_bytes, const Device* device,
                                              void* stream) {
  if (num_tiles == 0) return 0;
  if (!is_valid(*q, *spec, *pool) || !is_aligned(*out) || num_tiles > 65535 || warps_per_block(pool->head_dim, *device) < 1) return kInvalid;
  if (scratch_bytes < pyserve_cuda_attention_prefill_scratch_bytes(num_tiles, pool->num_kv_heads, pool->head_dim, device)) return kInvalid;
  return with_pool_type(*pool, [&](auto tag) {
    using Chosen = decltype(tag);
    return run<typename Chosen::Type, Chosen::head_dim>(*q, *spec, *pool, *rows, *out, tiles, num_tiles, static_cast<float*>(scratch), *device,
                                                        static_cast<cudaStream_t>(stream));
  });
}

}  // namespace pyserve::cuda
