// The launchers of the forward kernels.
#pragma once
#include <cuda_runtime.h>

#include "portable/forward/config.h"
#include "portable/forward/params.h"

namespace tea::portable {

// Launches a kernel on `ctas` CTAs. Sets params.first_cta: a problem that exceeds the longest grid
// takes several launches.
using Launcher = void (*)(KernelParams& params, int64_t ctas, cudaStream_t stream);

// Each variant is instantiated in a source file of instances/, so that they compile in parallel.
template <Variant kVariant>
Launcher find_launcher(int tile);

// Adds the results of the splits of every row and writes O and the row statistics.
void combine_splits(KernelParams& params, cudaStream_t stream);

}  // namespace tea::portable
