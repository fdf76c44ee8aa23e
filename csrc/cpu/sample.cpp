// Picks one token from a row of logits.
//
// Truncation comes first and temperature last, in the order of llama.cpp's default chain: the top_k most probable; of these the fewest that hold top_p of
// their probability; of these the ones with at least min_p of the best one's. Equal logits rank by id, the lower first. What remains is weighed with the
// temperature and one number drawn from (seed, position) picks. Minus infinity, which is what a ban leaves, is never picked. A row with a NaN, or whose largest
// logit is not finite, is none to pick from: kBrokenRow.
//
// The vocabulary is not sorted: only the best k are, where k is top_k or, with top_p alone, just enough to hold it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "linear_kernels.h"

namespace pyserve {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kChunk = 256;

struct Candidate {
  float logit;
  int32_t id;
  bool operator<(const Candidate& other) const { return logit > other.logit || (logit == other.logit && id < other.id); }  // the better one first
};

uint64_t mix(uint64_t z) {  // the output function of splitmix64 (Steele, Lea, Flood 2014)
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

double uniform(uint64_t seed, uint64_t position) {  // [0, 1), 53 bits
  constexpr uint64_t step = 0x9e3779b97f4a7c15u;
  return double(mix(mix(seed + step) + (position + 1) * step) >> 11) * 0x1p-53;
}

int32_t first_equal(const float* logits, int64_t count, float value) { return int32_t(std::find(logits, logits + count, value) - logits); }

bool any_above(const float* logits, float threshold) {
  int count = 0;
  for (int l = 0; l < 16; ++l) count += logits[l] > threshold;
  return count != 0;
}

// The k best, in order. Returns how many there are: fewer than k when the rest is minus infinity.
int64_t select_best(const float* logits, int64_t vocab_size, int64_t k, Candidate* out) {
  const int64_t room = 2 * k + 64;  // then all but the best k go, which sets the bar for those that follow
  int64_t count = 0;
  float bar = -kInfinity;
  for (int64_t first = 0; first < vocab_size; first += 16) {
    const int64_t last = std::min(first + 16, vocab_size);
    if (last - first == 16 && !any_above(logits + first, bar)) continue;
    for (int64_t i = first; i < last; ++i)
      if (logits[i] > bar) out[count++] = {logits[i], int32_t(i)};  // an equal one with a higher id would rank below
    if (count <= room) continue;
    std::nth_element(out, out + k - 1, out + count);
    count = k;
    bar = out[k - 1].logit;
  }
  if (count > k) std::nth_element(out, out + k - 1, out + count);
  count = std::min(count, k);
  std::sort(out, out + count);
  return count;
}

struct Nucleus {
  double needed_mass;  // top_p of the vocabulary's, where the best token's is 1
  int64_t max_tokens;  // no fewer than hold it
};

// One pass: mass and number of tokens by their distance from the best logit, in 1/16 of a nat; so that no more are sorted than nearly belong.
Nucleus measure_nucleus(const float* logits, int64_t vocab_size, float best, float top_p) {
  constexpr int num_bins = 256;
  double mass_in[num_bins] = {}, total = 0;
  int64_t tokens_in[num_bins] = {};
  float mass[kChunk];
  for (int64_t i = 0; i < vocab_size; i += kChunk) {
    const int64_t count = std::min(kChunk, vocab_size - i);
    linear_kernels().exp_scaled(logits + i, best, 1.f, mass, count);
    for (int64_t j = 0; j < count; ++j) {
      if (!(mass[j] > 0.f)) continue;
      total += mass[j];
      const float distance = (best - logits[i + j]) * 16.f;
      if (distance < num_bins) mass_in[int(distance)] += mass[j], ++tokens_in[int(distance)];
    }
  }
  const double needed = top_p * total;
  int64_t tokens = 0;
  double sum = 0;
  for (int bin = 0; bin < num_bins; ++bin) {
    sum += mass_in[bin], tokens += tokens_in[bin];
    if (sum >= needed * 1.0001) return {needed, tokens};  // a little more: the exact sum is made in another precision
  }
  return {needed, vocab_size};
}

// How many of the sorted candidates stay: the fewest that hold `needed_mass`, of these the ones at or above `floor`.
int64_t cut_off(const Candidate* sorted, int64_t count, double needed_mass, float floor) {
  const float best = sorted[0].logit;
  double mass = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0 && sorted[i].logit < floor) return i;
    mass += std::exp(double(sorted[i].logit) - best);
    if (mass >= needed_mass) return i + 1;
  }
  return count;
}

