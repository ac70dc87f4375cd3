// The operators forward, backward and explain.
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>

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
  explicit Incoming(Stack& in)
      : dout(in.tensor()),
        dlse(in.maybe_tensor()),
        o(in.tensor()),
        lse(in.tensor()),
        wants_dbias(in.flag()),
        wants_dsink(in.flag()) {}
};

struct Gradients {
  Tensor dq, dk, dv;
};

// Fills `out`; returns dbias and dsink, empty where they are not wanted.
std::tuple<Tensor, Tensor> differentiate(const Incoming& in, const Arguments& arguments,
                                         const Gradients& out) {
  Work work(arguments);
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
  Tensor dbias = nothing(arguments.q), dsink = nothing(arguments.q);
  if (in.wants_dbias && arguments.bias) {
    dbias = empty_contiguous_like(*arguments.bias);
    work.add(TEA_DBIAS, "dbias", dbias);
  }
  if (in.wants_dsink && arguments.sink) {
    dsink = empty_contiguous_like(*arguments.sink);
    work.add_small(TEA_DSINK, dsink.data_ptr());
  }
  work.backward();
  return {dbias, dsink};
}

}  // namespace

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const Arguments arguments(in);
  Work work(arguments);
  const Tensor o = work.new_o(), lse = work.new_per_row();
  work.add_small(TEA_LSE, lse.data_ptr());
  const Tensor max = arguments.max_logit ? work.new_per_row() : nothing(arguments.q);
  if (arguments.max_logit) work.add_small(TEA_MAX, max.data_ptr());
  work.forward();
  give(stack, o, lse, max);
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const Incoming incoming(in);
  const Arguments arguments(in);
  const Gradients out{torch::stable::empty_like(arguments.q),
                      torch::stable::empty_like(arguments.k),
                      torch::stable::empty_like(arguments.v)};
  const auto [dbias, dsink] = differentiate(incoming, arguments, out);
  give(stack, out.dq, out.dk, out.dv, dbias, dsink);
}

void backward_out(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const Tensor dq = in.tensor(), dk = in.tensor(), dv = in.tensor();
  const Incoming incoming(in);
  const Arguments arguments(in);
  const auto [dbias, dsink] = differentiate(incoming, arguments, {dq, dk, dv});
  give(stack, dbias, dsink);
}

void explain(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const Arguments arguments(in);
  give(stack, Work(arguments).explain());
}

}  // namespace tea::torch_ops
