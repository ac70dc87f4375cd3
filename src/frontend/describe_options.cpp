// The options beyond q, k, v and their lengths: masks, bias, softmax, ALiBi, dropout, origin.
#include <string>

#include "frontend/describe.h"

namespace tea::frontend {
namespace {

constexpr int64_t kMaxWindow = int64_t{1} << 62;  // the problem stores one more

struct Mask {
  const char* name;
  int32_t causal, bottom_right;
};
constexpr Mask kMasks[] = {
    {"none", 0, 0}, {"causal", 1, 0}, {"bottom_right", 0, 1}, {"causal_bottom_right", 1, 1}};

}  // namespace

void Description::describe_mask() {
  const Mask* found = nullptr;
  for (const Mask& row : kMasks)
    if (in_.mask == row.name) found = &row;
  if (!found)
    refuse("mask", "\"" + in_.mask + "\"", "none, causal, bottom_right or causal_bottom_right");
  problem.causal = found->causal;
  problem.bottom_right = found->bottom_right;
  for (const int64_t bound : {in_.window_left, in_.window_right})
    if (bound < -1 || bound > kMaxWindow)
      refuse("window", std::to_string(bound), "from 0 to 2^62, or -1 for no bound");
  problem.window_left = in_.window_left + 1;
  problem.window_right = in_.window_right + 1;
}

void Description::describe_bias() {
  if (!in_.bias) {
    if (in_.pre_scale_bias) refuse("bias_type", "\"pre_scale\"", "a bias");
    return;
  }
  const Tensor& bias = *in_.bias;
  const int64_t full[4] = {batch_, problem.heads_q, rows_q_, rows_kv_};
  bool fits = bias.rank == 4;
  for (int i = 0; fits && i < 4; ++i) fits = bias.size[i] == full[i] || bias.size[i] == 1;
  if (!fits)
    refuse("bias", "of shape " + shape_text(bias),
           "[" + std::to_string(full[0]) + ", " + std::to_string(full[1]) + ", " +
               std::to_string(full[2]) + ", " + std::to_string(full[3]) + "], each of them or 1");
  int64_t stride[4], usual = 1;
  for (int i = 3; i >= 0; --i) {
    if (bias.size[i] != full[i]) problem.bias_broadcast |= 1 << i;
    stride[i] = bias.size[i] > 1 ? bias.stride[i] : usual;
    usual *= bias.size[i];
  }
  if (bias.elements() && !stride[0] && !stride[1] && !stride[2] && !stride[3])
    refuse_expanded("bias");
  problem.bias = in_.pre_scale_bias ? TEA_BIAS_PRE_SCALE : TEA_BIAS_POST_SCALE;
  problem.bias_dtype = bias.type < kInt32 ? bias.type : TEA_DTYPE_DEFAULT;
  const bool is_fp8_problem = is_fp8(problem.dtype);
  if (!problem.bias_dtype ||
      (!is_fp8_problem && problem.bias_dtype != problem.dtype && problem.bias_dtype != TEA_FP32))
    refuse("bias.dtype", type_text(bias.type),
           "that of q, or float32 (a boolean mask becomes 0 where it is true, -inf elsewhere)");
  problem.bias_stride = {stride[0], stride[1], stride[2], stride[3]};
  add(TEA_BIAS, "bias", bias);
}

void Description::describe_softmax() {
  if (in_.sink) {
    if (in_.off_by_one) refuse("sink", "a tensor and off_by_one", "one of the two");
    require_shape("sink", *in_.sink, {1, {problem.heads_q}}, statistic_text().c_str());
    pointers_[TEA_SINK] = memory("sink", *in_.sink, statistic_type());
  }
  problem.softmax = in_.sink         ? TEA_SOFTMAX_LEARNABLE
                    : in_.off_by_one ? TEA_SOFTMAX_OFF_BY_ONE
                                     : TEA_SOFTMAX_VANILLA;
}

void Description::describe_alibi() {
  problem.alibi = in_.slopes ? TEA_ALIBI_SLOPES : in_.alibi ? TEA_ALIBI_STANDARD : TEA_ALIBI_NONE;
  if (!in_.slopes) return;
  const Tensor& slopes = *in_.slopes;
  const bool per_batch = slopes.rank == 2 && slopes.size[0] == batch_;
  if ((slopes.rank != 1 && !per_batch) || slopes.size[slopes.rank - 1] != problem.heads_q)
    refuse("alibi", "of shape " + shape_text(slopes),
           statistic_text() + "[heads] or [batch, heads], here [" +
               std::to_string(problem.heads_q) + "] or [" + std::to_string(batch_) + ", " +
               std::to_string(problem.heads_q) + "]");
  pointers_[TEA_SLOPES] = memory("alibi", slopes, statistic_type());
  // Without a batch there is no memory for per-batch slopes either.
  problem.slopes_stride = per_batch && batch_ != 1 ? problem.heads_q : 0;
}

void Description::describe_origin() {
  if (!in_.origin) return;
  constexpr int64_t kNumbers = 5;  // of a sequence
  if (in_.origin->rank == 2) {
    require_shape("origin", *in_.origin, {2, {batch_, kNumbers}},
                  "batch, head, row, column, shift of each sequence: int64 ");
    if (in_.origin->elements() == 0) return;  // no sequence, and no memory
    run.origin_stride = kNumbers;
  } else {
    require_shape("origin", *in_.origin, {1, {4}}, "batch, head, row, column: int64 ");
  }
  run.origin_device = static_cast<const int64_t*>(memory("origin", *in_.origin, kInt64));
}

// The options that options.def translates by itself.
void Description::describe_plain() {
  const auto add_input = [&](const char* name, const std::optional<Tensor>& tensor,
                             tea_tensor index, int32_t type, int64_t size, const char* meaning) {
    if (!tensor) return;
    require_shape(name, *tensor, {1, {size}}, meaning);
    pointers_[index] = memory(name, *tensor, type);
  };
#define TEA_OPTION(kind, name, default_text)
#define TEA_FIELD(kind, name, default_text) problem.name = in_.name;
#define TEA_INPUT(name, index, type, size, meaning)                    \
  add_input(#name, in_.name, index, type, size, meaning);              \
  [&](auto& p) {                                                       \
    if constexpr (requires { p.name; }) p.name = in_.name.has_value(); \
  }(problem);
#include "frontend/options.def"
}

}  // namespace tea::frontend
