// Casts to and from FP8, one scale for each tensor or for several; scales, amax, and fills.
#include <vector>

#include "torch/ops.h"
#include "torch/tensor.h"

namespace tea::torch_ops {
namespace {

struct Cast {
  Place place;
  Tensor output;
  tea_fp8_cast args = sized<tea_fp8_cast>();

  Cast(const Tensor& input, const std::string& dtype) : place("input", input), output(input) {
    const View view(input);
    args.input_dtype = dtype_of(input);
    args.output_dtype = frontend::dtype_named("dtype", dtype);
    output = empty(input, torch_dtype(args.output_dtype), view.rank, view.size,
                   is_dense(view) ? view.stride : nullptr);
    args.input = place.dense_memory("input", input);
    args.output = output.data_ptr();
    args.count = view.elements();
  }
  Tensor scalar() const { return empty(output, torch_dtype(TEA_FP32), {1}); }
  void run(tea_status (*verb)(const tea_fp8_cast*, int, void*)) const {
    require(verb(&args, place.where.device, place.where.stream));
  }
};

// The results of the operators of current scaling.
struct Current {
  Tensor scale, scale_inv, amax;

  explicit Current(const Cast& cast)
      : scale(cast.scalar()), scale_inv(cast.scalar()), amax(cast.scalar()) {}
  void give_to(tea_fp8_cast& args) const {
    args.scale = static_cast<float*>(scale.data_ptr());
    args.scale_inv = static_cast<float*>(scale_inv.data_ptr());
    args.amax = static_cast<float*>(amax.data_ptr());
  }
};

struct CurrentOptions {
  std::string dtype;
  bool power_of_two;
  float amax_floor;

