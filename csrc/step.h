// What a step is made of, and the checks that every program and the single ops make of it: what they throw names the argument. No torch here.
#pragma once
#include <cstdint>

#include "check.h"
#include "ops.h"

namespace pyserve {

struct Batch {
  const int32_t* tokens;       // [rows.num_rows]
  StepRows rows;
  int64_t num_sequences;
  const int32_t* sample_rows;  // [num_samples]: rows whose logits are wanted
  int64_t num_samples;
};

struct AttentionShape {
  int64_t layer, num_heads, num_kv_heads, head_dim;
};

inline void check_attention_shape(const AttentionShape& shape) {
  check(shape.layer >= 0, "layer must not be negative");
  check(shape.num_heads > 0 && shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads, not ",
        shape.num_heads, " of ", shape.num_kv_heads);
  check(shape.head_dim >= 8 && shape.head_dim <= 256 && shape.head_dim % 8 == 0, "head_dim must be a multiple of 8 in 8..256, not ", shape.head_dim);
}

inline void check_step_rows(const StepRows& rows, int64_t num_sequences, int64_t max_positions, const Pool& pool) {
  check_range(rows.positions, rows.num_rows, max_positions, "positions");
  check_range(rows.sequences, rows.num_rows, num_sequences, "sequences");
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const bool is_last = i + 1 == rows.num_rows || rows.sequences[i + 1] != rows.sequences[i];
    if (!is_last) {
      check(rows.positions[i + 1] > rows.positions[i], "positions[", i + 1, "] is ", rows.positions[i + 1], ": must ascend within a sequence");
      continue;
    }
    const int64_t num_pages = rows.positions[i] / pool.page_size + 1;
    check(num_pages <= rows.page_table_width, "page_table: position ", rows.positions[i], " needs ", num_pages, " columns, not ", rows.page_table_width);
    check_range(rows.page_table + rows.sequences[i] * rows.page_table_width, num_pages, pool.num_pages, "page_table: page");
  }
}

}  // namespace pyserve
