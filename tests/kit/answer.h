// The answer of an engine to a problem before a run: no device is needed for it.
#pragma once
#include <string>
#include <variant>

#include "core/engine.h"
#include "core/problem.h"

namespace tea::kit {

inline constexpr Device kH200{0, 90, 132, 227 * 1024};

// The reason for a refusal, or "accepts".
inline std::string answer(const Engine& engine, const std::string& text,
                          const Device& device = kH200) {
  const Problem p = Problem::parse(text);
  p.check();
  const Attempt attempt = engine.attempt(p.normalised(), device);
  const auto* refusal = std::get_if<Refusal>(&attempt);
  return refusal ? refusal->why : "accepts";
}

}  // namespace tea::kit
