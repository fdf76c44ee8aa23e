// Sampling with a temperature: the same tokens as csrc/cpu/sample.cpp picks from the same logits.
//
// Order as there: the top_k most probable; of these the fewest that hold top_p of their probability; of these the ones with at least min_p of the best one's;
// then the temperature, and one number out of (seed, position) draws. Equal logits rank by id, the lower first. Minus infinity is never picked; a broken
// row gives kBrokenRow.
//
// One block a row, nothing sorted. A token is a rank: its logit as an ordered integer, then its id turned round, so that all ranks differ. Each question (who is
// the k-th? with whom is top_p reached? whom does the draw hit?) is: the highest rank R such that the weights of all tokens at or above R reach a target. R is found
// bit by bit, one sum over the candidates for each bit. Weights are 64-bit integers, probabilities in units of 2^-42 of the best token's: their sums are exact, so
// neither the order of adding nor the company shows in a token (R37), and two sums of the same weights agree.
//
// Candidates: one pass counts the tokens within 2, 4, .. 32 of the best logit. The nearest circle that is sure to hold enough goes into shared memory, at most
// 4096; where it does not fit (a flat distribution, a huge top_k) every sum goes over the row instead: slower, and with exponentials in float.
// Neither top_k nor top_p: the draw goes by id, in two passes.
//
// How near to the CPU's: it adds doubles, this adds integers; its exponentials are these. A number that falls within 1e-12 of the border between two tokens (1e-7
// where the sums go over the row) may hit the other one.
//
// Layout: logits f32 [num_rows, vocab_size], rows `stride` elements apart; real f32 [num_rows, 3]: temperature, top_p, min_p; whole int64 [num_rows, 3]: top_k,
// seed, position; tokens int32 [num_rows]. All on the device.
// Not handled: vocabularies of 2^20 tokens and more. Not run on hardware so far: proved on the emulator of tests/cuda. No time has been measured.
#include "best.cuh"

