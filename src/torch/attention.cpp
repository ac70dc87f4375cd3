// The operators forward and backward, those with the minimal signature, and explain.
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>

#include "torch/call.h"
#include "torch/ops.h"

namespace tea::torch_ops {
namespace {

Tensor empty_tensor(const Tensor& like) { return empty(like, torch_dtype(TEA_FP32), {0}); }

// A gradient may be expanded, as that of sum() is. This is the only tensor that is copied.
Tensor readable(const Tensor& dout) {
  const View view(dout);
  bool expanded = false;
  for (int i = 0; i < view.rank; ++i) expanded |= view.size[i] > 1 && view.stride[i] == 0;
  const int last = view.rank - 1;
  const bool rows = last < 0 || view.size[last] <= 1 || view.stride[last] == 1;
  return rows && !expanded ? dout : torch::stable::contiguous(dout);
}

// The arguments of backward before those of forward.
struct Incoming {
  Tensor dout;
  std::optional<Tensor> dlse;
  Tensor o, lse;
  bool wants_dbias, wants_dsink;

  static Incoming all(Stack& in) {  // initialisers in braces are evaluated in order
    return {in.tensor(), in.maybe_tensor(), in.tensor(), in.tensor(), in.flag(), in.flag()};
  }
  static Incoming minimal(Stack& in) {
    return {in.tensor(), std::nullopt, in.tensor(), in.tensor(), false, false};
  }
};

struct Gradients {
  Tensor dq, dk, dv;

  static Gradients like(const Arguments& a) {
    return {new_like(a.q), new_like(a.k), new_like(a.v)};
  }
  static Gradients given(Stack& in) { return {in.tensor(), in.tensor(), in.tensor()}; }
};

// The requested gradients of bias and sink.
struct SmallGradients {
  std::optional<Tensor> dbias, dsink;
  bool ran = false;
};

Tensor or_empty(const std::optional<Tensor>& tensor, const Tensor& like) {
  return tensor ? *tensor : empty_tensor(like);
}

// Memory that a call of backward needs besides its arguments.
struct BackwardMemory {
  Tensor dout;
  std::optional<Tensor> dlse;
  SmallGradients small;
};

// Describes a call that fills `out`.
BackwardMemory describe_backward(const Incoming& in, const Arguments& arguments, Call& call,
                                 const Gradients& out) {
  BackwardMemory memory{readable(in.dout), {}, {}};
  tea_problem& p = call.problem();
  p.training = 1;
  p.outputs = TEA_OUTPUT_LSE;
  p.o = call.add_rows(TEA_O, "o", in.o);
  p.dout = call.add_rows(TEA_DOUT, "dout", memory.dout);
  p.dq = call.add_rows(TEA_DQ, "dq", out.dq);
  p.dk = call.add_rows(TEA_DK, "dk", out.dk);
  p.dv = call.add_rows(TEA_DV, "dv", out.dv);
  call.add_row_statistic(TEA_LSE, "lse", in.lse);
  if (in.dlse) {
    p.lse_gradient = 1;
    memory.dlse = torch::stable::contiguous(*in.dlse);
    call.add_row_statistic(TEA_DLSE, "dlse", *memory.dlse);
  }
  SmallGradients& small = memory.small;
  if (in.wants_dbias && arguments.bias) {
    small.dbias = empty_contiguous_like(*arguments.bias);
    call.add(TEA_DBIAS, "dbias", *small.dbias);
  }
  if (in.wants_dsink && arguments.sink) {
    small.dsink = empty_contiguous_like(*arguments.sink);
    call.add_memory(TEA_DSINK, small.dsink->data_ptr());
  }
  return memory;
}

// Fills `out`; returns the gradients of bias and sink. accumulate: see Call::backward().
SmallGradients differentiate(const Incoming& in, const Arguments& arguments, Call& call,
                             const Gradients& out, int accumulate = 0) {
  BackwardMemory memory = describe_backward(in, arguments, call, out);
  memory.small.ran = call.backward(accumulate);
  return memory.small;
}

struct Scale {
  tea_tensor index;
  const char* name;
};
// In the order of the schemas.
constexpr Scale kForward[] = {{TEA_Q_SCALE_INV, "q_scale_inv"}, {TEA_K_SCALE_INV, "k_scale_inv"},
                              {TEA_V_SCALE_INV, "v_scale_inv"}, {TEA_S_SCALE, "s_scale"},
                              {TEA_S_SCALE_INV, "s_scale_inv"}, {TEA_O_SCALE, "o_scale"}};
constexpr Scale kBackward[] = {{TEA_Q_SCALE_INV, "q_scale_inv"},
                               {TEA_K_SCALE_INV, "k_scale_inv"},
                               {TEA_V_SCALE_INV, "v_scale_inv"},
                               {TEA_S_SCALE, "s_scale"},
                               {TEA_S_SCALE_INV, "s_scale_inv"},
                               {TEA_O_SCALE_INV, "o_scale_inv"},
                               {TEA_DOUT_SCALE_INV, "dout_scale_inv"},
                               {TEA_DP_SCALE, "dp_scale"},
                               {TEA_DP_SCALE_INV, "dp_scale_inv"},
                               {TEA_DQ_SCALE, "dq_scale"},
                               {TEA_DK_SCALE, "dk_scale"},
                               {TEA_DV_SCALE, "dv_scale"}};

// The arguments of the FP8 operators before the options: scales, then the type of the outputs.
template <size_t N>
struct Fp8 {
  const Scale (&table)[N];
  std::optional<Tensor> scales[N];
  std::string dtype;

