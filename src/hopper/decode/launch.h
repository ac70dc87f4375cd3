// The launchers of the decoding kernels, one for each configuration and type, which chooses among
// its kernels. Each type is instantiated in a source file of its own (instances/), so that they
// compile in parallel.
#pragma once
#include <cuda_runtime.h>

#include "hopper/decode/decode.h"
#include "hopper/decode/params.cuh"
#include "hopper/forward/launch.h"

namespace tea::hopper::decode {

using Launcher = Outcome (*)(const KernelParams& params, cudaStream_t stream);

template <Type kType>
Launcher find_launcher(bool has_fp8_kv, int tile);

namespace mla {

template <Type kType>
Outcome launch(const KernelParams& params, cudaStream_t stream);

}  // namespace mla

}  // namespace tea::hopper::decode