  explicit CurrentOptions(Stack& in)  // in the order of the schemas
      : dtype(in.text()), power_of_two(in.flag()), amax_floor(static_cast<float>(in.number())) {}
  void give_to(tea_fp8_cast& args) const {
    args.power_of_two = power_of_two;
    args.amax_floor = amax_floor;
  }
};

std::vector<Cast> casts_of(const std::vector<Tensor>& inputs, const std::string& dtype) {
  if (inputs.empty()) refuse("inputs", "no tensors", "at least one");
  std::vector<Cast> casts;
  for (const Tensor& input : inputs) {
    require_device("inputs", input, device_of("inputs", inputs[0]));
    casts.emplace_back(input, dtype);
  }
  return casts;
}

std::vector<Tensor> outputs_of(const std::vector<Cast>& casts) {
  std::vector<Tensor> outputs;
  for (const Cast& cast : casts) outputs.push_back(cast.output);
  return outputs;
}

}  // namespace

void fp8_quantize(Stack& stack) {
  const Tensor input = stack.tensor();
  const std::optional<Tensor> scale = stack.maybe_tensor(), amax = stack.maybe_tensor();
  Cast cast(input, stack.text());
  const Tensor scale_inv = cast.scalar();
  if (scale) cast.args.scale = cast.place.fp32("scale", *scale);
  if (amax) cast.args.amax = cast.place.fp32("amax", *amax);
  cast.args.scale_inv = static_cast<float*>(scale_inv.data_ptr());
  cast.run(tea_fp8_quantize);
  stack.give(cast.output, scale_inv);
}

void fp8_quantize_joint(Stack& stack) {
  const std::vector<Tensor> tensors = stack.tensors();
  const std::optional<Tensor> scale = stack.maybe_tensor(), amax = stack.maybe_tensor();
  std::vector<Cast> casts = casts_of(tensors, stack.text());
  const Tensor scale_inv = casts[0].scalar();
  for (Cast& cast : casts) {
    if (scale) cast.args.scale = cast.place.fp32("scale", *scale);
    if (amax) cast.args.amax = cast.place.fp32("amax", *amax);
    cast.args.scale_inv = static_cast<float*>(scale_inv.data_ptr());
    cast.run(tea_fp8_quantize);
  }
  stack.give(outputs_of(casts), scale_inv);
}

void fp8_quantize_current(Stack& stack) {
  const Tensor input = stack.tensor();
  const CurrentOptions options(stack);
  Cast cast(input, options.dtype);
  const Current found(cast);
  options.give_to(cast.args);
  found.give_to(cast.args);
  cast.run(tea_fp8_quantize_current);
  stack.give(cast.output, found.scale, found.scale_inv, found.amax);
}

void fp8_quantize_joint_current(Stack& stack) {
  const std::vector<Tensor> tensors = stack.tensors();
  const CurrentOptions options(stack);
  std::vector<Cast> casts = casts_of(tensors, options.dtype);
  const Current found(casts[0]);
  const Where& where = casts[0].place.where;
  auto* const amax = static_cast<float*>(found.amax.data_ptr());
  require(tea_fill_bytes(amax, 0, sizeof *amax, where.device, where.stream));
  for (const Cast& cast : casts)
    require(tea_amax(cast.args.input, cast.args.input_dtype, cast.args.count, amax, where.device,
                     where.stream));
  for (Cast& cast : casts) {
    options.give_to(cast.args);
    found.give_to(cast.args);
    cast.args.amax_given = 1;
    cast.run(tea_fp8_quantize_current);
  }
  stack.give(outputs_of(casts), found.scale, found.scale_inv, found.amax);
}

void fp8_scale(Stack& stack) {
  const Tensor amax = stack.tensor();
  const CurrentOptions options(stack);
  const Place place("amax", amax);
  const Tensor scale = empty(amax, torch_dtype(TEA_FP32), {1});
  const Tensor scale_inv = empty(amax, torch_dtype(TEA_FP32), {1});
  if (amax.numel() != 1) refuse("amax", "of shape " + shape_text(View(amax)), "float32 [1]");
  auto args = sized<tea_fp8_cast>();
  args.input_dtype = TEA_FP32;
  args.output_dtype = frontend::dtype_named("dtype", options.dtype);
  args.amax_given = 1;
  options.give_to(args);
  args.amax = place.fp32("amax", amax);
  args.scale = static_cast<float*>(scale.data_ptr());
  args.scale_inv = static_cast<float*>(scale_inv.data_ptr());
  require(tea_fp8_quantize_current(&args, place.where.device, place.where.stream));
  stack.give(scale, scale_inv);
}

void fp8_update_scales(Stack& stack) {
  const Tensor history = stack.tensor(), scale = stack.tensor();
  const std::optional<Tensor> amax = stack.maybe_tensor();
  const std::string algorithm = stack.text(), dtype = stack.text();
  const double margin = stack.number();
  const Place place("amax_history", history);
  const View rows(history);
  auto args = sized<tea_fp8_scales>();
  if (rows.rank != 2) refuse("amax_history", "of shape " + shape_text(rows), "[length, scales]");
  args.length = rows.size[0], args.count = rows.size[1];
  if (algorithm != "max" && algorithm != "most_recent")
    refuse("algorithm", "\"" + algorithm + "\"", "max or most_recent");
  args.algorithm = algorithm == "max" ? TEA_AMAX_MAX : TEA_AMAX_MOST_RECENT;
  args.dtype = frontend::dtype_named("dtype", dtype);
  args.margin = static_cast<float>(margin);
  args.amax_history = place.fp32("amax_history", history);
  args.scale = place.fp32("scale", scale);
  if (amax) args.amax = place.fp32("amax", *amax);
  const std::string needed = std::to_string(args.count) + " elements as amax_history";
  if (scale.numel() != args.count) refuse("scale", "of shape " + shape_text(View(scale)), needed);
  if (amax && amax->numel() != args.count)
    refuse("amax", "of shape " + shape_text(View(*amax)), needed);
  require(tea_fp8_update_scales(&args, place.where.device, place.where.stream));
}

void fp8_dequantize(Stack& stack) {
  const Tensor input = stack.tensor();
  const std::optional<Tensor> scale_inv = stack.maybe_tensor();
  Cast cast(input, stack.text());
  if (scale_inv) cast.args.scale_inv = cast.place.fp32("scale_inv", *scale_inv);
  cast.run(tea_fp8_dequantize);
  stack.give(cast.output);
}

void amax(Stack& stack) {
  const Tensor input = stack.tensor(), result = stack.tensor();
  const Place place("input", input);
  require(tea_amax(place.dense_memory("input", input), dtype_of(input), input.numel(),
                   place.fp32("amax", result), place.where.device, place.where.stream));
}

void fill(Stack& stack) {
  const Tensor tensor = stack.tensor();
  const double value = stack.number();
  const Place place("tensor", tensor);
  require(tea_fill(place.memory("tensor", tensor), dtype_of(tensor), tensor.numel(), value,
                   place.where.device, place.where.stream));
}

void fill_bytes(Stack& stack) {
  const Tensor tensor = stack.tensor();
  const auto value = static_cast<int>(stack.integer());
  const Place place("tensor", tensor);
  require(tea_fill_bytes(place.memory("tensor", tensor), value,
                         static_cast<uint64_t>(tensor.numel()) * tensor.element_size(),
                         place.where.device, place.where.stream));
}

}  // namespace tea::torch_ops
