// The launchers of the backward kernels, one for each kernel that exists. Each type is instantiated
// in a source file of its own (instances/), so that they compile in parallel.
#pragma once
#include <cuda_runtime.h>

#include "hopper/backward/params.cuh"
#include "hopper/forward/launch.h"

namespace tea::hopper::backward {

// Encodes the tensor maps of *p and launches the kernel of a configuration.
template <int kTile, Type kType>
Outcome launch(KernelParams* p, cudaStream_t stream);

}  // namespace tea::hopper::backward
