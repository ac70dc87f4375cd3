// Selects the first engine that accepts; plans are in a bounded least-recently-used cache.
#include "core/plan.h"

#include <cstdio>
#include <list>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/env.h"
#include "core/error.h"
#include "core/registry.h"

namespace tea {
namespace {

struct Key {
  Problem problem;
  int device;
  std::string only;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& k) const {
    return k.problem.hash() * 31 + static_cast<size_t>(k.device + 1) +
           std::hash<std::string>{}(k.only);
  }
};

PlanRef make_plan(const Engine& engine, const Problem& problem, const Device& device,
                  std::unique_ptr<Executable> executable) {
  return std::make_shared<const Plan>(
      Plan{engine.name, problem, device, std::move(executable), engine.workspace});
}

std::string names(std::span<const Engine> engines) {
  std::string out;
  for (const Engine& e : engines) out += (out.empty() ? "one of " : ", ") + std::string(e.name);
  return out;
}

bool is_nondeterminism_allowed() {
  const std::string& text = setting(Setting::kNondeterministic);
  TEA_REQUIRE(text.empty() || text == "0" || text == "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", text,
              "0 or 1");
  return text != "0";
}

// The problem that runs: the canonical form, with the options from the environment.
Problem canonical(const Problem& problem) {
  Problem p = problem.normalised();
  if (!is_nondeterminism_allowed()) p.deterministic = 1;
  return p;
}

Problem prepared(const Problem& problem) {
  problem.check();
  return canonical(problem);
}

}  // namespace

// The keys of a plan are its canonical problem, and the problems as callers passed them, which are
// not checked again.
struct Planner::Cache {
  static constexpr size_t kMaxKeys = 4;  // per plan
  struct Entry {
    std::vector<Key> keys;
    PlanRef plan;
  };
  mutable std::mutex mutex;
  std::list<Entry> recent;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> index;
  size_t capacity;
  uint64_t hits = 0, misses = 0;

  PlanRef find(const Key& written) {
    const std::lock_guard lock(mutex);
    return hit(written);
  }

  PlanRef find(const Key& canonical, const Key& written) {
    const std::lock_guard lock(mutex);
    PlanRef plan = hit(canonical);
    if (plan)
      name(recent.begin(), written);
    else
      ++misses;
    return plan;
  }

  // If another thread has inserted the same plan meanwhile, that plan is kept.
  PlanRef insert(const Key& canonical, const Key& written, PlanRef plan) {
    std::list<Entry> evicted;
    const std::lock_guard lock(mutex);
    if (const auto it = index.find(canonical); it != index.end()) return it->second->plan;
    recent.push_front({{}, plan});
    name(recent.begin(), canonical);
    name(recent.begin(), written);
    shrink(evicted);
    return plan;
  }

  // The text of the last explanation if it was for this problem; empty otherwise.
  std::string explained(const Key& canonical) const {
    const std::lock_guard lock(mutex);
    return canonical == last_ ? text_ : "";
  }
  void explain(const Key& canonical, const std::string& text) {
    const std::lock_guard lock(mutex);
    last_ = canonical, text_ = text;
  }

  void limit(size_t most) {
    std::list<Entry> evicted;
    const std::lock_guard lock(mutex);
    capacity = most;
    text_.clear();
    shrink(evicted);
  }

 private:
  // Destroying plans may take long, so the caller does it after it has unlocked the cache.
  void shrink(std::list<Entry>& evicted) {
    while (recent.size() > capacity) {
      for (const Key& key : recent.back().keys) index.erase(key);
      evicted.splice(evicted.end(), recent, std::prev(recent.end()));
    }
  }

  PlanRef hit(const Key& key) {
    const auto it = index.find(key);
    if (it == index.end()) return nullptr;
    ++hits;
    recent.splice(recent.begin(), recent, it->second);
    return it->second->plan;
  }

  void name(std::list<Entry>::iterator entry, const Key& key) {
    if (entry->keys.size() < kMaxKeys && index.emplace(key, entry).second)
      entry->keys.push_back(key);
  }

  Key last_{};  // the key of the last explanation
  std::string text_;
};

Planner::Planner(std::span<const Engine> engines, size_t capacity)
    : engines_(engines), cache_(std::make_unique<Cache>()) {
  cache_->capacity = capacity;
}
Planner::~Planner() = default;

