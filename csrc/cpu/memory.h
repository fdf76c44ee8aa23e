// Memory for what is read again and again: in huge pages where the system gives them, since a step walks through all weights and with small pages spends much of
// its time on address translation (in a virtual machine twice over).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace pyserve {

// Zeros, 64-byte aligned, a mapping of its own; pages that nobody touches cost nothing. Throws std::bad_alloc.
std::shared_ptr<uint8_t> map_memory(size_t num_bytes);

// The same, as a piece of a mapping that many share: a weight is often smaller than a huge page. The mapping goes with the last of its pieces.
std::shared_ptr<uint8_t> share_memory(size_t num_bytes);

}  // namespace pyserve
