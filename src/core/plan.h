// Plan: an engine's answer, immutable and shared; and the bounded cache that holds the answers.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "core/engine.h"

namespace tea {

struct Plan {
  std::string_view engine;
  Problem problem;  // normalised
  Device device;
  std::unique_ptr<Executable> executable;
  // The need of the engine; a run may have a larger workspace.
  uint64_t (*workspace)(const Problem&, const Geometry&, Direction);
  Checks checks{problem};

  // The need of one run. `run` may be NULL if the problem specifies all sizes; 0 for a direction
  // that the problem does not have.
  uint64_t workspace_need(const tea_run* run, Direction d) const;
};
using PlanRef = std::shared_ptr<const Plan>;

// Plans for a table of engines. Thread-safe; a full cache evicts the least recently used plan.
class Planner {
 public:
  explicit Planner(std::span<const Engine> engines, size_t capacity = 4096);
  ~Planner();
  // Checks and normalises `problem`, and returns its plan. `only`: an engine's name, or empty.
  // Throws Error.
  PlanRef plan(const Problem& problem, int device, std::string_view only = {});
  // One line per engine: accepts, yields or refuses, with the reason. The last text is cached,
  // because callers call twice, for its size and for the text, and an engine's answer may be slow.
  std::string explain(const Problem& problem, int device) const;
  // The maximum workspace of all engines that can be selected automatically. `problem` is valid.
  uint64_t workspace_bound(const Problem& problem, const Geometry& size, Direction d) const;
  void limit(size_t capacity);
  tea_cache_info info() const;

 private:
  struct Cache;
  PlanRef make(const Problem& problem, const Device& device, std::string_view only) const;
  std::span<const Engine> engines_;
  std::unique_ptr<Cache> cache_;
};

// The planner of this build's engines.
Planner& planner();

void forward(const Plan& plan, const tea_run* run);
void backward(const Plan& plan, const tea_run* run);

}  // namespace tea
