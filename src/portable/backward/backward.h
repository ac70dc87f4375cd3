// The backward pass on any GPU from sm_80 on.
#pragma once
#include "core/device.h"
#include "core/tensors.h"

namespace tea::portable {

// Bytes of run.workspace that backward() may need on any device.
uint64_t backward_workspace(const Problem& problem, const Geometry& size);

// Launches on run.stream of the current device, and allocates nothing. Throws Error:
// TEA_UNSUPPORTED before any launch if a size of the run exceeds limits.h, TEA_FAILED if CUDA
// returns an error.
void backward(const Problem& problem, const Device& device, const Run& run);

}  // namespace tea::portable
