// Running a case and comparing it.
#include "kit/check.h"

#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>

#include "core/registry.h"
#include "kit/codec.h"
#include "kit/inputs.h"

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

class Checker {
 public:
  Checker(const Case& c, std::string_view engine, const Tamper& tamper)
      : engine_(engine), tamper_(tamper), inputs_(c), problem_(inputs_.problem()) {
    report_.line = c.text();
  }

  Report run() {
    if (!make_plan()) return report_;
    std::vector<uint8_t> first[2], second[2];
    if (!execute(Poison::kNan, first)) return report_;
    compare_all();
    if (!execute(Poison::kLarge, second)) return report_;
    for (int d = 0; d < 2; ++d)
      if (first[d] != second[d])
        fail(std::string(d ? "backward" : "forward") +
             " depends on what the memory held before (NaN and 1e30 give other bits)");
    return report_;
  }

 private:
  void fail(const std::string& what) { report_.failures.push_back(what); }

  bool make_plan() {
    tea_plan* plan = nullptr;
    const tea_status status = tea_plan_create(&problem_, -1, engine_.c_str(), &plan);
    plan_.reset(plan);
    if (status != TEA_OK)
      fail("no plan: " + std::string(tea_error()));
    else
      report_.engine = tea_plan_engine(plan);
    return status == TEA_OK;
  }

  bool execute(Poison poison, std::vector<uint8_t> (&bytes)[2]) {
    inputs_.fill(poison);
    for (const Written d : {Written::kForward, Written::kBackward}) {
      const bool forward = d == Written::kForward;
      if (!forward && !problem_.training) break;
      uint64_t need[2] = {};
      tea_status status = tea_workspace_bound(&problem_, &inputs_.run(0), &need[0], &need[1]);
      const tea_run& run = inputs_.run(need[forward ? 0 : 1]);
      if (status == TEA_OK)
        status = forward ? tea_forward(plan_.get(), &run) : tea_backward(plan_.get(), &run);
      if (status != TEA_OK) {
        fail(std::string(forward ? "forward" : "backward") + ": " + tea_error());
        return false;
      }
      if (tamper_) tamper_(inputs_, d, poison);
      for (const std::string& what : inputs_.damage(d)) fail(what);
      bytes[forward ? 0 : 1] = inputs_.output_bytes(d);
    }
    return true;
  }

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

  void compare_all() {
    oracle::Case want = inputs_.logical();
    if (problem_.training) want.o_stored = as_array(TEA_O, want.dout.size());
    const oracle::Precision precision = precision_of(report_.engine, problem_);
    const oracle::Result r = oracle::solve(want, precision);
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

  std::string engine_;
  const Tamper& tamper_;
  Inputs inputs_;
  const Problem& problem_;
  PlanPointer plan_;
  Report report_;
};

}  // namespace

oracle::Precision precision_of(std::string_view engine, const Problem& p) {
  oracle::Precision out = oracle::precision(oracle_type(p.dtype));
  const bool is_reference = engine == "reference";
  if (is_reference) out.unit_acc = 0x1p-50;
  // The engines of the CPU keep P and dS as they compute them. In fp8 a P that differs in its last
  // bit may be cast to the neighbouring value.
  if (is_reference || (engine.starts_with("cpu") && !p.is_fp8()))
    out.p = oracle::rounding(oracle::Type::kExact);
  out.o = oracle::rounding(oracle_type(p.o_type()));
  out.dqkv = oracle::rounding(oracle_type(p.dqkv_type()));
  out.dbias = oracle::rounding(oracle_type(p.bias_type()));
  return out;
}

std::vector<std::string> host_engines() {
  const Problem simple = Problem::parse("dtype=fp32 heads_q=1 heads_kv=1 dim_qk=8");
  std::vector<std::string> out;
  for (const Engine& engine : engines()) {
    tea_plan* plan = nullptr;
    if (tea_plan_create(&simple, -1, std::string(engine.name).c_str(), &plan) == TEA_OK)
      out.emplace_back(engine.name);
    tea_plan_release(plan);
  }
  return out;
}

std::string Report::text() const {
  std::string out;
  for (const std::string& failure : failures) out += "  " + failure + "\n";
  return out + "  reproduce: te-attn check \"" + line + "\" --engine " + engine + "\n";
}

Report check(const Case& c, std::string_view engine, const Tamper& tamper) {
  try {
    return Checker(c, engine, tamper).run();
  } catch (const std::exception& e) {
    Report report{c.text(), std::string(engine), {}, {}};
    report.failures.push_back("the kit: " + std::string(e.what()));
    return report;
  }
}

}  // namespace tea::kit
