// Softmax over rows of scores in memory, and its gradient.
#pragma once
#include "ops/args.h"

namespace tea {

void scaled_softmax_forward(const tea_scaled_softmax& args, const Place& place);
void scaled_softmax_backward(const tea_scaled_softmax& args, const Place& place);

// The value of a masked score, as the interface defines it.
inline constexpr double kMaskedScore = -10000;

// The number n of visible columns [0, n) of a row.
TEA_HOST_DEVICE int64_t visible_count(const tea_scaled_softmax& a, int64_t row) {
  int64_t n = a.cols;
  if (a.kind == TEA_SCORE_MASK_CAUSAL) n = row + 1;
  if (a.kind == TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT) n = row + 1 + a.cols - a.rows;
  return n < 0 ? 0 : n < a.cols ? n : a.cols;
}

// The mask bytes of row `row` of matrix `matrix` (over batch and heads), or NULL.
TEA_HOST_DEVICE const uint8_t* mask_row(const tea_scaled_softmax& a, int64_t matrix, int64_t row) {
  if (!a.mask) return nullptr;
  const int64_t b = a.mask_batch == 1 ? 0 : quotient(matrix, a.heads);
  return a.mask + (b * a.rows + row) * a.cols;
}

// `scale`: rounded to the dtype.
void softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place);
void softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place);

}  // namespace tea