  // Gradients that are given say their type themselves.
  Fp8(const Scale (&t)[N], Stack& in, bool has_dtype = true) : table(t) {
    for (auto& scale : scales) scale = in.maybe_tensor();
    if (has_dtype) dtype = in.text();
  }
  void add_to(Call& call) const {
    for (size_t i = 0; i < N; ++i) call.add_scale(table[i].index, table[i].name, scales[i]);
  }
};

// A zero-initialised amax for each index.
Tensor add_amax(Call& call, const Tensor& like, std::initializer_list<tea_tensor> indices) {
  const auto n = static_cast<int64_t>(indices.size());
  const Tensor amax = empty(like, torch_dtype(TEA_FP32), {n});
  const Place place("q", like);
  auto* memory = static_cast<float*>(amax.data_ptr());
  require(tea_fill_bytes(memory, 0, sizeof(float) * n, place.where.device, place.where.stream));
  for (const tea_tensor index : indices) call.add_memory(index, memory++);
  return amax;
}

// Allocates O and LSE, and runs.
struct Results {
  Tensor o, lse;

  explicit Results(Call& call) : o(call.new_o()), lse(call.new_row_statistic()) {
    call.add_memory(TEA_LSE, lse.data_ptr());
    call.forward();
  }
};

// MAX, or an empty tensor if it is not wanted.
Tensor add_max(Call& call, const Arguments& arguments) {
  if (!arguments.max_logit) return empty_tensor(arguments.q);
  const Tensor max = call.new_row_statistic();
  call.add_memory(TEA_MAX, max.data_ptr());
  return max;
}

void add_fp8(Call& call, const Fp8<std::size(kForward)>& fp8) {
  call.problem().o_dtype = frontend::dtype_named("o_dtype", fp8.dtype);
  fp8.add_to(call);
}

SmallGradients run_fp8_backward(Call& call, const Incoming& incoming,
                                const Fp8<std::size(kBackward)>& fp8, const Arguments& arguments,
                                const Gradients& out) {
  call.problem().o_dtype = dtype_of(incoming.o);
  call.problem().dout_dtype = dtype_of(incoming.dout);
  fp8.add_to(call);
  return differentiate(incoming, arguments, call, out);
}

}  // namespace

void fp8_forward(Stack& stack) {
  const Fp8 fp8(kForward, stack);
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  add_fp8(call, fp8);
  const Tensor amax = add_amax(call, arguments.q, {TEA_S_AMAX, TEA_O_AMAX});
  const Tensor max = add_max(call, arguments);
  const auto [o, lse] = Results(call);
  stack.give(o, lse, max, amax);
}

void fp8_forward_amax(Stack& stack) {
  const std::optional<Tensor> s_amax = stack.maybe_tensor(), o_amax = stack.maybe_tensor();
  const Fp8 fp8(kForward, stack);
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  add_fp8(call, fp8);
  call.add_scale(TEA_S_AMAX, "s_amax", s_amax);
  call.add_scale(TEA_O_AMAX, "o_amax", o_amax);
  const Tensor max = add_max(call, arguments);
  const auto [o, lse] = Results(call);
  stack.give(o, lse, max);
}

void fp8_backward(Stack& stack) {
  const Incoming incoming = Incoming::all(stack);
  const Fp8 fp8(kBackward, stack);
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  call.problem().dqkv_dtype = frontend::dtype_named("dqkv_dtype", fp8.dtype);
  const Tensor amax =
      add_amax(call, arguments.q, {TEA_DP_AMAX, TEA_DQ_AMAX, TEA_DK_AMAX, TEA_DV_AMAX});
  const auto gradient = [&](const Tensor& of) {
    const View view(of);
    return empty(of, torch_dtype(call.problem().dqkv_dtype), view.rank, view.size);
  };
  const Gradients out{gradient(arguments.q), gradient(arguments.k), gradient(arguments.v)};
  const auto [dbias, dsink, _] = run_fp8_backward(call, incoming, fp8, arguments, out);
  stack.give(out.dq, out.dk, out.dv, or_empty(dbias, out.dq), or_empty(dsink, out.dq), amax);
}

void fp8_backward_out(Stack& stack) {
  const Gradients out = Gradients::given(stack);
  const std::optional<Tensor> dp_amax = stack.maybe_tensor(), dqkv_amax = stack.maybe_tensor();
  const Incoming incoming = Incoming::all(stack);
  const Fp8 fp8(kBackward, stack, false);
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  call.problem().dqkv_dtype = dtype_of(out.dq);
  call.add_scale(TEA_DP_AMAX, "dp_amax", dp_amax);
  call.add_scale(TEA_DQ_AMAX, "dqkv_amax", dqkv_amax);
  const auto [dbias, dsink, _] = run_fp8_backward(call, incoming, fp8, arguments, out);
  stack.give(or_empty(dbias, out.dq), or_empty(dsink, out.dq));
}

void forward(Stack& stack) {
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  const Tensor max = add_max(call, arguments);
  const auto [o, lse] = Results(call);
  stack.give(o, lse, max);
}

void forward_minimal(Stack& stack) {
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  const auto [o, lse] = Results(call);
  stack.give(o, lse);
}

namespace {

Tensor infer(const Arguments& arguments) {
  Call call(arguments);
  call.problem().outputs = 0;
  const Tensor o = call.new_o();
  call.forward();
  return o;
}

}  // namespace

void inference(Stack& stack) { stack.give(infer(read_arguments(stack))); }

void inference_plain(Stack& stack) {
  const Tensor q = stack.tensor(), k = stack.tensor(), v = stack.tensor();
  Arguments arguments = default_arguments(q, k, v);
  arguments.format = "bhsd", arguments.mask = stack.flag() ? "causal" : "none";
  stack.give(infer(arguments));
}

void backward(Stack& stack) {
  const Incoming incoming = Incoming::all(stack);
  const Arguments arguments = read_arguments(stack);
  const Gradients out = Gradients::like(arguments);
  Call call(arguments);
  const auto [dbias, dsink, _] = differentiate(incoming, arguments, call, out);
  stack.give(out.dq, out.dk, out.dv, or_empty(dbias, out.dq), or_empty(dsink, out.dq));
}

void backward_minimal(Stack& stack) {
  const Incoming incoming = Incoming::minimal(stack);
  const Arguments arguments = read_arguments(stack);
  const Gradients out = Gradients::like(arguments);
  Call call(arguments);
  differentiate(incoming, arguments, call, out);
  stack.give(out.dq, out.dk, out.dv);
}

void backward_out(Stack& stack) {
  const Gradients out = Gradients::given(stack);
  const Incoming incoming = Incoming::all(stack);
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  const auto [dbias, dsink, _] = differentiate(incoming, arguments, call, out);
  stack.give(or_empty(dbias, out.dq), or_empty(dsink, out.dq));
}

void backward_minimal_out(Stack& stack) {
  const Gradients out = Gradients::given(stack);
  const Incoming incoming = Incoming::minimal(stack);
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  differentiate(incoming, arguments, call, out);
}

namespace {

// The results of a part, in given memory.
struct PartOutputs {
  Tensor o, lse;
  std::optional<Tensor> max;

