// Decode attention: each row by itself against its pages, grouped query heads packed into one mma tile, all SMs kept equally busy.
//
// Three kernels. `plan` (one warp) counts the rows' units. `walk` has a fixed number of workers, one warp each with a ring of its own: no block barrier at all.
// A worker computes its share of the line of units (tiles.h) and writes states: one for each group, or the part of it up to its share's end, that it has begun
// at the group's start; one for each unit of a group that another worker began. `combine` (one warp for each row and head) merges them in order.
//
// Scratch: int32 places[rows + 1], groups[rows + 1] (running sums of units and groups over the pairs), then slots of [heads of a pair, head_dim] floats followed
// by [heads] maxima and [heads] sums: one slot for each group of each pair, then seven for each worker.
//
// Positions and page tables are read on the device only: the launch is the same for a given number of rows, so a CUDA graph can hold it. The plan follows from
// the rows' positions: the first layer of a step makes it, the others may use it (`_planned`).
//
// Exactness and what is not handled: see attention.cuh. A pair of at most 8 heads leaves half of each mma tile unused: decode is bound by memory.
// Not run on hardware so far: proved on the emulator of tests/cuda. No time has been measured.
#include "attention.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kUnitSlots = kGroupUnits - 1;  // of a worker that begins inside a group
constexpr int kKept = 4;                      // next place, end of the share, worker, where its shared memory begins

struct Plan {
  int *places, *groups;  // [num_rows + 1]
  float* slots;
  int num_rows, num_pairs, pair_heads, num_workers, window, slot_floats;
  const int32_t* positions;

  __device__ int total() const { return places[num_rows]; }
  __device__ float* group_slot(int row, int pair, UnitRange units, int unit) const {
    const int group = unit / kGroupUnits - units.first / kGroupUnits;
    return slots + static_cast<int64_t>(groups[row] + pair * num_groups(units) + group) * slot_floats;
  }
  __device__ float* unit_slot(int worker, int place_in_share) const {
    return slots + (static_cast<int64_t>(groups[num_rows]) + static_cast<int64_t>(worker) * kUnitSlots + place_in_share) * slot_floats;
  }
};

__global__ void plan_kernel(Plan plan) {
  const int lane = threadIdx.x;
  int places = 0, groups = 0;
  for (int first = 0; first < plan.num_rows; first += 32) {
    const int row = first + lane;
    int my_places = 0, my_groups = 0;
    if (row < plan.num_rows) {
      const UnitRange units = units_of(plan.positions[row], plan.window);
      my_places = units.count * plan.num_pairs;
      my_groups = num_groups(units) * plan.num_pairs;
    }
    int places_to_here = my_places, groups_to_here = my_groups;
    for (int step = 1; step < 32; step *= 2) {
      const int p = __shfl_up_sync(0xffffffffu, places_to_here, step), g = __shfl_up_sync(0xffffffffu, groups_to_here, step);
      if (lane >= step) places_to_here += p, groups_to_here += g;
    }
    if (row < plan.num_rows) plan.places[row] = places + places_to_here - my_places, plan.groups[row] = groups + groups_to_here - my_groups;
    places += __shfl_sync(0xffffffffu, places_to_here, 31);
    groups += __shfl_sync(0xffffffffu, groups_to_here, 31);
  }
  if (lane == 0) plan.places[plan.num_rows] = places, plan.groups[plan.num_rows] = groups;
}

__device__ int row_at(const Plan& plan, int place) {  // the row whose places hold it
  int low = 0, high = plan.num_rows;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (plan.places[middle] <= place) low = middle;
    else high = middle;
  }
  return low;
}

struct Heads {  // of a pair
  int kv_head, first, count;
};

__device__ Heads heads_of(int pair, int num_heads, int num_kv_heads) {
  const int group = num_heads / num_kv_heads, tiles = (group + kPairHeads - 1) / kPairHeads;
  const int kv_head = pair / tiles, offset = pair % tiles * kPairHeads;
  return {kv_head, kv_head * group + offset, min(kPairHeads, group - offset)};
}

