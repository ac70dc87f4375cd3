// Division by an invariant integer without a division instruction.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace tea {

// A positive divisor prepared on the host for dividends in [0, 2^31) (Granlund and Montgomery,
// 1994; CUTLASS: FastDivmod). A division takes 25 instructions, which delay the first tile of a
// launch while the instruction cache is still cold.
struct FastDivisor {
  int value;
  uint32_t factor;
  int shift;

  FastDivisor() = default;
  TEA_HOST_DEVICE explicit FastDivisor(int divisor) : value(divisor), shift(0) {
    while (int64_t{1} << shift < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - static_cast<uint64_t>(divisor);
    factor = static_cast<uint32_t>((excess << 32) / static_cast<uint64_t>(divisor) + 1);
  }
  TEA_HOST_DEVICE operator int() const { return value; }
  friend TEA_HOST_DEVICE int operator/(int n, const FastDivisor& d) {
    const uint64_t product = uint64_t{d.factor} * static_cast<uint32_t>(n);
    return static_cast<int>((static_cast<uint32_t>(product >> 32) + n) >> d.shift);
  }
  friend TEA_HOST_DEVICE int operator%(int n, const FastDivisor& d) { return n - n / d * d.value; }
};

}  // namespace tea