PlanRef Planner::make(const Problem& problem, const Device& device, std::string_view only) const {
  PlanRef yielding;
  std::string refusals;
  bool known = only.empty();
  for (const Engine& engine : engines_) {
    if (only.empty() ? engine.only_by_name : engine.name != only) continue;
    known = true;
    Attempt attempt = engine.attempt(problem, device);
    if (const auto* refusal = std::get_if<Refusal>(&attempt)) {
      refusals += "\n  " + std::string(engine.name) + ": refused: " + refusal->why;
      continue;
    }
    auto& executable = std::get<std::unique_ptr<Executable>>(attempt);
    const bool yields = executable->yields && only.empty();
    if (yields && yielding) continue;
    PlanRef plan = make_plan(engine, problem, device, std::move(executable));
    if (!yields) return plan;
    yielding = std::move(plan);
  }
  if (!known) refuse_argument("engine", "\"" + std::string(only) + "\"", names(engines_));
  if (yielding) return yielding;
  throw Error(TEA_UNSUPPORTED, "no engine accepts " + problem.text() + refusals);
}

PlanRef Planner::plan(const Problem& problem, int device, std::string_view only) {
  if (only.empty()) only = setting(Setting::kEngine);
  const Key written{problem, device, std::string(only)};
  if (PlanRef found = cache_->find(written)) return found;
  const Key key{prepared(problem), device, std::string(only)};
  if (PlanRef found = cache_->find(key, written)) return found;
  PlanRef made = make(key.problem, device_at(device), only);
  if (setting_on(Setting::kLog))
    std::fprintf(stderr, "te_attention: %s runs %s\n", made->engine.data(),
                 key.problem.text().c_str());
  return cache_->insert(key, written, std::move(made));
}

std::string Planner::explain(const Problem& problem, int device) const {
  const Key key{prepared(problem), device, {}};
  if (std::string text = cache_->explained(key); !text.empty()) return text;
  const Device where = device_at(device);
  std::string out;
  for (const Engine& engine : engines_) {
    const Attempt attempt = engine.attempt(key.problem, where);
    out += std::string(engine.name) + ": ";
    if (const auto* refusal = std::get_if<Refusal>(&attempt)) {
      out += "refused: " + refusal->why + "\n";
      continue;
    }
    const char* yields = std::get<std::unique_ptr<Executable>>(attempt)->yields;
    out += yields ? "accepts, but yields: " + std::string(yields) : "accepts";
    out += engine.only_by_name ? ", when named\n" : "\n";
  }
  cache_->explain(key, out);
  return out;
}

uint64_t Planner::workspace_bound(const Problem& problem, const Geometry& size, Direction d) const {
  const Problem p = canonical(problem);  // a synonym runs on the engine of its canonical form
  // An engine that must be selected explicitly counts only if the environment selects it, so that
  // other callers do not allocate for it. Callers that select it in a call ask the plan.
  uint64_t bytes = 0;
  for (const Engine& engine : engines_)
    if (engine.workspace && (!engine.only_by_name || engine.name == setting(Setting::kEngine)))
      bytes = std::max(bytes, engine.workspace(p, size, d));
  return bytes;
}

uint64_t Plan::workspace_need(const tea_run* run, Direction d) const {
  const Geometry size = geometry(problem, run);
  if (!workspace || (d == Direction::kBackward && !problem.training)) return 0;
  return workspace(problem, size, d);
}

void Planner::limit(size_t capacity) { cache_->limit(capacity); }

tea_cache_info Planner::info() const {
  const std::lock_guard lock(cache_->mutex);
  return {sizeof(tea_cache_info), 0, cache_->hits, cache_->misses, cache_->recent.size(),
          cache_->capacity};
}

// Never destroyed, because at process exit the driver that owns the resources of its plans may
// already be gone, and other threads may still use the planner.
Planner& planner() {
  static Planner& instance = *new Planner(engines());
  return instance;
}

namespace {
Run imported(const Plan& plan, const tea_run* run, Direction d) {
  const Run out = import_run(plan.problem, plan.checks, run, d, plan.workspace);
  TEA_REQUIRE(plan.device.is_host() || !out.parallel_for, "run.parallel_for", "a function",
              "NULL: the plan is for a GPU");
  TEA_REQUIRE(plan.device.is_host() || !out.threads, "run.threads", out.threads,
              "0: the plan is for a GPU");
  TEA_REQUIRE(!out.accumulate || plan.executable->accumulates(d), "run.accumulate", out.accumulate,
              "0: tea_plan_accumulates() is 0 for this plan and direction");
  return out;
}
}  // namespace

void forward(const Plan& plan, const tea_run* run) {
  plan.executable->forward(imported(plan, run, Direction::kForward));
}

void backward(const Plan& plan, const tea_run* run) {
  TEA_REQUIRE(plan.problem.training, "problem.training", plan.problem.training,
              "1: the plan was not made for backward");
  plan.executable->backward(imported(plan, run, Direction::kBackward));
}

}  // namespace tea
