// Tensor maps on the host: what a kernel's copy engine needs to know of a tensor in global memory.
// The driver encodes them; its entry is looked up at run time, so that nothing links libcuda.
#pragma once
#include <cstdint>

#include "hopper/device/swizzle.cuh"
#include "hopper/device/tma.cuh"

namespace tea::hopper {

// Dimensions innermost first; the innermost is contiguous. Strides in bytes, multiples of 16 below
// 2^40, in any order; box: elements that one load brings, at most 256 a dimension, and innermost at
// most the swizzle's bytes.
struct MapShape {
  Type type;
  Swizzle swizzle;
  int rank;
  uint64_t extent[5];
  uint64_t stride[5];  // of dimension i, i >= 1
  uint32_t box[5];
};

// Returns the driver's code, zero for success: base must be a multiple of 16, extents not zero.
int encode(TensorMap* map, const void* base, const MapShape& shape);

}  // namespace tea::hopper
