// The launches of a backward pass. Each function launches on the stream and returns.
#pragma once
#include <cuda_runtime.h>

#include "portable/backward/params.h"

namespace tea::portable {

// preprocess.cu: LSE and delta of every row, and zero sums of dQ.
void launch_preprocess(const BackwardArguments& work, cudaStream_t stream);

// kernel.cuh: dK and dV, and the sums of dQ if work.buffers.dq; with configuration `tile` of
// kBackwardTiles, which says whether it is general. Each has a source file of instances/.
void launch_plain_main(int tile, const BackwardArguments& work, cudaStream_t stream);
void launch_general_main(int tile, const BackwardArguments& work, cudaStream_t stream);

// postprocess.cu: dQ from its sums.
void launch_postprocess(const BackwardArguments& work, cudaStream_t stream);

// dq_kernel.cu: dQ without atomics, with configuration `tile` of kDqTiles.
void launch_dq(int tile, const BackwardArguments& work, cudaStream_t stream);

// piecewise.cu: in pieces of the head dimensions, so that any dimension fits, without atomics.
void launch_piecewise_dkv(const BackwardArguments& work, cudaStream_t stream);
void launch_piecewise_dq(const BackwardArguments& work, cudaStream_t stream);
void launch_piecewise_dbias(const BackwardArguments& work, cudaStream_t stream);

// dsink.cu: the gradient of the sinks.
void launch_dsink(const BackwardArguments& work, cudaStream_t stream);

}  // namespace tea::portable
