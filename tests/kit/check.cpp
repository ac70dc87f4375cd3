// Running a case and comparing it.
#include "kit/check.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <deque>
#include <exception>
#include <memory>
#include <optional>

#include "core/boundary.h"
#include "core/error.h"
#include "core/plan.h"
#include "core/registry.h"
#include "cpu/flash.h"
#include "kit/codec.h"

namespace tea::kit {
namespace {

struct Release {
  void operator()(tea_plan* plan) const { tea_plan_release(plan); }
};
using PlanPointer = std::unique_ptr<tea_plan, Release>;

std::string number(double x) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.9g", x);
  return buffer;
}

// Rules of cuDNN's that are not ours (docs/kernels/cudnn.md).
bool has_own_dropout(std::string_view engine) { return engine == "cudnn"; }
bool has_own_amax(std::string_view engine) { return engine == "cudnn"; }

// A case for the oracle and the results of it, which engines share, because they take much of the
// time of a check: where the rounding is the same and, if backward reads O, that is equal too.
class Expected {
 public:
  Expected(const Inputs& inputs, Solve solve) : solve_(solve), case_(inputs.logical()) {}

  // The members that a Key holds may be changed.
  oracle::Case& oracle_case() { return case_; }
  const oracle::Result& results(const oracle::Precision& precision) {
    Key key{precision, case_.o_stored, case_.kept, case_.fp8.divided};
    for (const Entry& entry : entries_)
      if (entry.key == key) return entry.result;
    return entries_.emplace_back(Entry{std::move(key), solve_(case_, precision)}).result;
  }

 private:
  struct Key {
    oracle::Precision precision;
    std::vector<double> o_stored;
    std::vector<char> kept;
    bool divided;
    bool operator==(const Key&) const = default;
  };
  struct Entry {
    Key key;
    oracle::Result result;
  };
  Solve solve_;
  oracle::Case case_;
  std::deque<Entry> entries_;  // references stay valid
};

// Compares the outputs with the expected values.
class Comparison {
 public:
  Comparison(const Inputs& inputs, Report& report, Expected& expected)
      : inputs_(inputs), problem_(inputs.problem()), report_(report), expected_(expected) {}

  // A second call compares other outputs of the same inputs and the same O.
  // `kept`: of an engine that has a dropout of its own.
  void run(const std::vector<char>& kept = {}) {
    if (!result_) {
      oracle::Case& want = expected_.oracle_case();
      want.kept = kept;
      want.fp8.divided = has_own_amax(report_.engine);
      // In fp64 engines sum P . dP instead of dO . O, which is more exact than O as it is stored.
      const bool reads_o = problem_.training && problem_.dtype != TEA_FP64;
      if (reads_o) want.o_stored = as_array(TEA_O, want.dout.size());
      precision_ = precision_of(report_.engine, problem_);
      result_ = &expected_.results(precision_);
    }
    report_.tensors.clear();
    compare_all(expected_.oracle_case(), precision_, *result_);
  }

 private:
  void fail(const std::string& what) { report_.failures.push_back(what); }

  // [batch][head][row][column] of an output, as the oracle wants it back.
  std::vector<double> as_array(tea_tensor t, size_t size) const {
    std::vector<double> out(size);
    const Place& place = inputs_.place(t);
    each_valid(place, problem_, inputs_.extents(), [&](int64_t, const Index& at) {
      const int64_t i =
          ((at[0] * place.shape[2] + at[1]) * inputs_.extents().max_q + at[2]) * place.shape[3] +
          at[3];
      out[static_cast<size_t>(i)] = inputs_.value(t, at);
    });
    return out;
  }

  void compare_all(const oracle::Case& want, const oracle::Precision& precision,
                   const oracle::Result& r) {
    compare(TEA_O, r.o);
    compare(TEA_LSE, r.lse);
    compare(TEA_MAX, r.max);
    compare(TEA_SUM_EXP, r.sum_exp);
    compare_amax(TEA_S_AMAX, {&r.s_amax});
    compare_amax(TEA_O_AMAX, {&r.o_amax});
    if (!problem_.training) return;
    compare(TEA_DQ, r.dq);
    compare(TEA_DK, r.dk);
    compare(TEA_DV, r.dv);
    compare_dsink(r.dsink);
    if (inputs_.place(TEA_DBIAS).used) compare_dbias(want, r.dbias, precision);
    compare_amax(TEA_DP_AMAX, {&r.dp_amax});
    const bool own = inputs_.place(TEA_DK_AMAX).used;
    if (own) {
      compare_amax(TEA_DQ_AMAX, {&r.dq_amax});
      compare_amax(TEA_DK_AMAX, {&r.dk_amax});
      compare_amax(TEA_DV_AMAX, {&r.dv_amax});
    } else {
      compare_amax(TEA_DQ_AMAX, {&r.dq_amax, &r.dk_amax, &r.dv_amax});
    }
  }

