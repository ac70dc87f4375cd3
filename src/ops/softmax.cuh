// What the kernels of softmax over rows of scores have in common.
#pragma once
#include "ops/softmax.h"

namespace tea {

inline constexpr int kWarp = 32;
inline constexpr int kSums = 4;  // additions to so many need not wait for each other

// NaN wins, or a masked row could hide it.
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

// exp of a difference that is at most 0: its error is that of the product, relative to which what
// vanishes below 2^-126 is nothing.
__device__ __forceinline__ float exponential(float x) {
  constexpr float kLog2E = 1.44269504f;
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
  return y;
}
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// Rows that see only their beginning and are many bytes long, from sm_90 on; whether it ran. What
// there is lies on multiples of 16 bytes, a row in at most 32 KiB.
bool long_softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place);
bool long_softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place);

}  // namespace tea
