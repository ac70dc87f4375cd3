// The float formats once more, generic and slow: the kit encodes what the library must decode, so
// the two share nothing.
#pragma once
#include <cstdint>

namespace tea::kit {

// Bits of `x` in `dtype` (a tea_dtype), rounded to nearest even; fp8 saturates.
uint64_t encode(int32_t dtype, double x);
double decode(int32_t dtype, uint64_t bits);

int bytes_of(int32_t dtype);
double largest_of(int32_t dtype);
double smallest_of(int32_t dtype);  // the smallest subnormal

void store(void* base, int32_t dtype, int64_t index, double x);
double load(const void* base, int32_t dtype, int64_t index);

}  // namespace tea::kit
