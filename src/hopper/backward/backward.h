// The backward pass on sm_90a. No CUDA header is included here, so that the engine can be compiled
// without nvcc.
#pragma once
#include <string>

#include "hopper/forward/forward.h"

namespace tea::hopper::backward {

// Why the kernels do not serve these arguments; empty if they do.
std::string limit(const AttentionArguments& args);

// Bytes of args.workspace, whose contents do not matter.
uint64_t workspace_bytes(const AttentionArguments& args);

// Launches on a CUstream_st* of the device whose context is current, and allocates nothing. Writes
// dQ, dK, dV and dsink where they are given, or with args.accumulate adds to dQ, dK and dV, which
// must be fp32; results are the same bits in every run. Pointers and strides must be multiples of
// 16 bytes, strides less than 2^40 bytes. The kernel that takes most of the time has a CTA per SM,
// but at most args.max_ctas: the results do not depend on it.
Outcome run(const AttentionArguments& args, void* stream);

}  // namespace tea::hopper::backward
