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
  if (has_avx2 && has_avx512) return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512;
  if (has_avx2) return Isa::avx2;
#endif
  return Isa::generic;
}

Isa chosen() {
  const char* text = std::getenv("PYSERVE_CPU_ISA");
  if (text == nullptr || *text == '\0') return found();
  for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    if (std::string(text) == isa_name(isa)) return std::min(isa, found());
  }
  throw std::invalid_argument(std::string("PYSERVE_CPU_ISA must be generic, avx2, avx512 or avx512_bf16, not \"") + text + "\"");
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::generic: break;
  }
  return "generic";
}

Isa isa() {
  static const Isa value = chosen();
  return value;
}

}  // namespace pyserve
