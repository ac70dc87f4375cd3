// Fills of bytes and of elements.
#pragma once
#include "ops/args.h"

namespace tea {
void fill_bytes(void* data, int value, uint64_t bytes, const Place& place);

struct Elements {
  void* data;
  int32_t dtype;
  int64_t count;
};
void fill_elements(const Elements& to, double value, const Place& place);
}  // namespace tea
