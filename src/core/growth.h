// The growth rule of te_attention.h: a struct of the caller as this library knows it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/error.h"

namespace tea {

// How messages name a struct and its size, and the bytes that every version has.
struct Growing {
  const char* argument;
  const char* type;  // "tea_run"
  const char* what;  // "a tea_run"
  const char* size_field = "struct_size";
  size_t least = sizeof(uint32_t);
};

// No struct will ever be so large: what claims to be is memory that nobody has set.
inline constexpr size_t kLargestStruct = 4096;

// A shorter struct is extended with zeros; a longer one is accepted if what this library does not
// know is zero.
template <class Struct>
Struct as_known(const Struct* caller, const Growing& names) {
  TEA_REQUIRE(caller, names.argument, caller, names.what);
  const size_t size = caller->struct_size;
  TEA_REQUIRE(size >= names.least, names.size_field, size,
              "sizeof(" + std::string(names.type) + ")");
  TEA_REQUIRE(size <= kLargestStruct, names.size_field, size,
              "sizeof(" + std::string(names.type) + "), at most " + shown(kLargestStruct));
  for (size_t i = sizeof(Struct); i < size; ++i)
    TEA_REQUIRE(!reinterpret_cast<const char*>(caller)[i], names.size_field, size,
                "at most " + shown(sizeof(Struct)) + ", or zeros beyond: a newer field is set");
  Struct known{};
  std::memcpy(&known, caller, std::min(size, sizeof known));
  return known;
}

}  // namespace tea
