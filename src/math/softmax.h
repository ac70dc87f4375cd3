// Sums of exponentials in log space.
#pragma once
#include <cmath>

#include "math/host_device.h"

namespace tea {

// log(exp(a) + exp(b)); -infinity stands for an empty sum.
TEA_HOST_DEVICE double log_add(double a, double b) {
  if (a == -INFINITY) return b;
  if (b == -INFINITY) return a;
  const double high = fmax(a, b);
  return high + log(exp(a - high) + exp(b - high));
}

}  // namespace tea
