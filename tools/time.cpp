// time: median milliseconds of forward and backward, and operations per second.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "commands.h"
#include "core/error.h"
#include "json.h"
#include "kit/inputs.h"

namespace tea::tool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSeconds = 0.5;  // as many repetitions as fit in here,
constexpr int kFewest = 5;        // but so many at least

struct Timing {
  double milliseconds;
  int runs;
};

struct Release {
  void operator()(tea_plan* plan) const { tea_plan_release(plan); }
};
using PlanPointer = std::unique_ptr<tea_plan, Release>;
using Execute = tea_status (*)(const tea_plan*, const tea_run*);

void require(tea_status status) {
  if (status != TEA_OK) throw Error(status, tea_error());
}

// The first run warms caches and is not counted.
Timing measure(Execute execute, const tea_plan* plan, const tea_run& run) {
  require(execute(plan, &run));
  std::vector<double> times;
  const auto begin = Clock::now();
  const auto elapsed = [](Clock::time_point since) {
    return std::chrono::duration<double>(Clock::now() - since).count();
  };
  while (static_cast<int>(times.size()) < kFewest || elapsed(begin) < kSeconds) {
    const auto start = Clock::now();
    require(execute(plan, &run));
    times.push_back(elapsed(start));
  }
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return {*middle * 1e3, static_cast<int>(times.size())};
}

double gigaflops(uint64_t operations, const Timing& t) {
  return static_cast<double>(operations) / (t.milliseconds * 1e6);
}

std::string timing_json(const Timing& t, uint64_t operations) {
  return json::object({{"milliseconds", json::number(t.milliseconds)},
                       {"runs", json::number(static_cast<uint64_t>(t.runs))},
                       {"gflops", json::number(gigaflops(operations, t))}});
}

void print_timing(const char* name, const Timing& t, uint64_t operations) {
  std::printf("  %-8s %10.4f ms  %10.3f GFLOP/s  (median of %d)\n", name, t.milliseconds,
              gigaflops(operations, t), t.runs);
}

}  // namespace

int time(const Options& options) {
  kit::Inputs inputs(kit::Case::parse(options.argument));
  const Problem& problem = inputs.problem();
  tea_plan* made = nullptr;
  require(tea_plan_create(&problem, -1, options.engine.c_str(), &made));
  const PlanPointer plan(made);
  uint64_t need[2] = {};
  require(tea_workspace_bound(&problem, &inputs.run(0), &need[0], &need[1]));
  const tea_run& run = inputs.run(std::max(need[0], need[1]));
  tea_cost cost{};
  require(tea_problem_cost(&problem, &run, &cost));
  const std::string engine = tea_plan_engine(plan.get());
  const Timing forward = measure(tea_forward, plan.get(), run);
  json::Members out = {{"case", json::text(options.argument)},
                       {"engine", json::text(engine)},
                       {"forward", timing_json(forward, cost.forward_flops)}};
  if (!options.json) {
    std::printf("%s\n", engine.c_str());
    print_timing("forward", forward, cost.forward_flops);
  }
  if (problem.training) {
    const Timing backward = measure(tea_backward, plan.get(), run);
    out.emplace_back("backward", timing_json(backward, cost.backward_flops));
    if (!options.json) print_timing("backward", backward, cost.backward_flops);
  }
  if (options.json) std::printf("%s\n", json::object(out).c_str());
  return 0;
}

}  // namespace tea::tool
