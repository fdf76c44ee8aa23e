// How the tokens of a started step are picked, as Python says it: samplers, bans, biases and penalties, checked and made into changes of logits.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "check.h"
#include "ops.h"
#include "step.h"
#include "tensors.h"

namespace pyserve {

struct Picking {
  Tensor real, whole;  // float32 [R, 3]: temperature, top_p, min_p; int64 [R, 3]: top_k, seed, position
  Tensor bans;         // int64 [n, 2]: sample row, token id
  // Of Weighing in pyserve/ops/program.py; undefined where nothing but bans changes logits
  Tensor penalties;  // float32 [R, 3]: repeat, presence, frequency
  Tensor places;     // int64 [n, 2]: sample row, token id; rows ascend
  Tensor values;     // float32 [n, 2]: bias, count

  bool is_weighed() const { return penalties.defined(); }
  std::vector<std::pair<int64_t, int64_t>> sorted_bans() const {
    std::vector<std::pair<int64_t, int64_t>> sorted;
    const int64_t* each = bans.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < bans.size(0); ++i, each += 2) sorted.emplace_back(each[0], each[1]);
    std::sort(sorted.begin(), sorted.end());
    return sorted;
  }
};

inline void check_samplers(const Tensor& real, const Tensor& whole, int64_t num_rows) {
  check_tensor(real, "real", at::kFloat, 2);
  check_tensor(whole, "whole", at::kLong, 2);
  check(real.size(0) == num_rows && real.size(1) == 3, "real must be [", num_rows, ", 3]");
  check(whole.size(0) == num_rows && whole.size(1) == 3, "whole must be [", num_rows, ", 3]");
}

inline void check_places(const Tensor& places, const char* name, int64_t num_rows, int64_t width) {
  check_tensor(places, name, at::kLong, 2);
  check(places.size(1) == 2, name, " must be [n, 2]");
  const int64_t* place = places.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < places.size(0); ++i, place += 2) {
    check(place[0] >= 0 && place[0] < num_rows, name, ": row ", place[0], " is not in the step");
    check(place[1] >= 0 && place[1] < width, name, ": id ", place[1], " is not in the vocabulary");
  }
}

inline void check_picking(const Picking& picking, int64_t num_rows, int64_t width) {
  check_samplers(picking.real, picking.whole, num_rows);
  check_places(picking.bans, "bans", num_rows, width);
  if (!picking.is_weighed()) return;
  check_tensor(picking.penalties, "penalties", at::kFloat, 2);
  check(picking.penalties.size(0) == num_rows && picking.penalties.size(1) == 3, "penalties must be [", num_rows, ", 3]");
  check_places(picking.places, "places", num_rows, width);
  check_tensor(picking.values, "values", at::kFloat, 2);
  check(picking.values.size(0) == picking.places.size(0) && picking.values.size(1) == 2, "values must be [", picking.places.size(0), ", 2]");
}

// What is done to logits before tokens are picked, row by row, no token of a row twice. `follows`: the tokens of the batch are in no window yet, and count once
// more. Where only the device knows one, it is -1 - i: the first change of its row, and what the row's others come `after`.
inline std::vector<LogitChange> changes_of(const Picking& picking, const Batch& batch, bool follows) {
  const bool is_weighed = picking.is_weighed();
  if (follows && is_weighed) check_range(batch.sample_rows, batch.num_samples, batch.rows.num_rows, "sample_rows");
  const int64_t *places = is_weighed ? picking.places.const_data_ptr<int64_t>() : nullptr, num_places = is_weighed ? picking.places.size(0) : 0;
  const float *values = is_weighed ? picking.values.const_data_ptr<float>() : nullptr, none[] = {1.f, 0.f, 0.f};
  const std::vector<std::pair<int64_t, int64_t>> bans = picking.sorted_bans();
  std::vector<LogitChange> changes;
  int64_t place = 0;
  for (int64_t row = 0, ban = 0; row < batch.num_samples; ++row) {
    const float* by = is_weighed ? picking.penalties.const_data_ptr<float>() + 3 * row : none;
    const bool counts = follows && !std::equal(by, by + 3, none);
    const int64_t before = counts ? batch.tokens[batch.sample_rows[row]] : 0;
    const size_t first = changes.size();
    const auto append = [&](int64_t token, float bias, float count) -> LogitChange& {
      const auto after = static_cast<int32_t>(token < 0 ? 0 : std::min(before, int64_t{0}));
      return changes.emplace_back(LogitChange{static_cast<int32_t>(row), static_cast<int32_t>(token), bias, count, by[0], by[1], by[2], 0, after});
    };
    const auto change_of = [&](int64_t token) -> LogitChange& {
      const auto found = std::find_if(changes.begin() + first, changes.end(), [token](const LogitChange& each) { return each.token == token; });
      return found == changes.end() ? append(token, 0.f, 0.f) : *found;
    };
    if (before < 0) append(before, 0.f, 1.f);
    for (; place < num_places && places[2 * place] == row; ++place) append(places[2 * place + 1], values[2 * place], values[2 * place + 1]);
    if (counts && before >= 0) change_of(before).count += 1.f;
    for (; ban < static_cast<int64_t>(bans.size()) && bans[ban].first == row; ++ban) change_of(bans[ban].second).is_banned = 1;
  }
  check(place == num_places, "places must be in the order of their rows");
  return changes;
}

}  // namespace pyserve
