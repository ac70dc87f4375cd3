// The C boundary: exceptions become a status, and tea_error() returns their text.
#pragma once
#include <new>
#include <string>

#include "core/error.h"

namespace tea {

void set_last_error(const char* text) noexcept;
const char* last_error() noexcept;

template <class Body>
tea_status guarded(Body&& body) noexcept {
  try {
    body();
    return TEA_OK;
  } catch (const Error& e) {
    set_last_error(e.what());
    return e.status;
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
  } catch (const std::exception& e) {
    set_last_error(e.what());
  } catch (...) {
    set_last_error("an exception of unknown type");
  }
  return TEA_FAILED;
}

// The rule of text results in te_attention.h.
void copy_text(const std::string& text, char* buffer, size_t capacity, size_t* needed);

}  // namespace tea
