// Casts to and from fp8. Products with a scale are computed in fp32, as in device code.
#include "ops/fp8_cast.h"

#include "core/problem.h"
#include "math/load_store.h"
#include "ops/fill.h"
#include "ops/on_gpu.h"

namespace tea {
namespace {

tea_fp8_joint_cast joint_of(const tea_fp8_cast& a) {
  tea_fp8_joint_cast out{};
  out.input_dtype = a.input_dtype, out.output_dtype = a.output_dtype;
  out.power_of_two = a.power_of_two, out.amax_floor = a.amax_floor;
  out.tensors = 1;
  out.input[0] = a.input, out.output[0] = a.output, out.count[0] = a.count;
  out.scale = a.scale, out.scale_inv = a.scale_inv, out.amax = a.amax;
  return out;
}

void check_common(const tea_fp8_joint_cast& a) {
  TEA_REQUIRE(a.tensors >= 1 && a.tensors <= TEA_FP8_TENSORS, "tensors", a.tensors, "1 to 4");
  for (int i = 0; i < a.tensors; ++i)
    if (require_sizes({{"count", a.count[i]}}))
      require_pointers({{"input", a.input[i], dtype_bytes(a.input_dtype)},
                        {"output", a.output[i], dtype_bytes(a.output_dtype)}});
}

void check_to_fp8(const tea_fp8_joint_cast& a) {
  require_dtype("input_dtype", a.input_dtype, kRealDtypes);
  require_dtype("output_dtype", a.output_dtype, kFp8Dtypes);
  check_common(a);
  for (int i = 0; i < 2; ++i)
    if (a.copied[i]) require_pointers({{"copied", a.copied[i]}, {"copy", a.copy[i]}});
}

void check_delayed(const tea_fp8_joint_cast& a) {
  check_to_fp8(a);
  TEA_REQUIRE(!a.power_of_two, "power_of_two", a.power_of_two, "0 except for current scaling");
  TEA_REQUIRE(a.amax_floor == 0, "amax_floor", a.amax_floor, "0 except for current scaling");
}

void check_current(const tea_fp8_joint_cast& a) {
  check_to_fp8(a);
  require_flag("power_of_two", a.power_of_two);
  TEA_REQUIRE(a.amax_floor >= 0 && std::isfinite(a.amax_floor), "amax_floor", a.amax_floor,
              "finite, 0 or more");
}

void refuse_amax_given(const tea_fp8_cast& a) {
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

float largest_magnitude(const tea_fp8_joint_cast& a, float start) {
  for (int i = 0; i < a.tensors; ++i)
    start = largest_magnitude({a.input[i], a.input_dtype, a.count[i]}, start);
  return start;
}

void cast(const tea_fp8_joint_cast& a, float factor) {
  for (int t = 0; t < a.tensors; ++t)
    for (int64_t i = 0; i < a.count[t]; ++i)
      store_real(a.output[t], a.output_dtype, i,
                 double{load_float(a.input[t], a.input_dtype, i) * factor});
}

void quantize_here(const tea_fp8_joint_cast& a, float scale) {
  cast(a, scale);
  if (a.scale_inv) *a.scale_inv = 1 / scale;
  for (int i = 0; i < 2; ++i)
    if (a.copied[i]) a.copy[i][0] = *a.copied[i], a.copy[i][1] = 1 / *a.copied[i];
}

void quantize_current_here(const tea_fp8_joint_cast& a, float amax) {
  const float scale = scale_for(amax, a);
  quantize_here(a, scale);
  if (a.amax) *a.amax = amax;
  if (a.scale) *a.scale = scale;
}

}  // namespace

void fp8_quantize_joint(const tea_fp8_joint_cast& args, const Place& place) {
  check_delayed(args);
  if (!is_host(place)) return on_gpu([&] { quantize_on_gpu(args, {}, place); });
  quantize_here(args, args.scale ? *args.scale : 1);
  if (args.amax) *args.amax = largest_magnitude(args, *args.amax);
}

void fp8_quantize_joint_current(const tea_fp8_joint_cast& args, const Place& place) {
  check_current(args);
  if (is_host(place)) {
    quantize_current_here(args, largest_magnitude(args, 0));
    return;
  }
  TEA_REQUIRE(args.maxima, "maxima", args.maxima, "memory: a GPU keeps maxima between two kernels");
  on_gpu([&] {
    if (!quantize_small_on_gpu(args, place))
      quantize_on_gpu(args, find_maxima_on_gpu(args, place), place);
  });
}

void fp8_dequantize_joint(const tea_fp8_joint_cast& args, const Place& place) {
  require_dtype("input_dtype", args.input_dtype, kFp8Dtypes);
  require_dtype("output_dtype", args.output_dtype, kRealDtypes);
  check_common(args);
  TEA_REQUIRE(!args.power_of_two, "power_of_two", args.power_of_two, "0: dequantising has none");
  TEA_REQUIRE(args.amax_floor == 0, "amax_floor", args.amax_floor, "0: dequantising has none");
  TEA_REQUIRE(!args.scale, "scale", args.scale, "NULL: dequantising reads scale_inv");
  TEA_REQUIRE(!args.amax, "amax", args.amax, "NULL: dequantising records none");
  if (!is_host(place)) return on_gpu([&] { dequantize_on_gpu(args, place); });
  cast(args, args.scale_inv ? *args.scale_inv : 1);
}

void fp8_quantize(const tea_fp8_cast& args, const Place& place) {
  refuse_amax_given(args);
  fp8_quantize_joint(joint_of(args), place);
}

void fp8_dequantize(const tea_fp8_cast& args, const Place& place) {
  refuse_amax_given(args);
  fp8_dequantize_joint(joint_of(args), place);
}

void fp8_quantize_current(const tea_fp8_cast& args, const Place& place) {
  const tea_fp8_joint_cast joint = joint_of(args);
  check_current(joint);
  require_flag("amax_given", args.amax_given);
  TEA_REQUIRE(args.amax || !args.amax_given, "amax", args.amax, "memory with amax_given");
  if (is_host(place)) {
    quantize_current_here(joint, args.amax_given ? *args.amax : largest_magnitude(joint, 0));
    return;
  }
  TEA_REQUIRE(args.amax, "amax", args.amax,
              "memory: a GPU keeps the maximum there between two kernels");
  on_gpu([&] {
    if (args.amax_given) return quantize_on_gpu(joint, {args.amax, 1}, place);
    if (quantize_small_on_gpu(joint, place)) return;
    fill_elements({args.amax, TEA_FP32, 1}, 0, place);
    update_amax({args.input, args.input_dtype, args.count}, args.amax, place);
    quantize_on_gpu(joint, {args.amax, 1}, place);
  });
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
  if (!is_host(place)) return on_gpu([&] { update_scales_on_gpu(args, place); });
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
