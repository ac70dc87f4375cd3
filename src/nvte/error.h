// Errors of the TransformerEngine C API: std::runtime_error whose text begins with the place,
// "file:line in function name: message".
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tea::nvte {

template <class... Parts>
std::string concatenated(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Prints only the last part of the path, because messages must not contain a build folder.
[[noreturn]] inline void fail(std::string_view file, int line, const char* function,
                              const std::string& message) {
  throw std::runtime_error(concatenated(file.substr(file.rfind('/') + 1), ":", line,
                                        " in function ", function, ": ", message));
}

}  // namespace tea::nvte

// The message is the concatenation of the arguments, which are evaluated only on failure.
#define TEA_NVTE_ERROR(...) \
  ::tea::nvte::fail(__FILE__, __LINE__, __func__, ::tea::nvte::concatenated(__VA_ARGS__))

#define TEA_NVTE_CHECK(condition, ...)                                                   \
  do {                                                                                   \
    if (!(condition)) TEA_NVTE_ERROR("Assertion failed: " #condition ". ", __VA_ARGS__); \
  } while (0)
