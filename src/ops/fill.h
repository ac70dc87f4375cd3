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

// The bytes of one element, repeated.
struct Pattern {
  unsigned char byte[8];
  int size;
};
void fill_pattern_on_gpu(void* data, const Pattern& pattern, int64_t bytes, const Place& place);

}  // namespace tea