double mass_of(const Candidate* sorted, int64_t count) {
  double mass = 0;
  for (int64_t i = 0; i < count; ++i) mass += std::exp(double(sorted[i].logit) - sorted[0].logit);
  return mass;
}

// `weight(i)` in order of `i`: the first one whose running sum passes u * total.
template <class Weight>
int64_t draw(int64_t count, double u, Weight&& weight) {
  double total = 0, sum = 0;
  for (int64_t i = 0; i < count; ++i) total += weight(i);
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double w = weight(i);
    sum += w;
    if (w > 0) last = i;
    if (w > 0 && sum > u * total) return i;
  }
  return last;
}

int32_t draw_candidate(const Candidate* sorted, int64_t count, float temperature, double u) {
  const double best = sorted[0].logit;
  return sorted[draw(count, u, [&](int64_t i) { return std::exp((double(sorted[i].logit) - best) / temperature); })].id;
}

// Neither top_k nor top_p: nothing needs an order, so the draw goes by id.
int32_t draw_unsorted(const float* logits, int64_t vocab_size, float best, float floor, float temperature, double u, float* weights) {
  linear_kernels().exp_scaled(logits, best, temperature, weights, vocab_size);
  for (int64_t i = 0; i < vocab_size; ++i)
    if (!(logits[i] > -kInfinity && logits[i] >= floor)) weights[i] = 0.f;
  return int32_t(draw(vocab_size, u, [weights](int64_t i) { return double(weights[i]); }));
}

}  // namespace

void change_logits(float* logits, int64_t stride, const LogitChange* changes, int64_t num_changes) {
  for (const LogitChange* change = changes; change != changes + num_changes; ++change) {
    float& place = logits[change->row * stride + change->token];
    float logit = place + change->bias;
    if (change->count > 0) {
      if (change->repeat != 1) logit = logit > 0 ? logit / change->repeat : logit * change->repeat;
      logit = logit - change->count * change->frequency - change->presence;
    }
    place = change->is_banned ? -kInfinity : logit;
  }
}

int32_t sample_row(const float* logits, int64_t vocab_size, const SampleRow& row, float* scratch) {
  const float best = linear_kernels().largest(logits, vocab_size);
  if (!std::isfinite(best)) return kBrokenRow;
  if (!(row.temperature > 0)) return first_equal(logits, vocab_size, best);
  const float floor = row.min_p > 0 ? best + std::log(std::min(row.min_p, 1.f)) : -kInfinity;
  const double u = uniform(row.seed, row.position);
  const bool has_top_k = row.top_k > 0 && row.top_k < vocab_size, has_top_p = row.top_p < 1;
  if (!has_top_k && !has_top_p) return draw_unsorted(logits, vocab_size, best, floor, row.temperature, u, scratch);

  auto* sorted = (Candidate*)scratch;
  Nucleus nucleus{kInfinity, row.top_k};
  if (!has_top_k) nucleus = measure_nucleus(logits, vocab_size, best, row.top_p);
  const int64_t count = select_best(logits, vocab_size, nucleus.max_tokens, sorted);
  if (has_top_k && has_top_p) nucleus.needed_mass = row.top_p * mass_of(sorted, count);
  return draw_candidate(sorted, cut_off(sorted, count, nucleus.needed_mass, floor), row.temperature, u);
}

}  // namespace pyserve