  // Without a single row of q the oracle sees no gradients; they are zero then, exactly.
  static oracle::Tensor or_zeros(const oracle::Tensor& want, int64_t size) {
    if (!want.value.empty()) return want;
    const std::vector<double> zeros(static_cast<size_t>(size));
    return {zeros, zeros, {}};
  }

  // Notes one element; the first wrong one of a tensor becomes a failure.
  void note(Closeness& c, const oracle::Tensor& want, size_t i, double got, const Index& at) {
    const double ratio = want.error(i, got);
    ++c.elements;
    if (ratio <= 2) {
      c.ratio = std::max(c.ratio, ratio);
      return;
    }
    if (c.ratio <= 2)
      fail(c.tensor + " at batch " + std::to_string(at[0]) + " head " + std::to_string(at[1]) +
           " row " + std::to_string(at[2]) + " column " + std::to_string(at[3]) + ": got " +
           number(got) + ", want " + number(want.value[i]) + ", bound " + number(want.bound[i]) +
           " (" + number(ratio) + " times)");
    c.ratio = std::max(c.ratio, ratio);
  }

  void compare(tea_tensor t, const oracle::Tensor& given) {
    const Place& place = inputs_.place(t);
    if (!place.used) return;
    const int64_t rows =
        place.kind == Kind::kRowsKv ? inputs_.extents().max_kv : inputs_.extents().max_q;
    const oracle::Tensor want =
        or_zeros(given, inputs_.extents().batch * place.shape[2] * rows * place.shape[3]);
    Closeness c{tensor_name(t)};
    each_valid(place, problem_, inputs_.extents(), [&](int64_t, const Index& at) {
      const int64_t i = ((at[0] * place.shape[2] + at[1]) * rows + at[2]) * place.shape[3] + at[3];
      note(c, want, static_cast<size_t>(i), inputs_.value(t, at), at);
    });
    report_.tensors.push_back(c);
  }

  void compare_dsink(const oracle::Tensor& given) {
    if (!inputs_.place(TEA_DSINK).used) return;
    const oracle::Tensor want = or_zeros(given, problem_.heads_q);
    Closeness c{"dsink"};
    for (int64_t h = 0; h < problem_.heads_q; ++h)
      note(c, want, static_cast<size_t>(h), inputs_.flat(TEA_DSINK, h), {0, h, 0, 0});
    report_.tensors.push_back(c);
  }

  // The gradient of a bias has the bias's own shape; the oracle's, before the sum, has all four.
  void compare_dbias(const oracle::Case& c, const oracle::Tensor& full,
                     const oracle::Precision& precision) {
    bool lacks[4];
    for (int i = 0; i < 4; ++i) lacks[i] = problem_.bias_broadcast >> i & 1;
    const Place& place = inputs_.place(TEA_DBIAS);
    const Index& n = place.shape;
    const oracle::Tensor want = oracle::reduce(
        c, or_zeros(full, c.batch * c.heads_q * c.max_q * c.max_kv), lacks, precision);
    Closeness closeness{"dbias"};
    each_valid(place, problem_, inputs_.extents(), [&](int64_t, const Index& at) {
      int64_t i = 0;
      for (size_t d = 0; d < 4; ++d) i = i * n[d] + (lacks[d] ? 0 : at[d]);
      note(closeness, want, static_cast<size_t>(i), inputs_.value(TEA_DBIAS, at), at);
    });
    report_.tensors.push_back(closeness);
  }

  // An amax holds the largest of what it held before and of the tensors that it records.
  void compare_amax(tea_tensor t, const std::vector<const oracle::Tensor*>& parts) {
    if (!inputs_.place(t).used) return;
    oracle::Tensor want = or_zeros(*parts[0], 1);
    for (const oracle::Tensor* part : parts) {
      if (part->value.empty()) continue;
      want.value[0] = std::max(want.value[0], part->value[0]);
      want.bound[0] = std::max(want.bound[0], part->bound[0]);
    }
    want.value[0] = std::max(want.value[0], inputs_.scalars().amax);
    Closeness c{tensor_name(t)};
    note(c, want, 0, inputs_.flat(t, 0), {});
    report_.tensors.push_back(c);
  }

