// The class CopyEvent of torch.classes.pyserve, and pyserve_cuda's: a posted copy.
#pragma once
#include <torch/library.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "tensors.h"

namespace pyserve {

template <class Event>
struct EventHolder : torch::CustomClassHolder {
  std::shared_ptr<Event> event;
  explicit EventHolder(std::shared_ptr<Event> event) : event(std::move(event)) {}
};

template <class Event>
using EventPtr = c10::intrusive_ptr<EventHolder<Event>>;

template <class Event>
void define_event(torch::Library& m) {
  using Ptr = EventPtr<Event>;
  m.class_<EventHolder<Event>>("CopyEvent")
      .def("query", [](const Ptr& self) { return self->event->query(); })
      .def("wait", [](const Ptr& self, std::optional<double> timeout_s) { return self->event->wait(timeout_s); })
      .def("is_mismatch", [](const Ptr& self) { return self->event->is_mismatch(); })
      .def("copy_s", [](const Ptr& self) { return self->event->copy_s(); });
}

// What a copy must not outlive.
inline std::shared_ptr<void> kept_alive(const Tensor& pool, const Tensor& host, const MaybeTensor& hashes) {
  return std::make_shared<std::tuple<Tensor, Tensor, MaybeTensor>>(pool, host, hashes);
}

}  // namespace pyserve
