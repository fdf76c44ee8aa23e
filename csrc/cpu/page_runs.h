// A list of pages as combs, so that a park is a handful of copies (R16). pyserve/page_runs.py says what runs and combs are, and gives the same.
#pragma once
#include <cstdint>
#include <vector>

#include "page_copy.h"

namespace pyserve {

// The combs of `pages` in list order. `first_offset`: the list offset of the first page.
std::vector<Comb> combs_of(const int32_t* pages, int64_t num_pages, int64_t first_offset);

}  // namespace pyserve
