// The operators forward and backward, those with fewer arguments, and explain.
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>

#include "torch/describe.h"
#include "torch/ops.h"

namespace tea::torch_ops {
namespace {

Tensor nothing(const Tensor& like) { return empty(like, torch_dtype(TEA_FP32), {0}); }

// The gradient that arrives may be expanded, as that of sum() is: the one copy that is made here.
Tensor readable(const Tensor& dout) {
  const View view(dout);
  bool expanded = false;
  for (int i = 0; i < view.rank; ++i) expanded |= view.size[i] > 1 && view.stride[i] == 0;
  const int last = view.rank - 1;
  const bool rows = last < 0 || view.size[last] <= 1 || view.stride[last] == 1;
  return rows && !expanded ? dout : torch::stable::contiguous(dout);
}

// What backward takes before the arguments of forward.
struct Incoming {
  Tensor dout;
  std::optional<Tensor> dlse;
  Tensor o, lse;
  bool wants_dbias, wants_dsink;

  static Incoming all(Stack& in) {  // a list in braces is read in its order
    return {in.tensor(), in.maybe_tensor(), in.tensor(), in.tensor(), in.flag(), in.flag()};
  }
  static Incoming few(Stack& in) {
    return {in.tensor(), std::nullopt, in.tensor(), in.tensor(), false, false};
  }
};

struct Gradients {
  Tensor dq, dk, dv;

