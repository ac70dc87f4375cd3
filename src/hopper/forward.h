// The forward pass on sm_90a: what a launch needs, and which row of the table of kernels serves it.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "hopper/device/ptx.cuh"
#include "math/mask.h"

namespace tea::hopper {

// A tensor of three indices and, except for the LSE, a contiguous head dimension. Strides in
// elements, any order, zero allowed for what is broadcast.
struct Strided {
  void* data;
  int64_t batch, head, row;
};

// o = softmax(scale q k^T + mask) v, and lse = the natural logarithm of the sum of exponentials,
// in fp32. Shapes: q [batch, heads, rows_q, dim], k [batch, heads_kv, rows_kv, dim], v likewise
// with dim_v, o as q with dim_v, lse [batch, heads, rows_q]; heads is a multiple of heads_kv.
// Rows with nothing to attend give o = 0, lse = -infinity. Keys that no row attends are not read.
struct Forward {
  Strided q, k, v, o, lse;
  Band band;     // column minus row of what is visible: see math/mask.h
  int* counter;  // one word of device memory for the scheduler, needed where the band is bounded
  Type type;     // of q, k, v and o: kBf16 or kFp16
  int32_t batch, heads, heads_kv, rows_q, rows_kv, dim, dim_v;
  float scale;  // positive
};

// The row of the table of kernels that serves these head dimensions, or -1. Dimensions between rows
// are filled up with zeros by the copy engine.
int forward_row(int dim, int dim_v);

// A code, and the call of CUDA that gave it or the reason for which the arguments were refused.
struct Outcome {
  cudaError_t code;
  const char* what;
};

// Launches, and allocates nothing. cudaErrorInvalidValue if no row serves it, or if the copy engine
// cannot address a tensor: pointers and strides are multiples of 16 bytes, strides below 2^40.
Outcome forward(const Forward& f, cudaStream_t stream);

}  // namespace tea::hopper
