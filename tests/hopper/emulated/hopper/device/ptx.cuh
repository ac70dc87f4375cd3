// The PTX wrappers that the arithmetic of a kernel uses, for one thread on the host.
#pragma once
#include "gpu/ptx.cuh"
#include "hopper/device/types.h"

namespace tea::hopper {

inline float reciprocal_fast(float x) { return 1 / x; }
inline float min_nan(float x, float y) { return x != x || x < y ? x : y; }
inline uint32_t spread_sign_bits(uint32_t halves) {
  return (halves >> 31 ? 0xFFFF0000u : 0) | (halves >> 15 & 1 ? 0xFFFFu : 0);
}
inline void stmatrix_x4(uint32_t, const uint32_t (&)[4]) {}
template <Type kType>
uint32_t pack(float, float) {
  return 0;
}
template <Type kType>
uint32_t pack(float, float, float, float) {
  return 0;
}

}  // namespace tea::hopper
