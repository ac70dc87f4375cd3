// How the operators of attention with casts cast their inputs, and the scales: arguments in the
// order of the schemas.
#pragma once
#include <optional>
#include <string>

#include "torch/stack.h"
#include "torch/tensor.h"

namespace tea::torch_ops {

// How inputs are cast.
struct Recipe {
  std::string name;
  bool power_of_two;
  float amax_floor;
  int32_t dtype;

  explicit Recipe(Stack& in)
      : name(in.text()),
        power_of_two(in.flag()),
        amax_floor(static_cast<float>(in.number())),
        dtype(frontend::dtype_named("dtype", name)) {}
};

// A scale, and the largest magnitude of what it scales; NULL: nothing is cast to FP8 with them.
struct Scaling {
  float *scale = nullptr, *amax = nullptr;
};

// The scales of a direction: what current scaling finds of the inputs, and the scales and amaxes of
// delayed scaling, as two tensors, because each tensor takes time in PyTorch's dispatcher. Then the
// places there of the inputs, or -1, of a first tensor, and of a second one, or -1.
class Scales {
 public:
  explicit Scales(Stack& in)
      : input_scale_(in.maybe_tensor()),
        input_amax_(in.maybe_tensor()),
        scales_(in.tensor()),
        amaxes_(in.tensor()),
        inputs_(in.integer()),
        first_(in.integer()),
        second_(in.integer()) {}

  bool is_current() const { return inputs_ < 0; }
  bool has_second() const { return second_ >= 0; }
  struct Found {
    Scaling inputs, first, second;
  };
  // Memory. The names are those of the schema's first and second tensor.
  Found at(const Place& place, const char* first, const char* second) const {
    float* const scales = place.fp32("scales", scales_);
    float* const amaxes = place.fp32("amaxes", amaxes_);
    const int64_t count = scales_.numel();
    if (amaxes_.numel() != count)
      refuse("amaxes", "of shape " + shape_text(View(amaxes_)),
             "that of scales, " + shape_text(View(scales_)));
    const auto found = [&](const char* name, int64_t i, int64_t least) -> Scaling {
      if (i < least || i >= count)
        refuse(name, std::to_string(i),
               std::to_string(least) + " to " + std::to_string(count - 1) + ": a place in scales");
      return i < 0 ? Scaling{} : Scaling{scales + i, amaxes + i};
    };
    const Scaling current = {single(place, "input_scale", input_scale_),
                             single(place, "input_amax", input_amax_)};
    return {is_current() ? current : found("input", inputs_, -1), found(first, first_, 0),
            found(second, second_, -1)};
  }

 private:
  static float* single(const Place& place, const char* name, const std::optional<Tensor>& tensor) {
    if (!tensor) return nullptr;
    if (tensor->numel() != 1) refuse(name, "of shape " + shape_text(View(*tensor)), "float32 [1]");
    return place.fp32(name, *tensor);
  }

  const std::optional<Tensor> input_scale_, input_amax_;
  const Tensor scales_, amaxes_;
  const int64_t inputs_, first_, second_;
};

}  // namespace tea::torch_ops
