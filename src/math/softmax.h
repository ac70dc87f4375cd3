// Sums of exponentials in log space.
#pragma once
#include <cmath>

#include "math/host_device.h"

namespace tea {

// log(exp(a) + exp(b)) without overflow; -infinity is an empty sum, NaN stays NaN.
template <class Real>
TEA_HOST_DEVICE Real log_add(Real a, Real b) {
  const Real high = a > b ? a : b, low = a > b ? b : a;
  if (low == -INFINITY) return high;
  return high + log1p(exp(low - high));
}

}  // namespace tea
