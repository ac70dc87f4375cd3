// Lane and warp indices, reductions over a quad, and constants.
#pragma once
#include "gpu/ptx.cuh"

namespace tea {

inline constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

TEA_DEVICE int lane() { return static_cast<int>(threadIdx.x) % 32; }
TEA_DEVICE int warp() { return static_cast<int>(threadIdx.x) / 32; }

// Reductions over a quad: the four lanes that share a row of an mma accumulator.
TEA_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
TEA_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

}  // namespace tea
