// The forward pass on sm_90a. No CUDA header is included here, so that the engine can be compiled
// without nvcc.
#pragma once
#include "hopper/forward/arguments.h"

namespace tea::hopper {

// The tile counter of needs_tile_counter() is this many bytes of device memory at a multiple of 8,
// which no other launch uses at the same time. Its contents do not matter.
inline constexpr int kTileCounterBytes = 16;

// The result of a launch: a cudaError_t, its text, and the CUDA call that returned it or the
// argument that was refused.
struct Outcome {
  int code;  // 0: success
  const char *what, *text;
};

// Launches on a CUstream_st* of the device whose context is current, and allocates nothing. Fails
// without a launch if no configuration serves the problem, or if TMA cannot address a tensor:
// pointers and strides must be multiples of 16 bytes, strides less than 2^40 bytes.
Outcome forward(const ForwardArguments& args, void* stream);

}  // namespace tea::hopper
