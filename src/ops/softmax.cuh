// Common parts of the kernels for softmax over rows of scores.
#pragma once
#include "ops/softmax.h"

namespace tea {

inline constexpr int kWarp = 32;
inline constexpr int kSums = 4;  // independent accumulators

// Propagates NaN, otherwise the rule for masked rows could drop it.
struct Largest {
  __device__ float operator()(float a, float b) const {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
  }
  __device__ double operator()(double a, double b) const { return b <= a || a != a ? a : b; }
};
struct Plus {
  template <class Real>
  __device__ Real operator()(Real a, Real b) const {
    return a + b;
  }
};

// exp of a difference that is at most 0. The error is that of the product; results that underflow
// below 2^-126 are negligible relative to it.
__device__ __forceinline__ float exponential(float x) {
  constexpr float kLog2E = 1.44269504f;
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
  return y;
}
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// Softmax of long causal rows, from sm_90 on; returns whether it ran. It needs 16-byte alignment
// and rows of at most 32 KiB.
bool long_softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place);
bool long_softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place);

}  // namespace tea
