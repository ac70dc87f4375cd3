// The forward pass on any GPU from sm_80 on.
#pragma once
#include "gpu/arguments.h"

namespace tea::portable {

// Bytes of workspace, for the results of splits where keys are split because queries are few.
uint64_t forward_workspace(const Problem& problem, const Geometry& size);

// Launches on run.stream of the current device, and allocates nothing. Throws Error(TEA_FAILED) if
// CUDA returns an error.
void forward(const Problem& problem, const Run& run);

}  // namespace tea::portable