namespace pyserve::cuda {
namespace {

constexpr int kMaxListed = 4096, kCircles = 5;
constexpr int64_t kMaxVocab = 1 << 20;
constexpr double kUnits = 4398046511104.0;  // 2^42: the best token's weight

using Weight = unsigned long long;
using Rank = unsigned long long;

__device__ uint64_t mix(uint64_t z) {  // the output function of splitmix64 (Steele, Lea, Flood 2014)
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

__device__ double uniform(uint64_t seed, uint64_t position) {  // [0, 1), 53 bits
  constexpr uint64_t step = 0x9e3779b97f4a7c15u;
  return static_cast<double>(mix(mix(seed + step) + (position + 1) * step) >> 11) * (1.0 / 9007199254740992.0);
}

// e^x for x <= 0 as csrc/cpu/linear_rows.h has it, to the bit where that fuses products and sums.
__device__ float exponential(float x) {
  if (x < -87.3f) return 0.f;
  const int n = __float2int_rn(__fmul_rn(x, 1.44269504f));
  const float whole = __int2float_rn(n);
  const float r = __fmaf_rn(whole, 2.12194440e-4f, __fmaf_rn(whole, -0.693359375f, x));
  float p = 1.f / 5040;
  p = __fmaf_rn(p, r, 1.f / 720), p = __fmaf_rn(p, r, 1.f / 120), p = __fmaf_rn(p, r, 1.f / 24), p = __fmaf_rn(p, r, 1.f / 6);
  p = __fmaf_rn(p, r, 0.5f), p = __fmaf_rn(p, r, 1.f), p = __fmaf_rn(p, r, 1.f);
  return __uint_as_float(__float_as_uint(p) + (static_cast<uint32_t>(n) << 23));
}

__device__ Weight to_weight(double probability) { return static_cast<Weight>(probability * kUnits + 0.5); }

__device__ bool is_usable(float logit) { return logit > -INFINITY; }

struct Row {
  const float* logits;
  int vocab_size, id_bits;
  float best, temperature;

  __device__ Rank rank(float logit, int id) const {
    const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.f));  // minus zero is zero
    const uint32_t ordered = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
    return (static_cast<Rank>(ordered) << id_bits) + ((Rank{1} << id_bits) - 1 - static_cast<Rank>(id));
  }
  __device__ int id_of(Rank rank) const { return static_cast<int>((Rank{1} << id_bits) - 1 - (rank & ((Rank{1} << id_bits) - 1))); }
  __device__ float logit_of(Rank rank) const {
    const uint32_t ordered = static_cast<uint32_t>(rank >> id_bits);
    return __uint_as_float(ordered >> 31 != 0 ? ordered & 0x7fffffffu : ~ordered);
  }
};

// Over the block; every thread gets the sum. `turn` alternates between 0 and 1, so that one barrier is enough.
__device__ __forceinline__ Weight block_sum(Weight value, int turn) {
  PYSERVE_SHARED(Weight, sums, [2][kSampleWarps]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  if ((threadIdx.x & 31) == 0) sums[turn][threadIdx.x / 32] = value;
  __syncthreads();
  Weight total = 0;
#pragma unroll
  for (int warp = 0; warp < kSampleWarps; ++warp) total += sums[turn][warp];
  return total;
}

enum class Weigh { count, probability, tempered };

struct Listed {  // the candidates are in shared memory
  static constexpr bool is_exact = true;
  const Rank* ranks;
  int count;
  const Row& row;

  template <class Action>
  __device__ void each(Action&& action) const {
    for (int i = threadIdx.x; i < count; i += kSampleThreads) action(row.logit_of(ranks[i]), ranks[i], i);
  }
};

struct Everyone {  // the candidates are the row
  static constexpr bool is_exact = false;
  const Row& row;

  template <class Action>
  __device__ void each(Action&& action) const {
    for (int id = threadIdx.x; id < row.vocab_size; id += kSampleThreads)
      if (is_usable(row.logits[id])) action(row.logits[id], row.rank(row.logits[id], id), id);
  }
};

template <class Candidates>
__device__ Weight weight_of(const Candidates& candidates, float logit, Weigh weigh) {
  const Row& row = candidates.row;
  if (weigh == Weigh::count) return 1;
  const float divisor = weigh == Weigh::tempered ? row.temperature : 1.f;
  if constexpr (Candidates::is_exact) return to_weight(exp((static_cast<double>(logit) - row.best) / divisor));
  return to_weight(exponential(__fdiv_rn(__fsub_rn(logit, row.best), divisor)));
}

// Of the candidates at or above `least`, whose weights lie in `weights` where they are listed.
template <class Candidates>
struct Question {
  const Candidates& candidates;
  Weight* weights;
  Rank least;
  Weigh weigh;
  int turn;

  // To be called once before any sum, by all threads: each thread reads back what it wrote itself.
  __device__ void begin() {
    if constexpr (Candidates::is_exact) candidates.each([&](float logit, Rank, int i) { weights[i] = weight_of(candidates, logit, weigh); });
  }
  __device__ Weight sum_from(Rank rank) {
    Weight mine = 0;
    candidates.each([&](float logit, Rank other, int i) {
      if (other < rank) return;
      if constexpr (Candidates::is_exact) mine += weights[i];
      else mine += weight_of(candidates, logit, weigh);
    });
    return block_sum(mine, turn ^= 1);
  }
  // The highest rank, up to `highest`, with which the sum reaches the target; `least` when it never does.
  __device__ Rank reach(Weight target, Rank highest) {
    const int num_bits = 64 - __clzll(static_cast<long long>(highest ^ least));
    Rank found = num_bits == 64 ? 0 : highest >> num_bits << num_bits;
    for (int bit = num_bits - 1; bit >= 0; --bit) {
      const Rank tried = found | Rank{1} << bit;
      if (tried <= highest && sum_from(tried) >= target) found = tried;
    }
    return found > least ? found : least;
  }
};

struct Settings {
  float top_p, floor;
  int64_t top_k;  // 0: none
  bool has_top_p;
  double u;
};

__device__ Weight target_of(double share, Weight total) {  // at least so much, never more than there is
  const Weight target = static_cast<Weight>(share * static_cast<double>(total));
  return target < total ? target + 1 : total;
}

// `total` is the probability of all tokens, for top_p without top_k.
template <class Candidates>
__device__ int draw(const Candidates& candidates, Weight* weights, const Settings& settings, Rank best, Rank lowest, Weight total) {
  const Row& row = candidates.row;
  Rank least = lowest;
  int turn = 1;  // the last sum of `measure` was of this turn
  if (settings.top_k > 0) {
    Question<Candidates> question = {candidates, weights, least, Weigh::count, turn};
    question.begin();
    least = question.reach(static_cast<Weight>(settings.top_k), best);
    turn = question.turn;
  }
  if (settings.has_top_p) {
    Question<Candidates> question = {candidates, weights, least, Weigh::probability, turn};
    question.begin();
    if (settings.top_k > 0) total = question.sum_from(least);
    const double needed = ceil(static_cast<double>(settings.top_p) * static_cast<double>(total));
    const Rank reached = question.reach(needed < 1.0 ? 1 : static_cast<Weight>(needed), best);
    least = reached > least ? reached : least;
    turn = question.turn;
  }
  if (settings.floor > -INFINITY) {
    const Rank floor = row.rank(settings.floor, row.vocab_size - 1);
    least = floor > least ? floor : least;
  }
  Question<Candidates> question = {candidates, weights, least, Weigh::tempered, turn};
  question.begin();
  const Weight target = target_of(settings.u, question.sum_from(least));
  return row.id_of(question.reach(target, best));
}

// By id: each warp adds a stretch of the ids; the warp whose stretch the draw falls into walks it.
__device__ void draw_by_id(const Row& row, float floor, double u, int32_t* token) {
  PYSERVE_SHARED(Weight, stretches, [kSampleWarps]);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, len = (row.vocab_size + kSampleThreads - 1) / kSampleThreads * 32;
  const int first = warp * len, last = min(first + len, row.vocab_size);
  const auto weight_at = [&](int id) -> Weight {
    if (id >= last || !is_usable(row.logits[id]) || row.logits[id] < floor) return 0;
    return to_weight(exponential(__fdiv_rn(__fsub_rn(row.logits[id], row.best), row.temperature)));
  };
  Weight sum = 0;
  for (int id = first + lane; id < last; id += 32) sum += weight_at(id);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (lane == 0) stretches[warp] = sum;
  __syncthreads();  // the stretches of all warps are there
  Weight before = 0, total = 0;
  for (int i = 0; i < kSampleWarps; ++i) {
    if (i == warp) before = total;
    total += stretches[i];
  }
  const Weight target = target_of(u, total);
  if (before >= target || before + sum < target) return;
  for (int start = first; start < last; start += 32) {
    Weight upto = weight_at(start + lane);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const Weight other = __shfl_up_sync(kAllLanes, upto, step);
      if (lane >= step) upto += other;
    }
    const unsigned hit = __ballot_sync(kAllLanes, before + upto >= target);
    if (hit != 0) {
      if (lane == 0) *token = start + __ffs(static_cast<int>(hit)) - 1;
      return;
    }
    before += __shfl_sync(kAllLanes, upto, 31);
  }
}

struct Circles {  // of tokens around the best logit: circle i has those within 2 << i; the last one is everything
  Weight count[kCircles + 1], probability[kCircles + 1];
};

__device__ float radius(int circle) { return static_cast<float>(2 << circle); }

__device__ void measure(const Row& row, Circles& circles) {
  uint32_t count[kCircles + 1] = {};
  Weight probability[kCircles + 1] = {};
  for (int id = threadIdx.x; id < row.vocab_size; id += kSampleThreads) {
    const float logit = row.logits[id];
    if (!is_usable(logit)) continue;
    const float distance = __fsub_rn(row.best, logit);
    const Weight weight = to_weight(exponential(-distance));
#pragma unroll
    for (int i = 0; i <= kCircles; ++i)
      if (i == kCircles || distance <= radius(i)) ++count[i], probability[i] += weight;
  }
#pragma unroll
  for (int i = 0; i <= kCircles; ++i) circles.count[i] = block_sum(count[i], 0), circles.probability[i] = block_sum(probability[i], 1);
}

// The ranks of all tokens within `reach` of the best one, in any order; the barrier is in here.
__device__ void list(const Row& row, float reach, Rank* ranks, int* count) {
  for (int id = threadIdx.x; id < row.vocab_size; id += kSampleThreads) {
    const float logit = row.logits[id];
    if (is_usable(logit) && __fsub_rn(row.best, logit) <= reach) ranks[atomicAdd(count, 1)] = row.rank(logit, id);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kSampleThreads, 1) draw_kernel(const float* logits, int64_t stride, int vocab_size, const float* real, const int64_t* whole,
                                                              int32_t* tokens) {
  PYSERVE_DYN_SHARED(Rank, shared);
  PYSERVE_SHARED(int, num_listed, );
  real += blockIdx.x * 3, whole += blockIdx.x * 3, tokens += blockIdx.x;
  Row row = {logits + blockIdx.x * stride, vocab_size, 32 - __clz(vocab_size), 0.f, real[0]};
  if (threadIdx.x == 0) num_listed = 0;
  const Best best = best_of_row(row.logits, vocab_size);
  row.best = best.logit;
  if (!(row.temperature > 0.f) || best.id == kBrokenRow) {
    if (threadIdx.x == 0) *tokens = best.id;
    return;
  }
  Settings settings = {real[1], -INFINITY, whole[0] < vocab_size ? whole[0] : 0, real[1] < 1.f, 0.0};
  settings.u = uniform(static_cast<uint64_t>(whole[1]), static_cast<uint64_t>(whole[2]));
  if (real[2] > 0.f) settings.floor = __fadd_rn(best.logit, logf(real[2] < 1.f ? real[2] : 1.f));
  if (settings.top_k <= 0 && !settings.has_top_p) return draw_by_id(row, settings.floor, settings.u, tokens);

  Circles circles;
  measure(row, circles);
  const Weight total = circles.probability[kCircles];
  const double needed = static_cast<double>(settings.top_p) * static_cast<double>(total) * 1.0001;  // a little more: the sum is made again, more exactly
  int circle = 0;
  const auto is_enough = [&](int i) {
    if (settings.top_k > 0) return circles.count[i] >= static_cast<Weight>(settings.top_k);
    return static_cast<double>(circles.probability[i]) >= needed;
  };
  while (circle < kCircles && !is_enough(circle)) ++circle;
  const Rank highest = row.rank(best.logit, best.id);
  int token;
  if (circles.count[circle] <= kMaxListed) {
    list(row, circle < kCircles ? radius(circle) : INFINITY, shared, &num_listed);
    token = draw(Listed{shared, num_listed, row}, shared + kMaxListed, settings, highest, 0, total);
  } else {
    token = draw(Everyone{row}, nullptr, settings, highest, 0, total);
  }
  if (threadIdx.x == 0) *tokens = token;
}

}  // namespace

extern "C" int pyserve_cuda_draw(const float* logits, int64_t stride, int64_t vocab_size, const float* real, const int64_t* whole, int64_t num_rows,
                                 int32_t* tokens, void* stream) {
  if (num_rows == 0) return 0;
  if (vocab_size <= 0 || stride < vocab_size || vocab_size >= kMaxVocab) return kInvalid;
  return launch(draw_kernel, dim3(static_cast<unsigned>(num_rows)), dim3(kSampleThreads), 2 * kMaxListed * sizeof(Rank), static_cast<cudaStream_t>(stream),
                logits, stride, static_cast<int>(vocab_size), real, whole, tokens);
}

}  // namespace pyserve::cuda