  const Inputs& inputs_;
  const Problem& problem_;
  Report& report_;
  Expected& expected_;
  oracle::Precision precision_{};
  const oracle::Result* result_ = nullptr;
};

// A plan, or NULL and the reason in the report.
PlanPointer make_plan(const Case& c, const Problem& problem, Report& report) {
  tea_plan* made = nullptr;
  const tea_status status = tea_plan_create(&problem, report.device, report.engine.c_str(), &made);
  PlanPointer plan(made);
  report.refused = status == TEA_UNSUPPORTED;
  if (status != TEA_OK) {
    report.failures.push_back("no plan: " + std::string(tea_error()));
    return plan;
  }
  report.engine = tea_plan_engine(plan.get());
  const bool poisons_keys =
      c.values == Values::kNanMasked || (c.values == Values::kNanAttended && c.problem.training);
  if (poisons_keys && needs_finite_padding(report.engine)) {
    report.refused = true;
    report.failures.push_back(
        "the engine needs finite numbers: others reach gradients of keys that no row attends");
  }
  return plan;
}

class Checker {
 public:
  // `report` is that of make_plan().
  Checker(const Case& c, Inputs& inputs, std::string_view engine, PlanPointer plan,
          const Report& report, const Stage& stage, Expected& expected)
      : engine_(engine),
        stage_(stage),
        expected_(expected),
        case_(c),
        inputs_(inputs),
        problem_(inputs_.problem()),
        plan_(std::move(plan)),
        report_(report) {}

  Report run() {
    if (stage_.shared_bytes && !pretend()) return report_;
    if (stage_.device != kHost)
      mirror_.emplace(gpu_of_thread(stage_.device), inputs_, stage_.around);
    std::vector<uint8_t> first[2], second[2];
    Comparison comparison(inputs_, report_, expected_);
    if (problem_.drops() && has_own_dropout(report_.engine) && !look_at_dropout()) return report_;
    const bool finite = needs_finite_padding(report_.engine);
    if (!execute(finite ? Poison::kThree : Poison::kNan, first)) return report_;
    comparison.run(kept_);
    if (!execute(finite ? Poison::kMinusTwo : Poison::kLarge, second)) return report_;
    for (int d = 0; d < 2; ++d)
      if (first[d] != second[d] && must_repeat(d))
        fail(std::string(d ? "backward" : "forward") + " depends on what the memory held before (" +
             (finite ? "3 and -2" : "NaN and 1e30") + " give other bits)");
    if (report_.ok() && (first[0] != second[0] || first[1] != second[1])) comparison.run(kept_);
    return report_;
  }

 private:
  void fail(const std::string& what) { report_.failures.push_back(what); }

  // A GPU may add in any order where determinism was not asked for; then the second run is compared
  // like the first.
  bool must_repeat(int direction) const {
    return stage_.device == kHost || problem_.deterministic ||
           (direction == 0 && repeats_forward(report_.engine, problem_));
  }

  bool look_at_dropout() {
    try {
      kept_ = kept_by(case_, report_.engine, stage_.device);
    } catch (const Error& e) {
      report_.refused = e.status == TEA_UNSUPPORTED;
      fail(e.what());
    }
    return report_.ok();
  }

  // Whether the sizes of a run decide if the engine serves it: cuDNN's support is not known before,
  // and no other engine has the bits of `hopper` where ragged queries are too many for decoding.
  bool may_refuse_runs() const {
    return report_.engine == "cudnn" || (report_.engine == "hopper" && problem_.batch_invariant &&
                                         problem_.q_form == TEA_RAGGED);
  }

  tea_status launch(bool forward, const tea_run& run) {
    if (!pretended_)
      return forward ? tea_forward(plan_.get(), &run) : tea_backward(plan_.get(), &run);
    return guarded(
        [&] { forward ? tea::forward(*pretended_, &run) : tea::backward(*pretended_, &run); });
  }

  // The named engine's own plan for a device that is not there.
  bool pretend() {
    Device device = device_at(stage_.device);
    device.shared_bytes = stage_.shared_bytes;
    for (const Engine& engine : engines()) {
      if (engine.name != engine_) continue;
      Attempt attempt = engine.attempt(problem_.normalised(), device);
      auto* const executable = std::get_if<std::unique_ptr<Executable>>(&attempt);
      report_.refused = !executable;
      if (report_.refused) fail("no plan with so little shared memory");
      if (executable)
        pretended_ = std::make_shared<const Plan>(Plan{engine.name, problem_.normalised(), device,
                                                       std::move(*executable), engine.workspace});
      return executable != nullptr;
    }
    fail("shared_bytes needs the name of an engine, not \"" + engine_ + "\"");
    return false;
  }

