// The reference engine: attention and its gradients in double, one row at a time, written to be
// read as the definition. It accepts every valid problem.
#pragma once
#include "core/engine.h"

namespace tea::cpu {

Attempt plan_reference(const Problem& problem, const Device& device);

// The fields of a Problem that the engine supports.
std::span<const Known> known_fields();

inline constexpr Engine kReference{"reference", known_fields, plan_reference};

}  // namespace tea::cpu
