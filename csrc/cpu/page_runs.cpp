#include "page_runs.h"

namespace pyserve {

std::vector<Comb> combs_of(const int32_t* pages, int64_t num_pages, int64_t first_offset) {
  std::vector<Comb> combs;
  bool can_join = false;  // the last comb is made of upward runs
  for (int64_t offset = 0; offset < num_pages;) {
    const int64_t start = pages[offset];
    int64_t count = 1;
    const bool is_down = offset + 1 < num_pages && pages[offset + 1] == start - 1;
    const int64_t step = is_down ? -1 : 1;
    while (offset + count < num_pages && pages[offset + count] == start + count * step) ++count;
    if (is_down) {
      combs.push_back(Comb{start, 1, -1, count, first_offset + offset});
    } else if (can_join && combs.back().run_pages == count &&
               (combs.back().count == 1 || start == combs.back().start_page + combs.back().count * combs.back().stride_pages)) {
      Comb& comb = combs.back();
      if (comb.count == 1) comb.stride_pages = start - comb.start_page;
      ++comb.count;
    } else {
      combs.push_back(Comb{start, count, count, 1, first_offset + offset});
    }
    can_join = !is_down;
    offset += count;
  }
  return combs;
}

}  // namespace pyserve
