#include "torch/call.h"

#include <cstring>

#include "torch/plans.h"
#include "torch/report.h"

namespace tea::torch_ops {
namespace {

// Reads one argument of each kind (frontend/options.h) from the stack.
struct Reader {
  Stack& in;
  using Tensor = torch_ops::Tensor;

#define TEA_READ(kind, function) \
  frontend::OptionTypes<Tensor>::kind kind##_() { return in.function(); }
  TEA_READ(Tensor, tensor)
  TEA_READ(OptionalTensor, maybe_tensor)
  TEA_READ(Text, text)
  TEA_READ(Flag, flag)
  TEA_READ(Integer, integer)
  TEA_READ(Number, number)
  TEA_READ(OptionalNumber, maybe_number)
#undef TEA_READ
};

}  // namespace

namespace {

// The number set by torch.set_num_threads() or OMP_NUM_THREADS; torchrun sets 1.
int64_t own_threads() {
  uint32_t threads;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return threads;
}

}  // namespace

namespace {

// Options that the caller leaves out; the tensors that are required come in order.
struct Absent {
  const Tensor* required;

  Tensor Tensor_() { return *required++; }
  static std::optional<Tensor> OptionalTensor_() { return {}; }
  static std::string Text_() { return {}; }
  static bool Flag_() { return false; }
  static int64_t Integer_() { return -1; }
  static double Number_() { return 0; }
  static std::optional<double> OptionalNumber_() { return {}; }
};

frontend::Options with_inputs(frontend::Options options,
                              const std::array<frontend::Tensor, 3>& qkv) {
  options.q = qkv[0], options.k = qkv[1], options.v = qkv[2];
  return options;
}

template <class Source>
Arguments arguments_of(Source source) {
  return {
  // the initialisers of a braced list are evaluated in order
#define TEA_OPTION(kind, name, default_text) source.kind##_(),
#include "frontend/options.def"
  };
}

}  // namespace

Arguments read_arguments(Stack& stack) { return arguments_of(Reader{stack}); }

Arguments default_arguments(const Tensor& q, const Tensor& k, const Tensor& v) {
  const Tensor required[] = {q, k, v};
  return arguments_of(Absent{required});
}

Call::Call(const Arguments& arguments)
    : in_(arguments),
      options_(frontend::with_views(in_, view_of)),
      where_(where_is("q", in_.q)),
      description_(options_) {}

Call::Call(const Arguments& arguments, const std::array<frontend::Tensor, 3>& qkv)
    : in_(arguments),
      options_(with_inputs(frontend::with_views(in_, view_of), qkv)),
      where_(where_is("q", in_.q)),
      description_(options_) {}

void Call::add_scale(tea_tensor index, const char* name, const std::optional<Tensor>& tensor) {
  if (tensor) description_.add_scale(index, name, view_of(name, *tensor));
}

void Call::add_row_statistic_slice(tea_tensor index, const char* name, const Tensor& tensor) {
  const frontend::Tensor view = view_of(name, tensor);
  const tea_strides strides = description_.row_statistic_strides(name, view);
  if (index != TEA_LSE && std::memcmp(&strides, &problem().lse, sizeof strides) != 0)
    refuse(name, "of other strides", "those of lse");
  problem().lse = strides;
  description_.add_memory(index, view.data);
}

Tensor Call::new_o() {
  const frontend::Layout layout = description_.o_layout();
  const Tensor o = empty(in_.q, torch_dtype(description_.type_of(TEA_O)), layout.rank, layout.size,
                         layout.stride);
  problem().o = add_rows(TEA_O, "o", o);
  return o;
}

Tensor Call::new_row_statistic() const {
  const frontend::Shape shape = description_.row_statistic_shape();
  return empty(in_.q, torch_dtype(description_.statistic_type()), shape.rank, shape.size);
}

void* Workspace::of(uint64_t bytes, const Tensor& like) {
  constexpr uint64_t kAlignment = 256;
  if (bytes_ < bytes) {
    reset();  // first, so that both do not exist at a time
    memory_ = empty(like, torch_byte(), {static_cast<int64_t>(bytes + kAlignment)});
    bytes_ = bytes;
  }
  const auto start = reinterpret_cast<uintptr_t>(memory_->data_ptr());
  return reinterpret_cast<void*>((start + kAlignment - 1) / kAlignment * kAlignment);
}

bool run_planned(const tea_problem& problem, tea_run& run, bool has_run_sizes,
                 const std::string& engine, const Tensor& like, const Where& where, bool is_forward,
                 Workspace* workspace) {
  const Planned plan = planned(problem, has_run_sizes ? &run : nullptr, where.device, engine);
  if (run.accumulate && !tea_plan_accumulates(plan.plan, !is_forward)) return false;
  const uint64_t bytes = is_forward ? plan.workspace_forward : plan.workspace_backward;
  if (bytes) {
    run.workspace = workspace->of(bytes, like);
    run.workspace_bytes = bytes;
  }
  run.stream = where.stream;
  if (where.device < 0) run.threads = own_threads();
  Report report(like, where);
  run.status = report.word();
  require((is_forward ? tea_forward : tea_backward)(plan.plan, &run));
  report.refuse_invalid("cu_seqlens_q, cu_seqlens_kv or their offsets");
  workspace->release_if_large();
  return true;
}

bool Call::run(bool is_forward) {
  description_.finish();
  Workspace workspace(0);
  return run_planned(problem(), description_.run, description_.has_run_sizes(), in_.engine, in_.q,
                     where_, is_forward, &workspace);
}

Launch Call::recorded(int accumulate, bool is_forward, int64_t (&memory)[TEA_TENSOR_COUNT]) {
  description_.run.accumulate = accumulate;
  description_.finish();
  Launch out{problem(), description_.run, {}, is_forward, description_.has_run_sizes()};
  if (in_.engine.size() >= sizeof out.engine) refuse("engine", in_.engine, "a shorter name");
  in_.engine.copy(out.engine, sizeof out.engine - 1);
  for (int i = 0; i < TEA_TENSOR_COUNT; ++i)
    memory[i] = reinterpret_cast<int64_t>(description_.run.tensors[i]);
  out.run.tensors = nullptr;
  return out;
}

std::string Call::explain() {
  description_.set_o_strides();
  description_.finish();
  const auto text = [](const auto& print) {
    size_t needed = 0;
    require(print(nullptr, 0, &needed));
    std::string out(needed, '\0');
    require(print(out.data(), needed, &needed));
    out.resize(needed - 1);
    return out;
  };
  const std::string line = text([&](char* to, size_t n, size_t* needed) {
    return tea_problem_print(&problem(), to, n, needed);
  });
  const std::string engines = text([&](char* to, size_t n, size_t* needed) {
    return tea_explain(&problem(), where_.device, to, n, needed);
  });
  if (!in_.engine.empty() && ("\n" + engines).find("\n" + in_.engine + ":") == std::string::npos)
    refuse("engine", "\"" + in_.engine + "\"", "one of those that explain:\n" + engines);
  return line + "\n" + engines;
}

}  // namespace tea::torch_ops
