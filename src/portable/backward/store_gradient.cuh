// Stores of gradients.
#pragma once
#include "portable/arguments.cuh"
#include "portable/device/load_store.cuh"

namespace tea::portable {

// The rows of a gradient, and the factors of its accumulator.
struct GradientOutput {
  const StridedTensor& rows;
  int64_t head_element;
  int begin, dim;  // head dimensions
  float factor;    // before the amax is recorded
  float scale;     // of FP8
  float* amax;
};

// Whether rows can be stored 16 bytes at a time after rounding to a 16-bit type.
template <int kDtype>
TEA_DEVICE bool is_stored_in_chunks(const StridedTensor& rows) {
  return rows.dtype == kDtype && rows.is_vectorizable;
}

// Stores kRows x kWidth sums in shared memory to rows of type `dtype` from `first` on, of which the
// tensor has `count`; rows that are not in `valid` are zero.
template <int kRows, int kWidth, int kThreads>
TEA_DEVICE void store_gradient(const float (*sums)[kWidth], const GradientOutput& to, int32_t dtype,
                               int first, int64_t count, const Columns& valid) {
  float amax = 0;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kRows * kWidth; n += kThreads) {
    const int row = first + n / kWidth, column = to.begin + n % kWidth;
    if (row >= count || column >= to.dim) continue;
    const bool is_valid = row >= valid.begin && row < valid.end;
    const float value = is_valid ? sums[n / kWidth][n % kWidth] * to.factor : 0.0f;
    amax = fmaxf(amax, fabsf(value));
    store_float(to.rows.data, dtype, to.head_element + row * to.rows.seq + column,
                value * to.scale);
  }
  update_amax_by_warp(to.amax, amax);
}

}  // namespace tea::portable
