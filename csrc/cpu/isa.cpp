#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace pyserve {
namespace {

Isa found() {
#if PYSERVE_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (has_avx2 && has_avx512) return Isa::avx512;
  if (has_avx2) return Isa::avx2;
#endif
  return Isa::generic;
}

Isa chosen() {
  const char* text = std::getenv("PYSERVE_CPU_ISA");
  if (text == nullptr || *text == '\0') return found();
  for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512}) {
    if (std::string(text) == isa_name(isa)) return std::min(isa, found());
  }
  throw std::invalid_argument(std::string("PYSERVE_CPU_ISA must be generic, avx2 or avx512, not \"") + text + "\"");
}

}  // namespace

const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "generic"; }

Isa isa() {
  static const Isa value = chosen();
  return value;
}

}  // namespace pyserve