template <class T, int D>
__device__ void load_queries(T* queries, const Matrix& q, int row, Heads heads, int lane) {
  constexpr int words = D / 8;
  for (int i = lane; i < kPairHeads * words; i += 32) {
    const int head = i / words, word = i % words;
    T* to = queries + head * Shape<D>::pitch + word * 8;
    if (head < heads.count) load_query<T>(to, q, row * q.stride + (heads.first + head) * D + word * 8);
    else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}

template <int D>
__device__ void store_state(float* slot, const State<D, 1>& state, int pair_heads, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = (lane >> 2) + 8 * r;
    if (head >= pair_heads) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<float2*>(slot + head * D + n * 8 + (lane & 3) * 2) = make_float2(state.o[0][n][2 * r], state.o[0][n][2 * r + 1]);
    if ((lane & 3) == 0) slot[pair_heads * D + head] = state.largest[0][r], slot[pair_heads * (D + 1) + head] = state.sum[0][r];
  }
}

template <class T, int D>
struct WalkArguments {
  Matrix q;
  Sequences<T> sequences;
  Scoring scoring;
  Plan plan;
  int num_heads;
};

// The part of a share that lies in one pair of one row.
template <class T, int D>
__device__ void walk_pair(const WalkArguments<T, D>& arguments, T* shared, int worker, int row, int pair, UnitRange units, int offset, int count) {
  const Plan& plan = arguments.plan;
  const int lane = threadIdx.x & 31, position = plan.positions[row], begin = units.first + offset, end = begin + count;
  const Heads heads = heads_of(pair, arguments.num_heads, arguments.sequences.num_kv_heads);
  T* queries = shared + Shape<D>::num_slots * Shape<D>::slot;
  __syncwarp();  // all lanes are through with the ring and the queries of the pair before
  load_queries<T, D>(queries, arguments.q, row, heads, lane);
  const Extent seen = {first_visible(position, plan.window), position};
  Reach<1> reach;
  reach.span = span_of(plan.window);
#pragma unroll
  for (int r = 0; r < 2; ++r) reach.last[0][r] = (lane >> 2) + 8 * r < heads.count ? position : -1;
  const int late_group = offset > 0 && begin % kGroupUnits != 0 ? begin / kGroupUnits : -1;  // begun by another worker
  float* const late_slots = plan.unit_slot(worker, 0);                                       // one for each unit from `begin`
  float* const slots = plan.group_slot(row, pair, units, begin);                             // one for each group from that of `begin`
  const auto last_of_run = [&](int unit) { return unit / kGroupUnits == late_group ? unit : unit / kGroupUnits * kGroupUnits + kGroupUnits - 1; };
  const auto emit = [&](const State<D, 1>& state, int unit) {
    const bool is_late = unit / kGroupUnits == late_group;
    float* slot = is_late ? late_slots + (unit - begin) * plan.slot_floats : slots + (unit / kGroupUnits - begin / kGroupUnits) * plan.slot_floats;
    store_state<D>(slot, state, plan.pair_heads, lane);
  };
  walk<T, D, 1, false>(arguments.sequences.cells(row, heads.kv_head), shared, queries, begin, end, seen, position, reach, arguments.scoring, Team{lane, 32},
                       last_of_run, emit);
}

template <class T, int D>
__global__ void __launch_bounds__(128, 1) walk_kernel(WalkArguments<T, D> arguments) {
  PYSERVE_DYN_SHARED(T, shared);
  PYSERVE_SHARED(int, kept, [128][kKept]);  // by each thread for itself: heads of 256 leave no registers for what outlives a pair
  const Plan& plan = arguments.plan;
  volatile int* const mine = kept[threadIdx.x];
  {
    const int warp = threadIdx.x / 32, worker = blockIdx.x * (blockDim.x / 32) + warp;
    mine[0] = share_start(worker, plan.num_workers, plan.total());
    mine[1] = share_start(worker + 1, plan.num_workers, plan.total());
    mine[2] = worker;
    mine[3] = warp * (Shape<D>::num_slots * Shape<D>::slot + kPairHeads * Shape<D>::pitch);
  }
#pragma unroll 1
  while (mine[0] < mine[1]) {
    const int place = mine[0], row = row_at(plan, place);
    const UnitRange units = units_of(plan.positions[row], plan.window);
    const int here = place - plan.places[row], pair = here / units.count, offset = here % units.count;
    const int count = min(units.count - offset, mine[1] - place);
    mine[0] = place + count;
    walk_pair<T, D>(arguments, shared + mine[3], mine[2], row, pair, units, offset, count);
  }
}

