// printf into a string (the standard library of gcc 12 has no std::format).
#pragma once
#include <cstdarg>
#include <cstdio>
#include <string>

namespace gpt {

[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
  std::va_list values, again;
  va_start(values, pattern);
  va_copy(again, values);
  std::string text(std::vsnprintf(nullptr, 0, pattern, values) + 1, '\0');
  std::vsnprintf(text.data(), text.size(), pattern, again);
  va_end(again);
  va_end(values);
  text.pop_back();
  return text;
}

}  // namespace gpt
