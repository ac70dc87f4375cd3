// Encodes tensor maps on the host. The driver's function is looked up at run time, so that nothing
// links libcuda.
#pragma once
#include <cstdint>

#include "hopper/device/swizzle.cuh"
#include "hopper/device/tma.cuh"

namespace tea::hopper {

// Dimensions are listed innermost first, and the innermost is contiguous. Strides are in bytes,
// multiples of 16 below 2^40, in any order. The box is what one TMA instruction copies: at most 256
// elements in each dimension, and at most the swizzle's width in bytes in the innermost.
struct MapShape {
  Type type;
  Swizzle swizzle;
  int rank;
  uint64_t extent[5];
  uint64_t stride[5];  // of dimension i, i >= 1
  uint32_t box[5];
};

// Returns the driver's code, 0 for success. `base` must be a multiple of 16, and no extent may be
// 0.
int encode(TensorMap* map, const void* base, const MapShape& shape);

}  // namespace tea::hopper
