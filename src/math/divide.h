// Division of indices.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace tea {

// a / b for a >= 0, b > 0. GPUs divide 64 bits far slower than 32 bits, which fit most indices.
TEA_HOST_DEVICE int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

}  // namespace tea
