#include "inputs.h"

#include <algorithm>
#include <utility>

namespace pyserve::cuda {
namespace {

constexpr int64_t kAlign = 4;  // int32 values: each part starts on 16 bytes
constexpr int64_t kFewRows = 8, kManyRows = 64, kLeastWidth = 8;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t next_power(int64_t value) {
  int64_t power = 1;
  while (power < value) power *= 2;
  return power;
}

int64_t padded_rows(int64_t num_rows) {  // 1, 2, 4, 8, then by eights, then by 32
  if (num_rows <= kFewRows) return next_power(num_rows);
  return round_up(num_rows, num_rows <= kManyRows ? kFewRows : 32);
}

int64_t padded_width(int64_t num_pages) { return std::max(kLeastWidth, next_power(num_pages)); }

}  // namespace

Size largest_size(int64_t num_sequences, int64_t num_pages) { return {padded_rows(num_sequences), padded_width(num_pages)}; }

int64_t used_table_width(const Batch& batch, int64_t page_size) {
  return *std::max_element(batch.rows.positions, batch.rows.positions + batch.rows.num_rows) / page_size + 1;
}

std::optional<Size> decode_size(const Batch& batch, int64_t page_size, int64_t max_rows) {
  const StepRows& rows = batch.rows;
  if (batch.num_samples != rows.num_rows || padded_rows(rows.num_rows) > max_rows) return std::nullopt;
  for (int64_t i = 1; i < rows.num_rows; ++i)
    if (rows.sequences[i] == rows.sequences[i - 1]) return std::nullopt;
  return Size{padded_rows(rows.num_rows), padded_width(used_table_width(batch, page_size))};
}

Layout layout_of(int64_t num_rows, int64_t num_sequences, int64_t table_width, int64_t num_samples, int64_t num_tile_values) {
  int64_t end = 0;
  const auto place = [&](int64_t count) { return std::exchange(end, end + round_up(count, kAlign)); };
  Layout layout{};
  layout.tokens = place(num_rows);
  layout.positions = place(num_rows);
  layout.sequences = place(num_rows);
  layout.page_table = place(num_sequences * table_width);
  layout.sample_rows = place(num_samples);
  layout.tiles = place(num_tile_values);
  layout.end = end;
  return layout;
}

void write_step(const Batch& batch, const Layout& layout, int64_t table_width, const std::vector<int32_t>& tiles, int32_t* to) {
  const StepRows& rows = batch.rows;
  std::copy_n(batch.tokens, rows.num_rows, to + layout.tokens);
  std::copy_n(rows.positions, rows.num_rows, to + layout.positions);
  std::copy_n(rows.sequences, rows.num_rows, to + layout.sequences);
  for (int64_t i = 0; i < batch.num_sequences && table_width > 0; ++i)
    std::copy_n(rows.page_table + i * rows.page_table_width, table_width, to + layout.page_table + i * table_width);
  std::copy_n(batch.sample_rows, batch.num_samples, to + layout.sample_rows);
  std::copy(tiles.begin(), tiles.end(), to + layout.tiles);
}

void write_decode_step(const Batch& batch, const Layout& layout, const Size& size, int32_t* to) {
  const StepRows& rows = batch.rows;
  for (int64_t i = 0; i < size.num_rows; ++i) {
    const bool is_real = i < rows.num_rows;
    to[layout.tokens + i] = is_real ? batch.tokens[i] : 0;
    to[layout.positions + i] = is_real ? rows.positions[i] : -1;
    to[layout.sequences + i] = static_cast<int32_t>(i);
    to[layout.sample_rows + i] = is_real ? batch.sample_rows[i] : 0;
    int32_t* pages = to + layout.page_table + i * size.table_width;
    const int64_t width = is_real ? std::min(size.table_width, rows.page_table_width) : 0;
    std::fill(std::copy_n(rows.page_table + (is_real ? rows.sequences[i] : 0) * rows.page_table_width, width, pages), pages + size.table_width, 0);
  }
}

}  // namespace pyserve::cuda
