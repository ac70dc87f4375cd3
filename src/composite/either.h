// An engine whose plan runs each pass of a run on one of two engines.
#pragma once
#include <string>
#include <utility>

#include "core/engine.h"

namespace tea::composite {

using Choice = bool (*)(const Problem& problem, const Run& run, Direction direction);

struct Either final : Executable {
  Problem problem;
  std::unique_ptr<Executable> first, second;
  Choice takes_first;

  Either(const Problem& p, std::unique_ptr<Executable> a, std::unique_ptr<Executable> b, Choice c)
      : problem(p), first(std::move(a)), second(std::move(b)), takes_first(c) {
    yields = first->yields;
  }
  // Runs with `accumulate` are for the first engine, if it can.
  bool accumulates(Direction direction) const override { return first->accumulates(direction); }
  void forward(const Run& run) const override { of(run, Direction::kForward).forward(run); }
  void backward(const Run& run) const override { of(run, Direction::kBackward).backward(run); }

 private:
  const Executable& of(const Run& run, Direction direction) const {
    return run.accumulate || takes_first(problem, run, direction) ? *first : *second;
  }
};

// `first` has accepted. what: the part of the work that `second` does, as "backward is".
inline Attempt either(const Problem& problem, const Device& device, Attempt first, const char* what,
                      const Engine& second, Choice takes_first) {
  Attempt other = second.attempt(problem, device);
  if (const auto* refusal = std::get_if<Refusal>(&other))
    return Refusal{std::string(what) + " by " + std::string(second.name) +
                   ", which refuses: " + refusal->why};
  return std::make_unique<Either>(problem, std::move(std::get<1>(first)),
                                  std::move(std::get<1>(other)), takes_first);
}

}  // namespace tea::composite
