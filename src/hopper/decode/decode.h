// Decoding on sm_90a: forward without gradients, few queries of each sequence. No CUDA header is
// included here, so that the engine can be compiled without nvcc.
#pragma once
#include "hopper/forward/forward.h"

namespace tea::hopper::decode {

// Why the kernels do not serve the arguments; empty if they do.
std::string limit(const AttentionArguments& args);

// The bytes of args.workspace. They never decrease with a size, also where the kernels do not serve
// `args` but would serve fewer queries.
uint64_t workspace_bytes(const AttentionArguments& args);

// Launches on a CUstream_st* of the device whose context is current, and allocates nothing. limit()
// is empty; pointers and strides are multiples of 16 bytes.
Outcome run(const AttentionArguments& args, void* stream);

}  // namespace tea::hopper::decode
