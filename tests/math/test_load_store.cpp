// Loads and stores of one element, against the nearest value found by search among all codes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "math/load_store.h"

namespace tea {
namespace {

struct Small {
  int32_t dtype;
  int bits;
};
constexpr Small kSmall[] = {{TEA_FP16, 16}, {TEA_BF16, 16}, {TEA_E4M3, 8}, {TEA_E5M2, 8}};

// One element of any format.
struct Cell {
  alignas(8) unsigned char bytes[8] = {};
};

double decode(const Small& format, uint32_t code) {
  Cell cell;
  memcpy(cell.bytes, &code, sizeof code);
  return load_real(cell.bytes, format.dtype, 0);
}

uint32_t encode(const Small& format, double value) {
  Cell cell;
  store_real(cell.bytes, format.dtype, 0, value);
  uint32_t code;
  memcpy(&code, cell.bytes, sizeof code);
  return code;
}

// Codes are ordered by magnitude, so the two codes around x are found by bisection, and the even
// code wins a tie: this knows nothing about exponents or shifts.
uint32_t nearest(const Small& format, double magnitude) {
  uint32_t low = 0, high = (1u << (format.bits - 1)) - 1;
  while (!std::isfinite(decode(format, high))) --high;
  if (magnitude >= decode(format, high)) return high;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (decode(format, middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - decode(format, low), above = decode(format, high) - magnitude;
  if (below == above) return low & 1 ? high : low;
  return below < above ? low : high;
}

TEST(LoadStore, EveryCodeComesBack) {
  for (const Small& format : kSmall)
    for (uint32_t code = 0; code < 1u << format.bits; ++code) {
      const double value = decode(format, code);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(decode(format, encode(format, value))));
      } else if (std::isfinite(value)) {
        ASSERT_EQ(encode(format, value), code) << "dtype " << format.dtype;
      }
    }
}

TEST(LoadStore, RoundsOnceToNearestEven) {
  std::mt19937_64 random(7);
  for (const Small& format : kSmall) {
    const uint32_t codes = (1u << (format.bits - 1)) - (format.bits == 8 ? 10 : 3000);
    for (int i = 0; i < 20000; ++i) {
      const uint32_t code = static_cast<uint32_t>(random() % codes);
      const double low = decode(format, code), high = decode(format, code + 1);
      const double middle = (low + high) / 2;
      // Ties, and values so close to a tie that a detour through float would land on it.
      const double candidates[] = {middle,
                                   std::nextafter(middle, low),
                                   std::nextafter(middle, high),
                                   middle * (1 + 1e-10),
                                   middle * (1 - 1e-10),
                                   low + (high - low) * 0.3};
      for (double x : candidates) {
        ASSERT_EQ(encode(format, x), nearest(format, x)) << "dtype " << format.dtype << " " << x;
        ASSERT_EQ(decode(format, encode(format, -x)), -decode(format, nearest(format, x)));
      }
    }
  }
}

TEST(LoadStore, OverflowFollowsTheFormat) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (double huge : {1e300, infinity}) {
    EXPECT_EQ(decode(kSmall[0], encode(kSmall[0], huge)), infinity);
    EXPECT_EQ(decode(kSmall[1], encode(kSmall[1], -huge)), -infinity);
    EXPECT_EQ(decode(kSmall[2], encode(kSmall[2], huge)), 448);
    EXPECT_EQ(decode(kSmall[3], encode(kSmall[3], -huge)), -57344);
  }
  EXPECT_EQ(decode(kSmall[0], encode(kSmall[0], 65519.999)), 65504);
  EXPECT_EQ(decode(kSmall[0], encode(kSmall[0], 65520)), infinity);
}

TEST(LoadStore, TinyValuesKeepTheirSign) {
  for (const Small& format : kSmall) {
    const double zero = decode(format, encode(format, -1e-300));
    EXPECT_EQ(zero, 0);
    EXPECT_TRUE(std::signbit(zero));
  }
}

TEST(LoadStore, WideFormatsAndIndices) {
  std::vector<float> floats(3, -1);
  store_real(floats.data(), TEA_FP32, 2, 0.1);
  EXPECT_EQ(floats[2], 0.1f);
  EXPECT_EQ(floats[1], -1);
  EXPECT_EQ(load_real(floats.data(), TEA_FP32, 2), double{0.1f});
  std::vector<double> doubles(3, -1);
  store_real(doubles.data(), TEA_FP64, 1, 0.1);
  EXPECT_EQ(load_real(doubles.data(), TEA_FP64, 1), 0.1);
  EXPECT_EQ(doubles[2], -1);
  EXPECT_TRUE(std::isnan(load_real(doubles.data(), TEA_DTYPE_DEFAULT, 0)));
}

}  // namespace
}  // namespace tea
