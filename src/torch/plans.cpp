// A direct-mapped cache: a problem replaces the one with the same slot.
#include "torch/plans.h"

#include <array>
#include <cstring>
#include <memory>

#include "torch/tensor.h"

namespace tea::torch_ops {
namespace {

struct Release {
  void operator()(tea_plan* plan) const { tea_plan_release(plan); }
};

struct Entry {
  tea_problem problem;
  int device = 0;
  std::string engine;
  std::unique_ptr<tea_plan, Release> plan;
  uint64_t forward = 0, backward = 0;

  bool is(const tea_problem& p, int d, const std::string& e) const {
    return plan && device == d && std::memcmp(&problem, &p, sizeof p) == 0 && engine == e;
  }
};

// Four chains, because one would wait for each product.
size_t hash(const tea_problem& problem) {
  static_assert(sizeof problem % sizeof(uint64_t) == 0);
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;
  uint64_t words[(sizeof problem / sizeof(uint64_t) + 3) / 4][4] = {}, h[4] = {};
  std::memcpy(words, &problem, sizeof problem);
  for (const auto& four : words)
    for (int i = 0; i < 4; ++i) h[i] = (h[i] ^ four[i]) * kFactor;
  for (int i = 1; i < 4; ++i) h[0] = (h[0] ^ h[i] >> 7) * kFactor;
  return h[0] >> 32;
}

}  // namespace

Planned planned(const tea_problem& problem, const tea_run* run, int device,
                const std::string& engine) {
  static thread_local std::array<Entry, 64> entries;
  Entry& entry = entries[hash(problem) % entries.size()];
  const bool known = entry.is(problem, device, engine);
  if (!known) {
    entry.plan.reset();
    tea_plan* plan = nullptr;
    require(tea_plan_create(&problem, device, engine.c_str(), &plan));
    entry.plan.reset(plan);
    entry.problem = problem, entry.device = device, entry.engine = engine;
  }
  if (!known || run) require(tea_workspace_bound(&problem, run, &entry.forward, &entry.backward));
  return {entry.plan.get(), entry.forward, entry.backward};
}

}  // namespace tea::torch_ops
