// SplitMix64 (Steele, Lea and Flood, 2014): a stream of numbers per (seed, stream), the same on
// every machine and in every thread.
#pragma once
#include <cmath>
#include <cstdint>
#include <numbers>

namespace tea::kit {

class Random {
 public:
  explicit Random(uint64_t seed, uint64_t stream = 0)
      : state_(seed * 0x9E3779B97F4A7C15u + stream * 0xD1B54A32D192ED03u) {
    next();
  }
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In [0, n).
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }
  double normal() {
    return std::sqrt(-2 * std::log(uniform())) * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace tea::kit
