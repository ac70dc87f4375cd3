// The backward pass on any GPU from sm_80 on: which kernels run, in what order, with what memory.
#pragma once
#include "core/device.h"
#include "core/tensors.h"

namespace tea::portable {

// Bytes of run.workspace that backward() may need on any device.
uint64_t backward_workspace(const Problem& problem, const Geometry& size);

// Launches on run.stream of the current device, and allocates nothing. Throws Error:
// TEA_UNSUPPORTED before any launch where a size of the run is beyond limits.h, TEA_FAILED where
// CUDA refuses.
void backward(const Problem& problem, const Device& device, const Run& run);

}  // namespace tea::portable