template <int D>
struct Row {  // one head's state, spread over a warp: column lane + 32 i
  static constexpr int columns = (D + 31) / 32;
  float o[columns] = {};
  float largest = -INFINITY, sum = 0.f;

  __device__ void load(const float* slot, int pair_heads, int head, int lane) {
    largest = slot[pair_heads * D + head], sum = slot[pair_heads * (D + 1) + head];
#pragma unroll
    for (int i = 0; i < columns; ++i)
      if (lane + 32 * i < D) o[i] = slot[head * D + lane + 32 * i];
  }
  __device__ void add(const Row& other, float exponent) {
    const Factors factors = merge_factors(largest, sum, other.largest, other.sum, exponent);
#pragma unroll
    for (int i = 0; i < columns; ++i) o[i] = merge(o[i], other.o[i], factors);
  }
};

__device__ __forceinline__ int next_group(int unit) { return unit / kGroupUnits * kGroupUnits + kGroupUnits; }

// `state` is that of the group which holds `unit`, as far as the worker that began it got: adds, one by one, the units that others did.
template <int D>
__device__ void add_late_units(Row<D>& state, const Plan& plan, int row, int pair, UnitRange units, int unit, int head, float exponent, int lane) {
  const int total = plan.total(), first_place = plan.places[row] + pair * units.count - units.first;
  const int end = first_place + min(next_group(unit), units.first + units.count);
  int worker = worker_at(first_place + unit, plan.num_workers, total);
  for (int place = share_start(worker + 1, plan.num_workers, total); place < end; ++place) {
    worker = worker_at(place, plan.num_workers, total);
    Row<D> late;
    late.load(plan.unit_slot(worker, place - share_start(worker, plan.num_workers, total)), plan.pair_heads, head, lane);
    state.add(late, exponent);
  }
}

template <int D>
__global__ void __launch_bounds__(128, 4) combine_kernel(Plan plan, Matrix out, int num_heads, int num_kv_heads, float exponent) {
  const int lane = threadIdx.x & 31, index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= plan.num_rows * num_heads) return;
  const int row = index / num_heads, head = index % num_heads, group = num_heads / num_kv_heads, tiles = (group + kPairHeads - 1) / kPairHeads;
  const int pair = head / group * tiles + head % group / kPairHeads, head_of_pair = head % group % kPairHeads;
  const UnitRange units = units_of(plan.positions[row], plan.window);
  const int end = units.first + units.count;
  constexpr int batch = D <= 128 ? 4 : 2;  // groups whose loads are under way at once
  Row<D> state;
  for (int first = units.first; first < end; first = next_group(first) + (batch - 1) * kGroupUnits) {
    Row<D> groups[batch];
#pragma unroll
    for (int i = 0, unit = first; i < batch; ++i, unit = next_group(unit))
      if (unit < end) groups[i].load(plan.group_slot(row, pair, units, unit), plan.pair_heads, head_of_pair, lane);
#pragma unroll
    for (int i = 0, unit = first; i < batch; ++i, unit = next_group(unit)) {
      if (unit >= end) break;
      add_late_units(groups[i], plan, row, pair, units, unit, head_of_pair, exponent, lane);
      state.add(groups[i], exponent);
    }
  }
  const float scale = inverse(state.sum);
#pragma unroll
  for (int i = 0; i < Row<D>::columns; ++i)
    if (lane + 32 * i < D) store_output(out, row * out.stride + head * D + lane + 32 * i, state.o[i] * scale);
}

int num_pairs(int64_t num_heads, int64_t num_kv_heads) {
  return static_cast<int>(num_kv_heads * ((num_heads / num_kv_heads + kPairHeads - 1) / kPairHeads));
}

int pair_heads(int64_t num_heads, int64_t num_kv_heads) { return static_cast<int>(std::min<int64_t>(kPairHeads, num_heads / num_kv_heads)); }

int64_t warp_bytes(int64_t head_dim) {  // of shared memory
  const int64_t num_slots = head_dim <= 128 ? 3 : 2;
  return (num_slots * kUnitLen + kPairHeads) * (head_dim + 8) * 2;
}

int warps_per_block(int64_t head_dim, const Device& device) {
  const int64_t left = device.shared_bytes - 128 * kKept * 4;
  return static_cast<int>(std::min<int64_t>(4, left / warp_bytes(head_dim)));
}

