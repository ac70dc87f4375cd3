// The forward pass on sm_90a. No CUDA header is included here, so that the engine can be compiled
// without nvcc.
#pragma once
#include "gpu/arguments.h"

namespace tea::hopper {

// Longer sequences are refused, so that rows and keys can be counted in 32 bits.
inline constexpr int kMaxSeqlen = 1 << 30;

// The size of the tile counter (device/tile_counter.cuh), which is in args.workspace where
// needs_tile_counter(). No other launch may use that memory at the same time; its contents do not
// matter.
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
Outcome forward(const AttentionArguments& args, void* stream);

}  // namespace tea::hopper