  bool execute(Poison poison, std::vector<uint8_t> (&bytes)[2]) {
    inputs_.fill(poison);
    for (const Written d : {Written::kForward, Written::kBackward}) {
      const bool forward = d == Written::kForward;
      if (!forward && !problem_.training) break;
      const uint64_t workspace =
          workspace_for(problem_, inputs_.run(0), stage_.device, report_.engine,
                        forward ? Direction::kForward : Direction::kBackward);
      const tea_run& run = mirror_ ? mirror_->upload(workspace) : inputs_.run(workspace);
      const tea_status status = launch(forward, run);
      if (mirror_) mirror_->fetch();
      if (status != TEA_OK) {
        fail(std::string(forward ? "forward" : "backward") + ": " + tea_error());
        report_.refused = forward && status == TEA_UNSUPPORTED && may_refuse_runs() &&
                          report_.failures.size() == 1;
        return false;
      }
      if (stage_.tamper) stage_.tamper(inputs_, d, poison);
      for (const std::string& what : inputs_.damage(d)) fail(what);
      if (mirror_)
        for (const std::string& what : mirror_->damage()) fail(what);
      bytes[forward ? 0 : 1] = inputs_.output_bytes(d);
    }
    return true;
  }

  std::string engine_;
  const Stage& stage_;
  Expected& expected_;
  const Case& case_;
  Inputs& inputs_;
  std::optional<Mirror> mirror_;
  const Problem& problem_;
  std::vector<char> kept_;
  PlanPointer plan_;
  PlanRef pretended_;
  Report report_;
};

}  // namespace

namespace {

// Instructions of a CPU for products in bf16 take P and dS as bf16, and subnormal operands as zero.
// P and dS of fp32 keep their precision.
bool multiplies_bf16(std::string_view engine, const Problem& p) {
  if (p.dtype != TEA_BF16 || p.kv_dtype || p.batch_invariant) return false;
  if (engine == "cpu") return cpu::kAmx.available() || cpu::pairs_are_fast();
  return engine == "cpu-amx" || engine == "cpu-avx512-bf16";
}

// Whether an engine keeps P and dS as it computes them. In fp8 a P that differs in its last bit may
// be cast to the adjacent value.
bool keeps_p(std::string_view engine, const Problem& p) {
  if (engine == "reference") return true;
  return engine.starts_with("cpu") && !p.is_fp8() && !multiplies_bf16(engine, p);
}

}  // namespace

oracle::Precision precision_of(std::string_view engine, const Problem& p) {
  oracle::Precision out = oracle::precision(oracle_type(p.dtype));
  if (engine == "reference") out.unit_acc = 0x1p-50;
  if (keeps_p(engine, p)) out.p = oracle::rounding(oracle::Type::kExact);
  if (multiplies_bf16(engine, p)) out.least = FLT_MIN;
  // Where K and V alone are FP8, P of the decoding kernels is fp16. Some runs pass to `portable`,
  // where it has the type of Q.
  if (engine == "hopper" && p.kv_dtype)
    out.p.floor = std::max(out.p.floor, oracle::rounding(oracle::Type::kFp16).floor);
  out.o = oracle::rounding(oracle_type(p.o_type()));
  out.dqkv = oracle::rounding(oracle_type(p.dqkv_type()));
  out.dbias = oracle::rounding(oracle_type(p.bias_type()));
  if (engine == "cudnn" || engine == "hopper-cudnn" || (engine == "portable-cudnn" && p.is_fp8())) {
    out.least = FLT_MIN;  // subnormal probabilities count as zero
    // Each query head's gradient of K and V is rounded before the sum over those that share them.
    out.dqkv.floor *= 1 + p.heads_q / p.heads_kv;
    // Tensor cores add products of fp8 with few bits; P is cast against a running maximum.
    if (p.is_fp8()) out.unit_acc = 0x1p-16, out.p = oracle::rounding(oracle_type(p.dtype));
  }
  return out;
}

uint64_t workspace_for(const Problem& problem, const tea_run& run, int device,
                       std::string_view engine, Direction direction) {
  const PlanRef plan = planner().plan(problem, device, engine);
  const Geometry size = geometry(plan->problem, plan->problem.varies() ? &run : nullptr);
  const uint64_t bound = planner().workspace_bound(plan->problem, size, direction);
  return plan->workspace ? std::max(bound, plan->workspace(plan->problem, size, direction)) : bound;
}

