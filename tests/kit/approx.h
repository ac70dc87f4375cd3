// Arithmetic with errors, to first order: how far an engine that computes a value in lower
// precision may be off.
#pragma once
#include <algorithm>
#include <cmath>

#include "kit/rounding.h"

#if defined(__CUDACC__)
#define TEA_BOTH __host__ __device__ inline
#else
#define TEA_BOTH inline
#endif

namespace tea::oracle {

struct Approx {
  double value = 0, error = 0;
};

// The error of exp(x) if x is off by `error`. Kept finite: beyond that the number is unknown
// anyway, and 0 * infinity would invalidate the bounds of adjacent elements.
TEA_BOTH double exp_error(double x, double error) {
  return error < 1 ? std::exp(x) * std::expm1(error) : std::exp(std::min(x + error, 300.0));
}

// The largest of several values known up to an error. A NaN is passed over, as fmax does; since an
// engine may also let it through, the maximum is then unknown.
struct Peak {
  double value, low = value, high = value;
  TEA_BOTH void add(Approx a) {
    value = std::max(value, a.value);
    low = std::max(low, a.value - a.error);
    high = std::isnan(a.value) ? kInfinity : std::max(high, a.value + a.error);
  }
  TEA_BOTH double error() const { return high == low ? 0 : std::max(high - value, value - low); }
};

// The error of `cast`, which is a * scale rounded to the type: the cast may fall on either side of
// a rounding boundary that lies within the error of `a`. kExact: `cast` is `a` itself.
inline double cast_error(Approx a, double cast, Type fp8, double scale) {
  if (fp8 == Type::kExact) return a.error;
  const Rounding r = rounding(fp8);
  return std::max(nearest((a.value + a.error) * scale, r) - cast,
                  cast - nearest((a.value - a.error) * scale, r));
}

// Of sum += a * x, where adding costs `roundings` of relative error, and any operand or partial sum
// below `least` may count as zero: for an operand known up to an error, `least` more than that.
inline void add_error(Approx a, double roundings, const double* x, int64_t n, double least,
                      double* bound) {
  const double size = std::abs(a.value);
  const double flushed = size - a.error < least ? std::min(size, least) : 0;
  const double error = a.error + roundings * size + flushed;
  for (int64_t d = 0; d < n; ++d) bound[d] += error * std::abs(x[d]);
  if (least == 0) return;
  for (int64_t d = 0; d < n; ++d) {
    if (std::abs(x[d]) < least) bound[d] += size * std::abs(x[d]);
    if (size != 0 && x[d] != 0) bound[d] += least;
  }
}

}  // namespace tea::oracle
