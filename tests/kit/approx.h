// Arithmetic with errors: a float64 value together with a bound of how far an engine that computes
// it in lower precision may be off, to first order.
#pragma once
#include <algorithm>
#include <cmath>

#include "kit/oracle.h"

#if defined(__CUDACC__)
#define TEA_BOTH __host__ __device__ inline
#else
#define TEA_BOTH inline
#endif

namespace tea::oracle {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Approx {
  double value = 0, error = 0;
};

// The error of exp(x) if x is off by `error`. Kept finite: beyond that the number is unknown
// anyway, and 0 * infinity would spoil the bounds of its neighbours.
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

// Round to nearest, ties to even.
inline double nearest(double x, const Rounding& r) {
  if (std::isnan(x) || r.unit == 0) return x;
  const double clipped = std::clamp(x, -2 * r.largest, 2 * r.largest);
  const double step = std::max(std::ldexp(2 * r.unit, std::ilogb(clipped)), 2 * r.floor);
  const double rounded = std::nearbyint(clipped / step) * step;
  if (std::abs(rounded) <= r.largest) return rounded;
  return std::copysign(r.saturates ? r.largest : kInfinity, x);
}

// `a` as an operand of the second product, in the scale in which it is stored. An FP8 cast may fall
// on either side of a rounding boundary that lies within the error. Whatever else the engine does
// to its operand (`engine`) is an error.
inline Approx operand(Approx a, Type fp8, double scale, const Rounding& engine) {
  const auto extra = [&engine](double x) { return engine.unit * std::abs(x) + engine.floor; };
  if (fp8 == Type::kExact) return {a.value, a.error + extra(a.value)};
  const Rounding r = rounding(fp8);
  const double value = nearest(a.value * scale, r);
  const double up = nearest((a.value + a.error) * scale, r) - value;
  const double down = value - nearest((a.value - a.error) * scale, r);
  return {value, std::max(up, down) + extra(value)};
}

// sum += a * x, where adding costs `roundings` of relative error, and any operand or partial sum
// below `least` may count as zero: for an operand known up to an error, `least` more than that.
inline void accumulate(Approx a, double roundings, const double* x, int64_t n, Tensor& sum,
                       int64_t at, double least) {
  const double size = std::abs(a.value);
  const double flushed = size - a.error < least ? std::min(size, least) : 0;
  const double error = a.error + roundings * size + flushed;
  double *value = &sum.value[at], *bound = &sum.bound[at];
  for (int64_t d = 0; d < n; ++d) {
    value[d] += a.value * x[d];
    bound[d] += error * std::abs(x[d]);
    if (std::abs(x[d]) < least) bound[d] += std::abs(a.value * x[d]);
    if (a.value != 0 && x[d] != 0) bound[d] += least;
  }
}

}  // namespace tea::oracle
