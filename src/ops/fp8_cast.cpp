// Casts to and from fp8. Products with a scale are computed in fp32, as in device code.
#include "ops/fp8_cast.h"

#include "core/problem.h"
#include "math/load_store.h"
#include "ops/fill.h"

namespace tea {
namespace {

void check_common(const tea_fp8_cast& a) {
  if (require_sizes({{"count", a.count}}))
    require_pointers({{"input", a.input, dtype_bytes(a.input_dtype)},
                      {"output", a.output, dtype_bytes(a.output_dtype)}});
}

void check_to_fp8(const tea_fp8_cast& a) {
  require_dtype("input_dtype", a.input_dtype, kRealDtypes);
  require_dtype("output_dtype", a.output_dtype, kFp8Dtypes);
  check_common(a);
}

void refuse_current_options(const tea_fp8_cast& a) {
  TEA_REQUIRE(!a.power_of_two, "power_of_two", a.power_of_two, "0 except for current scaling");
  TEA_REQUIRE(a.amax_floor == 0, "amax_floor", a.amax_floor, "0 except for current scaling");
  TEA_REQUIRE(!a.amax_given, "amax_given", a.amax_given, "0 except for current scaling");
}

float load_float(const void* data, int32_t dtype, int64_t i) {
  return static_cast<float>(load_real(data, dtype, i));
}

float largest_magnitude(const ConstElements& of, float start) {
  float amax = start;
  for (int64_t i = 0; i < of.count; ++i)
    amax = std::fmax(amax, std::fabs(load_float(of.data, of.dtype, i)));
  return amax;
}

void cast(const tea_fp8_cast& a, float factor) {
  for (int64_t i = 0; i < a.count; ++i)
    store_real(a.output, a.output_dtype, i, double{load_float(a.input, a.input_dtype, i) * factor});
}

// Current scaling on a GPU: the maximum, then the cast with the resulting scale.
void quantize_current_there(const tea_fp8_cast& a, const Place& place) {
  TEA_REQUIRE(a.amax, "amax", a.amax, "memory: a GPU keeps the maximum there between two kernels");
  if (!a.amax_given) {
    fill_elements({a.amax, TEA_FP32, 1}, 0, place);
    update_amax({a.input, a.input_dtype, a.count}, a.amax, place);
  }
  if constexpr (kGpuCode) quantize_on_gpu(a, true, place);
}

}  // namespace

void fp8_quantize(const tea_fp8_cast& args, const Place& place) {
  check_to_fp8(args);
  refuse_current_options(args);
  if (!is_host(place)) {
    if constexpr (kGpuCode) quantize_on_gpu(args, false, place);
    return;
  }
  const float scale = args.scale ? *args.scale : 1;
  cast(args, scale);
  if (args.amax)
    *args.amax = largest_magnitude({args.input, args.input_dtype, args.count}, *args.amax);
  if (args.scale_inv) *args.scale_inv = 1 / scale;
}

void fp8_quantize_current(const tea_fp8_cast& args, const Place& place) {
  check_to_fp8(args);
  require_flag("power_of_two", args.power_of_two);
  require_flag("amax_given", args.amax_given);
  TEA_REQUIRE(args.amax || !args.amax_given, "amax", args.amax, "memory with amax_given");
  TEA_REQUIRE(args.amax_floor >= 0 && std::isfinite(args.amax_floor), "amax_floor", args.amax_floor,
              "finite, 0 or more");
  if (!is_host(place)) {
    quantize_current_there(args, place);
    return;
  }
  const float amax = args.amax_given
                         ? *args.amax
                         : largest_magnitude({args.input, args.input_dtype, args.count}, 0);
  const float scale = scale_for(amax, args);
  cast(args, scale);
  if (args.amax) *args.amax = amax;
  if (args.scale) *args.scale = scale;
  if (args.scale_inv) *args.scale_inv = 1 / scale;
}

void fp8_dequantize(const tea_fp8_cast& args, const Place& place) {
  require_dtype("input_dtype", args.input_dtype, kFp8Dtypes);
  require_dtype("output_dtype", args.output_dtype, kRealDtypes);
  check_common(args);
  refuse_current_options(args);
  TEA_REQUIRE(!args.scale, "scale", args.scale, "NULL: dequantising reads scale_inv");
  TEA_REQUIRE(!args.amax, "amax", args.amax, "NULL: dequantising records none");
  if (is_host(place))
    cast(args, args.scale_inv ? *args.scale_inv : 1);
  else if constexpr (kGpuCode)
    dequantize_on_gpu(args, place);
}

void update_amax(const ConstElements& of, float* amax, const Place& place) {
  require_dtype("dtype", of.dtype, kAnyDtype);
  if (require_sizes({{"count", of.count}}))
    require_pointers({{"data", of.data, dtype_bytes(of.dtype)}});
  require_pointers({{"amax", amax}});
  if (is_host(place))
    *amax = largest_magnitude(of, *amax);
  else if constexpr (kGpuCode)
    update_amax_on_gpu(of, amax, place);
}

void fp8_update_scales(const tea_fp8_scales& args, const Place& place) {
  require_dtype("dtype", args.dtype, kFp8Dtypes);
  TEA_REQUIRE(args.algorithm == TEA_AMAX_MAX || args.algorithm == TEA_AMAX_MOST_RECENT, "algorithm",
              args.algorithm, "TEA_AMAX_MAX or TEA_AMAX_MOST_RECENT");
  TEA_REQUIRE(std::isfinite(args.margin), "margin", args.margin, "a finite number");
  TEA_REQUIRE(args.length > 0, "length", args.length, "1 or more");
  if (!require_sizes({{"length", args.length}, {"count", args.count}})) return;
  require_pointers({{"amax_history", args.amax_history}, {"scale", args.scale}});
  if (!is_host(place)) {
    if constexpr (kGpuCode) update_scales_on_gpu(args, place);
    return;
  }
  for (int64_t i = 0; i < args.count; ++i) {
    float* const history = args.amax_history + i;
    const float latest = args.amax ? args.amax[i] : history[0];
    float amax = latest;
    for (int64_t row = 1; row < args.length; ++row) {
      if (args.algorithm == TEA_AMAX_MAX) amax = std::fmax(amax, history[row * args.count]);
      history[(row - 1) * args.count] = history[row * args.count];
    }
    history[(args.length - 1) * args.count] = latest;
    history[0] = 0;
    args.scale[i] = next_scale(amax, args.scale[i], args);
  }
}

}  // namespace tea
