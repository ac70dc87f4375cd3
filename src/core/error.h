// The one error type. A message names the argument, the value seen and the value needed.
#pragma once
#include <charconv>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "te_attention.h"

namespace tea {

struct Error : std::runtime_error {
  tea_status status;
  Error(tea_status code, const std::string& message) : std::runtime_error(message), status(code) {}
};

// The text of a value in a message. (Literals are arrays, not pointers, here.)
template <class T>
std::string shown(const T& value) {
  if constexpr (std::is_floating_point_v<T>) {
    char buffer[32];  // the shortest text that is this value
    return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
  } else if constexpr (std::is_arithmetic_v<T>) {
    return std::to_string(value);
  } else {
    if constexpr (std::is_pointer_v<T>)
      if (!value) return "NULL";
    if constexpr (std::is_convertible_v<T, std::string>)
      return std::string(value);
    else
      return "a pointer";
  }
}

[[noreturn]] inline void refuse_argument(const std::string& name, const std::string& seen,
                                         const std::string& needed) {
  throw Error(TEA_INVALID, name + " is " + seen + "; needs " + needed);
}

}  // namespace tea

// The texts are built only when the check fails.
#define TEA_REQUIRE(condition, name, seen, needed)                                    \
  do {                                                                                \
    if (!(condition)) ::tea::refuse_argument((name), ::tea::shown((seen)), (needed)); \
  } while (0)
