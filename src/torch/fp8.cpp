// Casts to and from FP8 with one scale per tensor, the largest magnitude, and fills.
#include "torch/ops.h"
#include "torch/tensor.h"

namespace tea::torch_ops {
namespace {

struct Cast {
  Place place;
  Tensor output;
  tea_fp8_cast args{};

  Cast(const Tensor& input, const std::string& dtype) : place("input", input), output(input) {
    const View view(input);
    args.struct_size = sizeof args;
    args.input_dtype = dtype_of(input);
    args.output_dtype = frontend::dtype_named("dtype", dtype);
    output = empty(input, torch_dtype(args.output_dtype), view.rank, view.size);
    args.input = place.memory("input", input);
    args.output = output.data_ptr();
    args.count = view.elements();
  }
  Tensor scalar() const { return empty(output, torch_dtype(TEA_FP32), {1}); }
  void run(tea_status (*verb)(const tea_fp8_cast*, int, void*)) const {
    require(verb(&args, place.where.device, place.where.stream));
  }
};

}  // namespace

void fp8_quantize(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor input = in.tensor();
  const std::optional<Tensor> scale = in.maybe_tensor(), amax = in.maybe_tensor();
  Cast cast(input, in.text());
  const Tensor scale_inv = cast.scalar();
  if (scale) cast.args.scale = cast.place.fp32("scale", *scale);
  if (amax) cast.args.amax = cast.place.fp32("amax", *amax);
  cast.args.scale_inv = static_cast<float*>(scale_inv.data_ptr());
  cast.run(tea_fp8_quantize);
  give(stack, cast.output, scale_inv);
}

void fp8_quantize_current(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor input = in.tensor();
  const std::string dtype = in.text();
  const bool power_of_two = in.flag();
  const double amax_floor = in.number();
  Cast cast(input, dtype);
  const Tensor scale = cast.scalar(), scale_inv = cast.scalar(), amax = cast.scalar();
  cast.args.power_of_two = power_of_two;
  cast.args.amax_floor = static_cast<float>(amax_floor);
  cast.args.scale = static_cast<float*>(scale.data_ptr());
  cast.args.scale_inv = static_cast<float*>(scale_inv.data_ptr());
  cast.args.amax = static_cast<float*>(amax.data_ptr());
  cast.run(tea_fp8_quantize_current);
  give(stack, cast.output, scale, scale_inv, amax);
}

void fp8_dequantize(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor input = in.tensor();
  const std::optional<Tensor> scale_inv = in.maybe_tensor();
  Cast cast(input, in.text());
  if (scale_inv) cast.args.scale_inv = cast.place.fp32("scale_inv", *scale_inv);
  cast.run(tea_fp8_dequantize);
  give(stack, cast.output);
}

void amax(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor input = in.tensor(), result = in.tensor();
  const Place place("input", input);
  require(tea_amax(place.memory("input", input), dtype_of(input), input.numel(),
                   place.fp32("amax", result), place.where.device, place.where.stream));
}

void fill(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor tensor = in.tensor();
  const double value = in.number();
  const Place place("tensor", tensor);
  require(tea_fill(place.memory("tensor", tensor), dtype_of(tensor), tensor.numel(), value,
                   place.where.device, place.where.stream));
}

void fill_bytes(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor tensor = in.tensor();
  const auto value = static_cast<int>(in.integer());
  const Place place("tensor", tensor);
  require(tea_fill_bytes(place.memory("tensor", tensor), value,
                         static_cast<uint64_t>(tensor.numel()) * tensor.element_size(),
                         place.where.device, place.where.stream));
}

}  // namespace tea::torch_ops
