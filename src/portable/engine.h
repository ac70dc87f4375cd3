// The engine for any GPU from sm_80 on: tiled attention on tensor cores, forward and backward, with
// every option, in memory linear in the sequence lengths. It accepts every valid problem except for
// double precision and sizes that exceed backward/limits.h.
#pragma once
#include "core/engine.h"

namespace tea::portable {

Attempt plan_portable(const Problem& problem, const Device& device);
uint64_t workspace(const Problem& problem, const Geometry& size, Direction direction);

constexpr uint32_t kDtypes = below(7) & ~(1u << TEA_FP64);

// The fields of a Problem that the engine supports, with their values.
std::span<const Known> known_fields();

inline constexpr Engine kPortable{"portable", known_fields, plan_portable, workspace};

}  // namespace tea::portable
