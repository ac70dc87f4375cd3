// The C API of te_attention.h: thin wrappers of the core's functions.
#include <cstring>

#include "core/boundary.h"
#include "core/cost.h"
#include "core/env.h"
#include "core/growth.h"
#include "core/plan.h"

struct tea_plan {
  tea::PlanRef ref;
};

namespace {

using tea::guarded;
using tea::Problem;

void require(const void* pointer, const char* name) {
  TEA_REQUIRE(pointer, name, pointer, "memory for the result");
}

// The sizes of version 0.1: the meaning of a struct_size of 0 in structs that a function writes.
constexpr size_t kFirstProblem = 472, kFirstCost = 48, kFirstCacheInfo = 40;
static_assert(sizeof(tea_problem) >= kFirstProblem && sizeof(tea_cost) >= kFirstCost &&
              sizeof(tea_cache_info) >= kFirstCacheInfo);

void give_problem(tea_problem* caller, const Problem& problem, const char* argument) {
  tea::give(caller, static_cast<const tea_problem&>(problem),
            {argument, "tea_problem", "a tea_problem"}, kFirstProblem, true);
}

tea_run sizes_of(const tea_run* run) { return run ? tea::as_known(run) : tea_run{}; }

}  // namespace

extern "C" {

tea_status tea_plan_create(const tea_problem* problem, int device, const char* engine,
                           tea_plan** plan) {
  return guarded([&] {
    require(plan, "plan");
    *plan = nullptr;
    *plan =
        new tea_plan{tea::planner().plan(Problem::import(problem), device, engine ? engine : "")};
  });
}

void tea_plan_release(tea_plan* plan) { delete plan; }

const char* tea_plan_engine(const tea_plan* plan) { return plan ? plan->ref->engine.data() : ""; }

int32_t tea_plan_accumulates(const tea_plan* plan, int32_t backward) {
  const auto direction = backward ? tea::Direction::kBackward : tea::Direction::kForward;
  return plan && plan->ref->executable->accumulates(direction);
}

tea_status tea_forward(const tea_plan* plan, const tea_run* run) {
  return guarded([&] {
    TEA_REQUIRE(plan, "plan", plan, "a plan");
    tea::forward(*plan->ref, run);
  });
}

tea_status tea_backward(const tea_plan* plan, const tea_run* run) {
  return guarded([&] {
    TEA_REQUIRE(plan, "plan", plan, "a plan");
    tea::backward(*plan->ref, run);
  });
}

tea_status tea_plan_workspace(const tea_plan* plan, const tea_run* run, uint64_t* forward,
                              uint64_t* backward) {
  return guarded([&] {
    TEA_REQUIRE(plan, "plan", plan, "a plan");
    const tea_run sizes = sizes_of(run);
    const tea::Plan& p = *plan->ref;
    const uint64_t needs[] = {p.workspace_need(run ? &sizes : nullptr, tea::Direction::kForward),
                              p.workspace_need(run ? &sizes : nullptr, tea::Direction::kBackward)};
    if (forward) *forward = needs[0];
    if (backward) *backward = needs[1];
  });
}

tea_status tea_workspace_bound(const tea_problem* problem, const tea_run* run, uint64_t* forward,
                               uint64_t* backward) {
  return guarded([&] {
    const Problem p = Problem::import(problem);
    p.check();
    const tea_run sizes = sizes_of(run);
    const tea::Geometry size = tea::geometry(p, run ? &sizes : nullptr);
    const auto bound = [&](tea::Direction d) { return tea::planner().workspace_bound(p, size, d); };
    if (forward) *forward = bound(tea::Direction::kForward);
    if (backward) *backward = p.training ? bound(tea::Direction::kBackward) : 0;
  });
}

tea_status tea_explain(const tea_problem* problem, int device, char* buffer, size_t capacity,
                       size_t* needed) {
  return guarded([&] {
    tea::copy_text(tea::planner().explain(Problem::import(problem), device), buffer, capacity,
                   needed);
  });
}

tea_status tea_problem_print(const tea_problem* problem, char* buffer, size_t capacity,
                             size_t* needed) {
  return guarded(
      [&] { tea::copy_text(Problem::import(problem).text(), buffer, capacity, needed); });
}

tea_status tea_problem_parse(const char* text, tea_problem* problem) {
  return guarded([&] {
    TEA_REQUIRE(text, "text", text, "a line of field=value words");
    require(problem, "problem");
    give_problem(problem, Problem::parse(text), "problem");
  });
}

tea_status tea_problem_check(const tea_problem* problem, tea_problem* normalised) {
  return guarded([&] {
    const Problem p = Problem::import(problem);
    p.check();
    if (normalised) give_problem(normalised, p.normalised(), "normalised");
  });
}

tea_status tea_problem_cost(const tea_problem* problem, const tea_run* run, tea_cost* result) {
  return guarded([&] {
    require(result, "cost");
    const Problem p = Problem::import(problem);
    p.check();
    const tea_run sizes = sizes_of(run);
    tea::give(result, tea::cost(p.normalised(), run ? &sizes : nullptr),
              {"cost", "tea_cost", "a tea_cost"}, kFirstCost);
  });
}

tea_status tea_cache_stats(tea_cache_info* info) {
  return guarded([&] {
    require(info, "info");
    tea::give(info, tea::planner().info(), {"info", "tea_cache_info", "a tea_cache_info"},
              kFirstCacheInfo);
  });
}

tea_status tea_cache_limit(size_t capacity) {
  return guarded([&] { tea::planner().limit(capacity); });
}

const char* tea_error(void) { return tea::last_error(); }

const char* tea_setting(const char* variable) {
  for (const tea::SettingRow& row : tea::settings())
    if (variable && std::strcmp(row.variable, variable) == 0)
      return tea::setting(row.setting).c_str();
  return nullptr;
}

#define TEXT(x) #x
#define VERSION(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)
const char* tea_version(void) {
  return VERSION(TEA_VERSION_MAJOR, TEA_VERSION_MINOR, TEA_VERSION_PATCH);
}
}