  static Gradients like(const Arguments& a) {
    return {new_like(a.q), new_like(a.k), new_like(a.v)};
  }
};

// Those that are wanted.
struct SmallGradients {
  std::optional<Tensor> dbias, dsink;
};

Tensor or_nothing(const std::optional<Tensor>& tensor, const Tensor& like) {
  return tensor ? *tensor : nothing(like);
}

// Fills `out`; returns the others.
SmallGradients differentiate(const Incoming& in, const Arguments& arguments, Work& work,
                             const Gradients& out) {
  tea_problem& p = work.problem;
  p.training = 1;
  p.outputs = TEA_OUTPUT_LSE;
  const Tensor dout = readable(in.dout);
  p.o = work.add_rows(TEA_O, "o", in.o);
  p.dout = work.add_rows(TEA_DOUT, "dout", dout);
  p.dq = work.add_rows(TEA_DQ, "dq", out.dq);
  p.dk = work.add_rows(TEA_DK, "dk", out.dk);
  p.dv = work.add_rows(TEA_DV, "dv", out.dv);
  work.add_per_row(TEA_LSE, "lse", in.lse);
  std::optional<Tensor> dlse;
  if (in.dlse) {
    p.lse_gradient = 1;
    dlse = torch::stable::contiguous(*in.dlse);
    work.add_per_row(TEA_DLSE, "dlse", *dlse);
  }
  SmallGradients small;
  if (in.wants_dbias && arguments.bias) {
    small.dbias = empty_contiguous_like(*arguments.bias);
    work.add(TEA_DBIAS, "dbias", *small.dbias);
  }
  if (in.wants_dsink && arguments.sink) {
    small.dsink = empty_contiguous_like(*arguments.sink);
    work.add_small(TEA_DSINK, small.dsink->data_ptr());
  }
  work.backward();
  return small;
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

// What the operators of FP8 take before the others: scales, then the type of what they write.
template <size_t N>
struct Fp8 {
  const Scale (&table)[N];
  std::optional<Tensor> scales[N];
  std::string dtype;

  Fp8(const Scale (&t)[N], Stack& in) : table(t) {
    for (auto& scale : scales) scale = in.maybe_tensor();
    dtype = in.text();
  }
  void add_to(Work& work) const {
    for (size_t i = 0; i < N; ++i) work.add_scale(table[i].index, table[i].name, scales[i]);
  }
};

// A number for each index, from 0 on.
Tensor add_amax(Work& work, const Tensor& like, std::initializer_list<tea_tensor> indices) {
  const auto n = static_cast<int64_t>(indices.size());
  const Tensor amax = empty(like, torch_dtype(TEA_FP32), {n});
  const Place place("q", like);
  auto* memory = static_cast<float*>(amax.data_ptr());
  require(tea_fill_bytes(memory, 0, sizeof(float) * n, place.where.device, place.where.stream));
  for (const tea_tensor index : indices) work.add_small(index, memory++);
  return amax;
}

}  // namespace

void fp8_forward(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Fp8 fp8(kForward, in);
  const Arguments arguments(in);
  Work work(arguments);
  work.problem.o_dtype = dtype_named("o_dtype", fp8.dtype);
  fp8.add_to(work);
  const Tensor amax = add_amax(work, arguments.q, {TEA_S_AMAX, TEA_O_AMAX});
  const Tensor o = work.new_o(), lse = work.new_per_row();
  work.add_small(TEA_LSE, lse.data_ptr());
  const Tensor max = arguments.max_logit ? work.new_per_row() : nothing(arguments.q);
  if (arguments.max_logit) work.add_small(TEA_MAX, max.data_ptr());
  work.forward();
  give(stack, o, lse, max, amax);
}

void fp8_backward(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Incoming incoming = Incoming::all(in);
  const Fp8 fp8(kBackward, in);
  const Arguments arguments(in);
  Work work(arguments);
  work.problem.o_dtype = dtype_of(incoming.o);
  work.problem.dout_dtype = dtype_of(incoming.dout);
  work.problem.dqkv_dtype = dtype_named("dqkv_dtype", fp8.dtype);
  fp8.add_to(work);
  const Tensor amax =
      add_amax(work, arguments.q, {TEA_DP_AMAX, TEA_DQ_AMAX, TEA_DK_AMAX, TEA_DV_AMAX});
  const auto gradient = [&](const Tensor& of) {
    const View view(of);
    return empty(of, torch_dtype(work.problem.dqkv_dtype), view.rank, view.size);
  };
  const Gradients out{gradient(arguments.q), gradient(arguments.k), gradient(arguments.v)};
  const auto [dbias, dsink] = differentiate(incoming, arguments, work, out);
  give(stack, out.dq, out.dk, out.dv, or_nothing(dbias, out.dq), or_nothing(dsink, out.dq), amax);
}

void forward(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Arguments arguments(in);
  Work work(arguments);
  const Tensor o = work.new_o(), lse = work.new_per_row();
  work.add_small(TEA_LSE, lse.data_ptr());
  const Tensor max = arguments.max_logit ? work.new_per_row() : nothing(arguments.q);
  if (arguments.max_logit) work.add_small(TEA_MAX, max.data_ptr());
  work.forward();
  give(stack, o, lse, max);
}

void forward_few(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Arguments arguments(in);
  Work work(arguments);
  const Tensor o = work.new_o(), lse = work.new_per_row();
  work.add_small(TEA_LSE, lse.data_ptr());
  work.forward();
  give(stack, o, lse);
}

void inference(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Arguments arguments(in);
  Work work(arguments);
  work.problem.outputs = 0;
  const Tensor o = work.new_o();
  work.forward();
  give(stack, o);
}

void backward(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Incoming incoming = Incoming::all(in);
  const Arguments arguments(in);
  const Gradients out = Gradients::like(arguments);
  Work work(arguments);
  const auto [dbias, dsink] = differentiate(incoming, arguments, work, out);
  give(stack, out.dq, out.dk, out.dv, or_nothing(dbias, out.dq), or_nothing(dsink, out.dq));
}

void backward_few(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Incoming incoming = Incoming::few(in);
  const Arguments arguments(in);
  const Gradients out = Gradients::like(arguments);
  Work work(arguments);
  differentiate(incoming, arguments, work, out);
  give(stack, out.dq, out.dk, out.dv);
}

void backward_out(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor dq = in.tensor(), dk = in.tensor(), dv = in.tensor();
  const Incoming incoming = Incoming::all(in);
  const Arguments arguments(in);
  Work work(arguments);
  const auto [dbias, dsink] = differentiate(incoming, arguments, work, {dq, dk, dv});
  give(stack, or_nothing(dbias, dq), or_nothing(dsink, dq));
}

void backward_few_out(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Gradients out{in.tensor(), in.tensor(), in.tensor()};
  const Incoming incoming = Incoming::few(in);
  const Arguments arguments(in);
  Work work(arguments);
  differentiate(incoming, arguments, work, out);
}

void explain(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Arguments arguments(in);
  give(stack, Work(arguments).explain());
}

}  // namespace tea::torch_ops
