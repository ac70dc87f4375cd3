// The forward pass on any GPU from sm_80 on.
#pragma once
#include "gpu/arguments.h"

namespace tea::portable {

// Bytes of workspace, for keys that are split where queries are few.
uint64_t forward_workspace(const Problem& problem, const Geometry& size);

// Launches on a CUstream_st* of the current device, and allocates nothing. Throws
// Error(TEA_FAILED) where CUDA refuses.
void forward(const Problem& problem, const Run& run);

}  // namespace tea::portable
