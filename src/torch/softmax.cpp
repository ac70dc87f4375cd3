// Softmax over scores in memory, and interleaved QKV.
#include "torch/ops.h"
#include "torch/tensor.h"

namespace tea::torch_ops {
namespace {

struct Kind {
  const char* name;
  int32_t value;
};
constexpr Kind kKinds[] = {{"none", TEA_SCORE_MASK_NONE},
                           {"given", TEA_SCORE_MASK_GIVEN},
                           {"causal", TEA_SCORE_MASK_CAUSAL},
                           {"causal_bottom_right", TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT}};

// The fields that both directions share, from a tensor [..., rows, cols] of at least two
// dimensions.
tea_scaled_softmax describe(const Tensor& scores, double scale, const std::string& kind) {
  auto args = sized<tea_scaled_softmax>();
  args.dtype = dtype_of(scores);
  args.kind = -1;
  for (const Kind& row : kKinds)
    if (kind == row.name) args.kind = row.value;
  if (args.kind < 0)
    refuse("kind", "\"" + kind + "\"", "none, given, causal or causal_bottom_right");
  args.scale = static_cast<float>(scale);
  const View view(scores);
  if (view.rank != 3 && view.rank != 4)
    refuse("input", "of shape " + shape_text(view),
           "[batch, heads, rows, cols] or [batch, rows, cols]");
  args.batch = view.size[0], args.heads = view.rank == 4 ? view.size[1] : 1;
  args.rows = view.size[view.rank - 2], args.cols = view.size[view.rank - 1];
  return args;
}

}  // namespace

void scaled_softmax_forward(Stack& stack) {
  const Tensor input = stack.tensor();
  const std::optional<Tensor> mask = stack.maybe_tensor();
  const double scale = stack.number();
  const std::string kind = stack.text();
  const Place place("input", input);
  tea_scaled_softmax args = describe(input, scale, kind);
  const Tensor output = empty_contiguous_like(input);
  args.input = place.memory("input", input);
  args.output = output.data_ptr();
  if (mask) {
    const View view(*mask);
    if (view.rank != 4 || view.size[1] != 1 || view.size[2] != args.rows ||
        view.size[3] != args.cols)
      refuse("mask", "of shape " + shape_text(view), "[1 or batch, 1, rows, cols]");
    args.mask = place.as<const uint8_t>("mask", *mask, torch_bool());
    args.mask_batch = view.size[0];
  }
  require(tea_scaled_softmax_forward(&args, place.where.device, place.where.stream));
  stack.give(output);
}

void scaled_softmax_backward(Stack& stack) {
  const Tensor dout = stack.tensor(), output = stack.tensor();
  const double scale = stack.number();
  const std::string kind = stack.text();
  const Place place("dout", dout);
  tea_scaled_softmax args = describe(output, scale, kind);
  if (dout.numel() != output.numel() || dtype_of(dout) != args.dtype)
    refuse("dout", "of shape " + shape_text(View(dout)), "the shape and dtype of output");
  const Tensor dinput = empty_contiguous_like(output);
  args.input = place.memory("output", output);
  args.dout = place.memory("dout", dout);
  args.output = dinput.data_ptr();
  require(tea_scaled_softmax_backward(&args, place.where.device, place.where.stream));
  stack.give(dinput);
}

void flash_prepare_forward(Stack& stack) {
  const Tensor qkv = stack.tensor();
  const Place place("qkv", qkv);
  const View view(qkv);
  if (view.rank != 4 || view.size[3] % 3)
    refuse("qkv", "of shape " + shape_text(view), "[seqlen, batch, heads, 3 * dim]");
  auto args = sized<tea_flash_prepare>();
  args.dtype = dtype_of(qkv);
  args.seqlen = view.size[0], args.batch = view.size[1], args.heads = view.size[2];
  args.dim = view.size[3] / 3;
  const Tensor out =
      empty(qkv, torch_dtype(args.dtype), {3, args.batch, args.seqlen, args.heads, args.dim});
  args.input[0] = place.memory("qkv", qkv);
  args.output = out.data_ptr();
  require(tea_flash_prepare_forward(&args, place.where.device, place.where.stream));
  stack.give(out);
}

void flash_prepare_backward(Stack& stack) {
  const Tensor parts[3] = {stack.tensor(), stack.tensor(), stack.tensor()};
  const Place place("dq", parts[0]);
  constexpr const char* kNames[] = {"dq", "dk", "dv"};
  const View view(parts[0]);
  if (view.rank != 4) refuse("dq", "of shape " + shape_text(view), "[batch, seqlen, heads, dim]");
  auto args = sized<tea_flash_prepare>();
  args.dtype = dtype_of(parts[0]);
  args.batch = view.size[0], args.seqlen = view.size[1];
  args.heads = view.size[2], args.dim = view.size[3];
  for (int i = 0; i < 3; ++i) {
    if (shape_text(View(parts[i])) != shape_text(view))
      refuse(kNames[i], "of shape " + shape_text(View(parts[i])), shape_text(view) + " as dq");
    args.input[i] = place.memory(kNames[i], parts[i], torch_dtype(args.dtype));
  }
  const Tensor out =
      empty(parts[0], torch_dtype(args.dtype), {args.seqlen, args.batch, args.heads, 3 * args.dim});
  args.output = out.data_ptr();
  require(tea_flash_prepare_backward(&args, place.where.device, place.where.stream));
  stack.give(out);
}

}  // namespace tea::torch_ops
