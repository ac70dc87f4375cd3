// Casts to and from fp8 with one scale per tensor, and the largest magnitude of a tensor.
#pragma once
#include "ops/args.h"

namespace tea {

void fp8_quantize(const tea_fp8_cast& args, const Place& place);
void fp8_quantize_current(const tea_fp8_cast& args, const Place& place);
void fp8_dequantize(const tea_fp8_cast& args, const Place& place);

struct ConstElements {
  const void* data;
  int32_t dtype;
  int64_t count;
};
// *amax = maximum of *amax and |element|, NaN not counted.
void update_amax(const ConstElements& of, float* amax, const Place& place);

}  // namespace tea
