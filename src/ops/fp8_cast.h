// Casts to and from fp8 with one scale for each tensor or for several, and the largest magnitude of
// a tensor.
#pragma once
#include <cfloat>
#include <cmath>

#include "math/formats.h"
#include "ops/args.h"

namespace tea {

void fp8_quantize(const tea_fp8_cast& args, const Place& place);
void fp8_quantize_current(const tea_fp8_cast& args, const Place& place);
void fp8_dequantize(const tea_fp8_cast& args, const Place& place);
void fp8_quantize_joint(const tea_fp8_joint_cast& args, const Place& place);
void fp8_quantize_joint_current(const tea_fp8_joint_cast& args, const Place& place);
void fp8_dequantize_joint(const tea_fp8_joint_cast& args, const Place& place);

struct ConstElements {
  const void* data;
  int32_t dtype;
  int64_t count;
};
// *amax = maximum of *amax and |element|, ignoring NaN.
void update_amax(const ConstElements& of, float* amax, const Place& place);

// The step of delayed scaling.
void fp8_update_scales(const tea_fp8_scales& args, const Place& place);

// The scale of delayed scaling that follows from an amax; the previous one where none does.
TEA_HOST_DEVICE float next_scale(float amax, float previous, const tea_fp8_scales& a) {
  if (!(amax > 0) || amax == INFINITY) return previous;
  const float largest = a.dtype == TEA_E4M3 ? kE4M3.largest : kE5M2.largest;
  return fminf(largest / amax * exp2f(-a.margin), FLT_MAX);
}

// The scale of current scaling: it maps amax to the largest value of the format.
TEA_HOST_DEVICE float scale_for(float amax, const tea_fp8_joint_cast& a) {
  amax = fmaxf(amax, a.amax_floor);
  if (!(amax > 0) || amax == INFINITY) return 1;
  const float largest = a.output_dtype == TEA_E4M3 ? kE4M3.largest : kE5M2.largest;
  const float scale = fminf(largest / amax, FLT_MAX);  // finite even where amax is subnormal
  return a.power_of_two ? ldexpf(1, ilogbf(scale)) : scale;
}

// Numbers whose largest is the amax of current scaling; none: delayed scaling.
struct Maxima {
  const float* data = nullptr;
  int32_t count = 0;
};
// Each is one kernel: the whole of delayed scaling, or the second half of current scaling;
// the whole of current scaling, which returns false if the tensors are too large; dequantising; the
// first half of current scaling, which fills args.maxima; the amax of a tensor; the step of delayed
// scaling.
void quantize_on_gpu(const tea_fp8_joint_cast& args, const Maxima& maxima, const Place& place);
bool quantize_small_on_gpu(const tea_fp8_joint_cast& args, const Place& place);
void dequantize_on_gpu(const tea_fp8_joint_cast& args, const Place& place);
Maxima find_maxima_on_gpu(const tea_fp8_joint_cast& args, const Place& place);
void update_amax_on_gpu(const ConstElements& of, float* amax, const Place& place);
void update_scales_on_gpu(const tea_fp8_scales& args, const Place& place);

}  // namespace tea
