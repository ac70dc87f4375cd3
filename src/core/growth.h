// The growth rule of te_attention.h: conversion of the caller's structs to this library's version.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/error.h"

namespace tea {

// The names of a struct in messages, and the bytes that every version has.
struct Growing {
  const char* argument;
  const char* type;  // "tea_run"
  const char* what;  // "a tea_run"
  const char* size_field = "struct_size";
  size_t least = sizeof(uint32_t);
};

// Larger than any struct: a larger size is uninitialised memory.
inline constexpr size_t kLargestStruct = 4096;

// A shorter struct is extended with zeros; a longer one is accepted if the unknown bytes are zero.
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

// Copies the part of a result that fits the caller's struct, under the same rule. `first`: its size
// in the first version, which is the meaning of 0. Throws if `keep_all` and a field does not fit.
template <class Struct>
size_t room_for(const Struct& caller, const Struct& result, const Growing& names, size_t first,
                bool keep_all) {
  const size_t size = caller.struct_size ? caller.struct_size : first;
  TEA_REQUIRE(size >= names.least && size <= kLargestStruct, names.size_field, size,
              "sizeof(" + std::string(names.type) + "), or 0: " + shown(first));
  for (size_t i = size; keep_all && i < sizeof result; ++i)
    TEA_REQUIRE(!reinterpret_cast<const char*>(&result)[i], names.size_field, size,
                "at least " + shown(sizeof result) + ": a newer field is set");
  return size;
}

template <class Struct>
void give(Struct* caller, Struct result, const Growing& names, size_t first,
          bool keep_all = false) {
  const size_t size = room_for(*caller, result, names, first, keep_all);
  result.struct_size = static_cast<uint32_t>(size);
  if (size > sizeof result)
    std::memset(reinterpret_cast<char*>(caller) + sizeof result, 0, size - sizeof result);
  std::memcpy(static_cast<void*>(caller), &result, std::min(size, sizeof result));
}

}  // namespace tea
