// Host checks whose messages name the argument. No torch here: kernels and program use them too. What they throw reaches Python as ValueError.
#pragma once
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pyserve {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// check(width > 0, "width must be positive, not ", width)
template <class... Parts>
void check(bool is_good, const Parts&... parts) {
  if (!is_good) fail(parts...);
}

inline void check_equal(int64_t found, int64_t wanted, const char* what) { check(found == wanted, what, " must be ", wanted, ", not ", found); }

// Every value in [0, limit); the message names the first that is not.
inline void check_range(const int32_t* values, int64_t count, int64_t limit, const char* what) {
  for (int64_t i = 0; i < count; ++i) {
    check(values[i] >= 0 && values[i] < limit, what, "[", i, "] is ", values[i], ": must be in 0..", limit - 1);
  }
}

}  // namespace pyserve
