// A function as Python calls it: std::invalid_argument, which check.h throws, reaches Python as ValueError. torch turns what a method throws into RuntimeError
// unless it is one of its own errors; from 2.15 on, what an op throws too.
#pragma once
#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

namespace pyserve {

// m.impl("linear", &Callable<&linear_op>::call)
template <auto function>
struct Callable;
template <class Result, class... Args, Result (*function)(Args...)>
struct Callable<function> {
  static Result call(Args... args) {
    try {
      return function(std::forward<Args>(args)...);
    } catch (const std::invalid_argument& error) {
      throw c10::ValueError({__func__, __FILE__, __LINE__}, error.what());
    }
  }
};

}  // namespace pyserve