bool needs_finite_padding(std::string_view engine) { return engine == "cudnn"; }
bool repeats_forward(std::string_view engine, const Problem& problem) {
  return engine != "cudnn" || problem.varies_q() || problem.seqlen_q != 1;
}

std::vector<std::string> engines_of(int device) {
  const Problem simple = Problem::parse("dtype=fp16 heads_q=1 heads_kv=1 dim_qk=8");
  std::vector<std::string> out;
  for (const Engine& engine : engines()) {
    tea_plan* plan = nullptr;
    if (tea_plan_create(&simple, device, std::string(engine.name).c_str(), &plan) == TEA_OK)
      out.emplace_back(engine.name);
    tea_plan_release(plan);
  }
  return out;
}

std::vector<char> kept_by(const Case& c, std::string_view engine, int device,
                          const std::function<void(Inputs&)>& change) {
  Case even = c;
  even.values = Values::kZero;
  Inputs inputs(even);
  const Problem& p = inputs.problem();
  const Extents& e = inputs.extents();
  std::vector<char> kept(static_cast<size_t>(e.batch * p.heads_q * e.max_q * e.max_kv));
  const PlanRef plan = planner().plan(p, device, engine);
  const uint64_t bytes = workspace_for(p, inputs.run(0), device, engine, Direction::kForward);
  for (int64_t first = 0; first < e.max_kv; first += p.v_dim()) {
    inputs.replace(TEA_V, [first](const Index& at) { return at[2] == first + at[3]; });
    inputs.fill(needs_finite_padding(engine) ? Poison::kThree : Poison::kNan);
    if (change) change(inputs);
    Mirror mirror(gpu_of_thread(device), inputs);
    tea::forward(*plan, &mirror.upload(bytes));
    mirror.fetch();
    each_valid(inputs.place(TEA_O), p, e, [&](int64_t, const Index& at) {
      const int64_t row = (at[0] * p.heads_q + at[1]) * e.max_q + at[2], column = first + at[3];
      if (column < e.max_kv)
        kept[static_cast<size_t>(row * e.max_kv + column)] = inputs.value(TEA_O, at) != 0;
    });
  }
  return kept;
}

bool runs_on_gpus(const Problem& problem) {
  if (problem.dtype == TEA_FP64) return false;
  return problem.is_fp8() || !problem.training || problem.dout_type() == problem.dtype;
}

std::vector<std::string> host_engines() { return engines_of(kHost); }

void compare(const Inputs& inputs, Report& report, Solve solve, const std::vector<char>& kept) {
  Expected expected(inputs, solve);
  Comparison(inputs, report, expected).run(kept);
}

std::string Report::text() const {
  std::string out;
  for (const std::string& failure : failures) out += "  " + failure + "\n";
  const std::string by = engine.empty() ? "" : " --engine " + engine;
  const std::string where = device == kHost ? "" : " --device " + std::to_string(device);
  return out + "  reproduce: te-attn check \"" + line + "\"" + by + where + "\n";
}

std::vector<Report> check(const Case& c, const std::vector<std::string>& engines,
                          const Stage& stage) {
  std::optional<Inputs> inputs;
  std::optional<Expected> expected;
  std::vector<Report> out;
  for (const std::string& engine : engines) {
    Report report{c.text(), engine, {}, {}, stage.device};
    try {
      // Ahead of the tensors, which take much time.
      PlanPointer plan = make_plan(c, placed(c, extents(c)), report);
      if (!report.ok()) {
        out.push_back(std::move(report));
        continue;
      }
      // Restore memory, so that the next engine is not blamed for the damage.
      if (!inputs || !out.back().ok()) {
        inputs.emplace(c);
        expected.emplace(*inputs, stage.solve);
      }
      report = Checker(c, *inputs, engine, std::move(plan), report, stage, *expected).run();
    } catch (const GpuLost& e) {
      report.lost = true;
      report.failures.push_back(e.what());
    } catch (const std::exception& e) {
      report.failures.push_back("the kit: " + std::string(e.what()));
    }
    out.push_back(std::move(report));
  }
  return out;
}

Report check(const Case& c, std::string_view engine, const Stage& stage) {
  return std::move(check(c, std::vector<std::string>{std::string(engine)}, stage).front());
}

}  // namespace tea::kit
