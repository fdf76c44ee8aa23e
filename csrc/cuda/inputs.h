// What a step reads that differs from step to step: tokens, positions, page table, sample rows, tiles of prompt attention. One piece of device memory, filled by one
// copy out of pinned memory.
//
// A decode step is laid out for a size, rows and columns of the page table, that it is padded to: then all addresses are the same for every step of that size, and a
// graph can hold them (graphs.h). Rows beyond the real ones have position -1, which no kernel reads or writes KV for.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "../step.h"
#include "device.h"

namespace pyserve::cuda {

struct Size {  // that a decode step is padded to
  int64_t num_rows, table_width;
};

// The size of a step whose rows are each alone in their sequence and all sampled; nullopt: it is not one, or it has more than `max_rows`.
std::optional<Size> decode_size(const Batch& batch, int64_t page_size, int64_t max_rows);

// The largest size of a step of so many sequences, each of as many pages at most.
Size largest_size(int64_t num_sequences, int64_t num_pages);

struct Layout {  // where each part begins, in int32
  int64_t tokens, positions, sequences, page_table, sample_rows, tiles, end;
};
Layout layout_of(int64_t num_rows, int64_t num_sequences, int64_t table_width, int64_t num_samples, int64_t num_tile_values);

// Columns of the page table that some row reads.
int64_t used_table_width(const Batch& batch, int64_t page_size);

// Writes the batch to `to` [layout.end]. Decode steps get a page table with one row for each row of the batch.
void write_step(const Batch& batch, const Layout& layout, int64_t table_width, const std::vector<int32_t>& tiles, int32_t* to);
void write_decode_step(const Batch& batch, const Layout& layout, const Size& size, int32_t* to);

}  // namespace pyserve::cuda
