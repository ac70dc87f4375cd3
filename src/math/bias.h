// Score modifications: ALiBi (Press et al., 2021) and the soft cap.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/host_device.h"

namespace tea {

// The published slopes: with n the largest power of two not above `heads`, the first n heads take
// 2^(-8(i+1)/n), the rest the odd multiples of half that exponent step.
TEA_HOST_DEVICE double alibi_slope(int64_t head, int64_t heads) {
  int64_t n = 1;
  while (n * 2 <= heads) n *= 2;
  const double step = head < n
                          ? -8.0 * static_cast<double>(head + 1) / static_cast<double>(n)
                          : -4.0 * static_cast<double>(2 * (head - n) + 1) / static_cast<double>(n);
  return exp2(step);
}

// |row + delta - column| without the slope; rows and columns global.
TEA_HOST_DEVICE int64_t alibi_distance(int64_t row, int64_t delta, int64_t col) {
  const int64_t d = row + delta - col;
  return d < 0 ? -d : d;
}

template <class Real>
TEA_HOST_DEVICE Real softcap(Real score, Real cap) {
  return cap * tanh(score / cap);
}

// d softcap / d score, given the capped value.
template <class Real>
TEA_HOST_DEVICE Real softcap_slope(Real capped, Real cap) {
  const Real t = capped / cap;
  return Real(1) - t * t;
}

}  // namespace tea