  static PartOutputs of(Stack& in) { return {in.tensor(), in.tensor(), in.maybe_tensor()}; }
  void add_to(Call& call) const {
    call.problem().o_dtype = dtype_of(o);
    call.problem().o = call.add_rows(TEA_O, "o", o);
    call.add_row_statistic_slice(TEA_LSE, "lse", lse);
    if (max) call.add_row_statistic_slice(TEA_MAX, "max_logit", *max);
  }
};

// The arguments of part_forward and record_part_forward.
struct PartForward {
  const PartOutputs out;
  const int accumulate;  // see Call::forward()
  const Arguments arguments;
  Call call;

  explicit PartForward(Stack& stack)
      : out(PartOutputs::of(stack)),
        accumulate(stack.flag() ? TEA_ACCUMULATE_ROWS : 0),
        arguments(read_arguments(stack)),
        call(arguments) {
    if (arguments.training) call.problem().dout_dtype = call.problem().dtype;
    out.add_to(call);
  }
};

}  // namespace

void part_forward(Stack& stack) {
  PartForward part(stack);
  stack.give(part.call.forward(part.accumulate));
}

namespace {

void give_recorded(Stack& stack, Call& call, int accumulate, bool is_forward) {
  const Tensor memory = empty_on_host(torch_int64(), TEA_TENSOR_COUNT);
  const Tensor launch = empty_on_host(torch_byte(), sizeof(Launch));
  using Memory = int64_t[TEA_TENSOR_COUNT];
  *static_cast<Launch*>(launch.data_ptr()) =
      call.recorded(accumulate, is_forward, *static_cast<Memory*>(memory.data_ptr()));
  stack.give(launch, memory);
}

}  // namespace

void record_part_forward(Stack& stack) {
  PartForward part(stack);
  give_recorded(stack, part.call, part.accumulate, true);
}

void fp8_part_forward(Stack& stack) {
  const PartOutputs out = PartOutputs::of(stack);
  const Fp8 fp8(kForward, stack, false);
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  fp8.add_to(call);
  out.add_to(call);
  call.forward();
}

void fp8_part_backward(Stack& stack) {
  const Gradients out = Gradients::given(stack);
  const Incoming incoming = Incoming::all(stack);
  const Fp8 fp8(kBackward, stack, false);
  const Arguments arguments = read_arguments(stack);
  Call call(arguments);
  call.problem().dqkv_dtype = dtype_of(out.dq);
  call.set_partial();
  const auto [dbias, dsink, _] = run_fp8_backward(call, incoming, fp8, arguments, out);
  stack.give(or_empty(dbias, out.dq), or_empty(dsink, out.dq));
}

namespace {

// The arguments of part_backward and record_part_backward.
struct PartBackward {
  const Gradients out;
  const Incoming incoming;
  const int accumulate;  // see Call::backward()
  const Arguments arguments;
  Call call;
  const BackwardMemory memory;

