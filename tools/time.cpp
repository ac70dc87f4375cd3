// time: median milliseconds of forward and backward, and operations per second; on a GPU also with
// nothing in its cache, of the first call, and what a call costs the host.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "commands.h"
#include "core/device.h"
#include "core/error.h"
#include "json.h"
#include "kit/check.h"
#include "kit/mirror.h"

namespace tea::tool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSeconds = 0.5;  // as many repetitions as fit in here,
constexpr int kFewest = 5;        // but so many at least

constexpr size_t kCacheBytes = size_t{256} << 20;  // more than any GPU's cache

struct Timing {
  double milliseconds;
  int runs;
  // On a GPU.
  double cold = 0, first = 0, host_microseconds = 0;
};

struct Release {
  void operator()(tea_plan* plan) const { tea_plan_release(plan); }
};
using PlanPointer = std::unique_ptr<tea_plan, Release>;
using Execute = tea_status (*)(const tea_plan*, const tea_run*);

void require(tea_status status) {
  if (status != TEA_OK) throw Error(status, tea_error());
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

// As many times as `one` returns within kSeconds.
template <class One>
std::vector<double> repeated(const One& one) {
  std::vector<double> times;
  const auto begin = Clock::now();
  while (static_cast<int>(times.size()) < kFewest || seconds_since(begin) < kSeconds)
    times.push_back(one());
  return times;
}

// The first run warms caches and is not counted.
Timing measure(Execute execute, const tea_plan* plan, const tea_run& run) {
  require(execute(plan, &run));
  const std::vector<double> times = repeated([&] {
    const auto start = Clock::now();
    require(execute(plan, &run));
    return seconds_since(start) * 1e3;
  });
  return {median(times), static_cast<int>(times.size())};
}

// By the GPU's own clock, but for the first call, which includes what is loaded at first use.
Timing measure_on(kit::Gpu& gpu, Execute execute, const tea_plan* plan, const tea_run& run) {
  const auto call = [&] { require(execute(plan, &run)); };
  const auto start = Clock::now();
  call();
  gpu.wait();
  const double first = seconds_since(start) * 1e3;
  const auto timed = [&] {
    gpu.start_clock();
    call();
    return gpu.stop_clock();
  };
  const std::vector<double> warm = repeated(timed);
  const std::vector<double> cold = repeated([&] {
    gpu.fill(gpu.scratch(0), 0, kCacheBytes);
    return timed();
  });
  std::vector<double> host;
  for (int i = 0; i < 200; ++i) {  // far fewer than a stream holds before calls wait
    const auto begin = Clock::now();
    call();
    host.push_back(seconds_since(begin) * 1e6);
  }
  gpu.wait();
  return {median(warm), static_cast<int>(warm.size()), median(cold), first, median(host)};
}

double gigaflops(uint64_t operations, const Timing& t) {
  return static_cast<double>(operations) / (t.milliseconds * 1e6);
}

std::string timing_json(const Timing& t, uint64_t operations) {
  json::Members out = {{"milliseconds", json::number(t.milliseconds)},
                       {"runs", json::number(static_cast<uint64_t>(t.runs))},
                       {"gflops", json::number(gigaflops(operations, t))}};
  if (t.first > 0) {
    out.emplace_back("cold_milliseconds", json::number(t.cold));
    out.emplace_back("first_milliseconds", json::number(t.first));
    out.emplace_back("host_microseconds", json::number(t.host_microseconds));
  }
  return json::object(out);
}

void print_timing(const char* name, const Timing& t, uint64_t operations) {
  std::printf("  %-8s %10.4f ms  %10.3f GFLOP/s  (median of %d)\n", name, t.milliseconds,
              gigaflops(operations, t), t.runs);
  if (t.first > 0)
    std::printf(
        "           %10.4f ms with an empty cache, %.4f ms the first time, %.2f us of host\n",
        t.cold, t.first, t.host_microseconds);
}

}  // namespace

int time(const Options& options) {
  kit::Inputs inputs(kit::Case::parse(options.argument));
  const Problem& problem = inputs.problem();
  tea_plan* made = nullptr;
  require(tea_plan_create(&problem, options.device, options.engine.c_str(), &made));
  const PlanPointer plan(made);
  tea_cost cost{};
  require(tea_problem_cost(&problem, &inputs.run(0), &cost));
  const auto need = [&](Direction direction) {
    return kit::workspace_for(problem, inputs.run(0), options.device, options.engine, direction);
  };
  const uint64_t workspace = std::max(need(Direction::kForward), need(Direction::kBackward));
  std::optional<kit::Mirror> mirror;
  if (options.device != kHost) {
    kit::Gpu& gpu = kit::gpu_of_thread(options.device);
    gpu.scratch(std::max<size_t>(kCacheBytes, workspace + 2 * kit::kRedzone));
    mirror.emplace(gpu, inputs);
  }
  const tea_run& run = mirror ? mirror->upload(workspace) : inputs.run(workspace);
  const auto timing = [&](Execute execute) {
    return mirror ? measure_on(kit::gpu_of_thread(options.device), execute, plan.get(), run)
                  : measure(execute, plan.get(), run);
  };
  const std::string engine = tea_plan_engine(plan.get());
  const Timing forward = timing(tea_forward);
  json::Members out = {{"case", json::text(options.argument)},
                       {"engine", json::text(engine)},
                       {"forward", timing_json(forward, cost.forward_flops)}};
  if (!options.json) {
    std::printf("%s\n", engine.c_str());
    print_timing("forward", forward, cost.forward_flops);
  }
  if (problem.training) {
    const Timing backward = timing(tea_backward);
    out.emplace_back("backward", timing_json(backward, cost.backward_flops));
    if (!options.json) print_timing("backward", backward, cost.backward_flops);
  }
  if (options.json) std::printf("%s\n", json::object(out).c_str());
  return 0;
}

}  // namespace tea::tool
