// The kernels of a backward run that work row by row: before its tiles, and the gradient of sinks.
#pragma once
#include <cuda_runtime_api.h>

#include "hopper/backward/params.cuh"

namespace tea::hopper::backward {

// Writes the row terms, zeroes the counters of the workspace and the gradients of rows and
// keys that take no part in attention, and reports invalid metadata. The kernel of the tiles may
// begin meanwhile (TermTasks).
Outcome launch_preprocess(const KernelParams& p, int tile, cudaStream_t stream);

// dsink, from the row terms.
Outcome launch_sink_gradient(const KernelParams& p, int tile, cudaStream_t stream);

}  // namespace tea::hopper::backward