  explicit PartBackward(Stack& stack)
      : out(Gradients::given(stack)),
        incoming(Incoming::all(stack)),
        accumulate(static_cast<int>(stack.integer())),
        arguments(read_arguments(stack)),
        call(arguments),
        memory(described()) {}

 private:
  BackwardMemory described() {
    call.problem().o_dtype = dtype_of(incoming.o);
    call.problem().dout_dtype = dtype_of(incoming.dout);
    call.problem().dqkv_dtype = dtype_of(out.dq);
    call.set_partial();
    return describe_backward(incoming, arguments, call, out);
  }
};

}  // namespace

void part_backward(Stack& stack) {
  PartBackward part(stack);
  const bool ran = part.call.backward(part.accumulate);
  const SmallGradients& small = part.memory.small;
  const Tensor& dq = part.out.dq;
  stack.give(or_empty(small.dbias, dq), or_empty(small.dsink, dq), ran);
}

void record_part_backward(Stack& stack) {
  PartBackward part(stack);
  give_recorded(stack, part.call, part.accumulate, false);
}

// ---- aten::_scaled_dot_product_fused_attention_overrideable ------------------------------------
//
// PyTorch keeps this operator for the attention of other backends, and differentiates it in C++.
// Eager calls of the minimal signature go through it, because an autograd node in Python costs tens
// of microseconds. Its bias and dropout are left to attention().

namespace {

Arguments minimal_arguments(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                            std::optional<double> scale) {
  Arguments out = default_arguments(q, k, v);
  out.format = "bhsd", out.mask = causal ? "causal" : "none";
  out.training = true, out.scale = scale;
  return out;
}

}  // namespace

void fused_forward(Stack& stack) {
  const Tensor q = stack.tensor(), k = stack.tensor(), v = stack.tensor();
  const bool has_bias = stack.maybe_tensor().has_value();
  const double dropout = stack.number();
  const bool causal = stack.flag(), debug = stack.flag();
  const Arguments arguments = minimal_arguments(q, k, v, causal, stack.maybe_number());
  if (has_bias) refuse("attn_bias", "a tensor", "None (te_attention.torch.attention takes a bias)");
  if (dropout != 0)
    refuse("dropout_p", std::to_string(dropout), "0 (te_attention.torch.attention has dropout)");
  if (debug) refuse("return_debug_mask", "True", "False: no mask is stored");
  Call call(arguments);
  const auto [o, lse] = Results(call);
  // The results that this signature does not have, cumulative lengths, random state and a debug
  // mask, are LSE again: any tensor serves, and this one needs no allocation.
  const int64_t none = 0;
  stack.give(o, lse, lse, lse, none, none, lse, lse, lse);
}

void fused_backward(Stack& stack) {
  const Tensor dout = stack.tensor(), q = stack.tensor(), k = stack.tensor(), v = stack.tensor();
  const Tensor bias = stack.tensor();
  stack.drop_list();  // which gradients are wanted
  const Tensor o = stack.tensor(), lse = stack.tensor(), cum_q = stack.tensor(),
               cum_k = stack.tensor();
  stack.integer(), stack.integer(), stack.number();  // the bounds of the lengths, dropout
  const bool causal = stack.flag();
  const Tensor seed = stack.tensor(), offset = stack.tensor();
  const std::optional<double> scale = stack.maybe_number();
  if (!dout.defined()) {  // a later node of the graph had no gradient for O
    const Tensor none;
    stack.give(none, none, none, none);
    return;
  }
  const Arguments arguments = minimal_arguments(q, k, v, causal, scale);
  const Gradients out = Gradients::like(arguments);
  Call call(arguments);
  differentiate({dout, std::nullopt, o, lse, false, false}, arguments, call, out);
  stack.give(out.dq, out.dk, out.dv, out.dq);
}

void explain(Stack& stack) {
  const Arguments arguments = read_arguments(stack);
  stack.give(Call(arguments).explain());
}

}  // namespace tea::torch_ops
