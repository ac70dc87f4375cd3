// The wrapper of an exported function: it converts every exception to a std::runtime_error in the
// form of nvte/error.h.
#pragma once
#include <exception>
#include <new>
#include <utility>

#include "core/error.h"
#include "nvte/error.h"

namespace tea::nvte {

template <class Body>
decltype(auto) exported(const char* file, int line, const char* function, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const Error& e) {
    fail(file, line, function, e.what());
  } catch (const std::runtime_error&) {
    throw;  // already has the form of nvte/error.h
  } catch (const std::bad_alloc&) {
    fail(file, line, function, "out of memory");
  } catch (const std::exception& e) {
    fail(file, line, function, e.what());
  }
}

}  // namespace tea::nvte

#define TEA_NVTE_EXPORTED(...) \
  ::tea::nvte::exported(__FILE__, __LINE__, __func__, [&]() -> decltype(auto) { __VA_ARGS__ })
