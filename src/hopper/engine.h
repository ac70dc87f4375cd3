// The engine for GPUs of compute capability 9.0: the forward pass for 16-bit types, without paged
// KV and FP8. Another engine runs the backward pass of plans for training.
#pragma once
#include "core/engine.h"

namespace tea::hopper {

// The Executable does forward only. Of what the problem says of gradients nothing is used.
Attempt plan(const Problem& problem, const Device& device);
// Of forward.
uint64_t workspace(const Problem& problem, const Geometry& size);

// The fields of a Problem that it understands.
std::span<const Known> known_fields();

}  // namespace tea::hopper