template <class T, int D>
int run(const Matrix& q, const AttentionSpec& spec, const Pool& pool, const StepRows& rows, const Matrix& out, Plan plan, bool is_planned,
        const Device& device, cudaStream_t stream) {
  const int num_warps = warps_per_block(D, device), num_heads = static_cast<int>(spec.num_heads), num_kv_heads = static_cast<int>(pool.num_kv_heads);
  const Scoring scoring = scoring_of(spec);
  int error = is_planned ? 0 : launch(plan_kernel, dim3(1), dim3(32), 0, stream, plan);
  if (error != 0) return error;
  const WalkArguments<T, D> arguments = {q, sequences_of<T>(pool, spec, rows), scoring, plan, num_heads};
  error = launch(walk_kernel<T, D>, dim3(device.num_sms), dim3(32 * num_warps), num_warps * warp_bytes(D), stream, arguments);
  if (error != 0) return error;
  const int num_states = plan.num_rows * num_heads;
  return launch(combine_kernel<D>, dim3((num_states + 3) / 4), dim3(128), 0, stream, plan, out, num_heads, num_kv_heads, scoring.exponent);
}

}  // namespace

extern "C" int64_t pyserve_cuda_attention_decode_scratch_bytes(int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                                               int64_t context_len, int64_t window, const Device* device) {
  const int64_t seen = window > 0 ? std::min(window, context_len) : context_len, group_len = kUnitLen * kGroupUnits;
  const int64_t groups = (seen + group_len - 1) / group_len + 1;  // one more where the window begins inside a group
  const int64_t num_slots = num_rows * num_pairs(num_heads, num_kv_heads) * groups + int64_t{device->num_sms} * warps_per_block(head_dim, *device) * kUnitSlots;
  const int64_t plan_bytes = (2 * (num_rows + 1) * 4 + 15) / 16 * 16;
  return plan_bytes + num_slots * pair_heads(num_heads, num_kv_heads) * (head_dim + 2) * 4;
}

namespace {

int attend(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out, void* scratch, int64_t scratch_bytes,
           bool is_planned, const Device* device, void* stream) {
  if (rows->num_rows == 0) return 0;
  if (!is_valid(*q, *spec, *pool) || warps_per_block(pool->head_dim, *device) < 1) return kInvalid;
  const int64_t context_len = rows->page_table_width * pool->page_size;
  if (scratch_bytes < pyserve_cuda_attention_decode_scratch_bytes(rows->num_rows, spec->num_heads, pool->num_kv_heads, pool->head_dim, context_len,
                                                                  spec->window, device))
    return kInvalid;
  Plan plan = {};
  plan.num_rows = static_cast<int>(rows->num_rows);
  plan.places = static_cast<int*>(scratch);
  plan.groups = plan.places + plan.num_rows + 1;
  plan.slots = reinterpret_cast<float*>(static_cast<char*>(scratch) + (2 * (plan.num_rows + 1) * 4 + 15) / 16 * 16);
  plan.num_pairs = num_pairs(spec->num_heads, pool->num_kv_heads);
  plan.pair_heads = pair_heads(spec->num_heads, pool->num_kv_heads);
  plan.num_workers = device->num_sms * warps_per_block(pool->head_dim, *device);
  plan.window = static_cast<int>(spec->window);
  plan.slot_floats = plan.pair_heads * (static_cast<int>(pool->head_dim) + 2);
  plan.positions = rows->positions;
  return with_pool_type(*pool, [&](auto tag) {
    using Chosen = decltype(tag);
    return run<typename Chosen::Type, Chosen::head_dim>(*q, *spec, *pool, *rows, *out, plan, is_planned, *device, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace

extern "C" int pyserve_cuda_attention_decode(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out,
                                             void* scratch, int64_t scratch_bytes, const Device* device, void* stream) {
  return attend(q, spec, pool, rows, out, scratch, scratch_bytes, false, device, stream);
}

extern "C" int pyserve_cuda_attention_decode_planned(const Matrix* q, const AttentionSpec* spec, const Pool* pool, const StepRows* rows, const Matrix* out,
                                                     void* scratch, int64_t scratch_bytes, const Device* device, void* stream) {
  return attend(q, spec, pool, rows, out, scratch, scratch_bytes, true, device, stream);
}

}  // namespace pyserve::cuda
