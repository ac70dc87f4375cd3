// The error text of each thread, and text results.
#include "core/boundary.h"

#include <algorithm>
#include <cstring>

namespace tea {
namespace {
thread_local std::string text_of_last_error;
}

void set_last_error(const char* text) noexcept {
  try {
    text_of_last_error = text;
  } catch (...) {  // no memory for the text: keep the previous text
  }
}

const char* last_error() noexcept { return text_of_last_error.c_str(); }

void copy_text(const std::string& text, char* buffer, size_t capacity, size_t* needed) {
  TEA_REQUIRE(buffer || !capacity, "buffer", buffer, "memory for capacity bytes");
  if (needed) *needed = text.size() + 1;
  if (!capacity) return;
  const size_t n = std::min(text.size(), capacity - 1);
  std::memcpy(buffer, text.data(), n);
  buffer[n] = '\0';
}

}  // namespace tea
