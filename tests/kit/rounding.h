// The number types by what rounding to them does, without a word on how they are stored.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

namespace tea::oracle {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The rounding error of a type: relative to a value, at least, and where the type ends.
struct Rounding {
  double unit = 0;   // half the distance from 1 to the next value
  double floor = 0;  // half the smallest subnormal
  double largest = kInfinity;
  bool saturates = false;  // beyond `largest`: true: clips; false: overflows to infinity
  bool operator==(const Rounding&) const = default;
};

enum class Type { kExact, kFp16, kBf16, kFp32, kFp64, kE4m3, kE5m2 };

inline Rounding rounding(Type type) {
  static constexpr Rounding kTypes[] = {{},
                                        {0x1p-11, 0x1p-25, 65504, false},
                                        {0x1p-8, 0x1p-134, 0x1.FEp127, false},
                                        {0x1p-24, 0x1p-150, FLT_MAX, false},
                                        {0x1p-53, 0x1p-1074, DBL_MAX, false},
                                        {0x1p-4, 0x1p-10, 448, true},
                                        {0x1p-3, 0x1p-17, 57344, true}};
  return kTypes[static_cast<int>(type)];
}

// Round to nearest, ties to even.
inline double nearest(double x, const Rounding& r) {
  if (std::isnan(x) || r.unit == 0) return x;
  const double clipped = std::clamp(x, -2 * r.largest, 2 * r.largest);
  const double step = std::max(std::ldexp(2 * r.unit, std::ilogb(clipped)), 2 * r.floor);
  const double rounded = std::nearbyint(clipped / step) * step;
  if (std::abs(rounded) <= r.largest) return rounded;
  return std::copysign(r.saturates ? r.largest : kInfinity, x);
}

}  // namespace tea::oracle
