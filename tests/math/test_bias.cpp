// bias.h: the published ALiBi slopes, its distance, the soft cap and its slope.
#include <gtest/gtest.h>

#include "math/bias.h"

namespace tea {
namespace {

TEST(Alibi, PowersOfTwoAreAGeometricSequence) {
  for (int64_t h = 0; h < 8; ++h)
    EXPECT_DOUBLE_EQ(alibi_slope(h, 8), std::pow(0.5, static_cast<double>(h + 1)));
  EXPECT_DOUBLE_EQ(alibi_slope(0, 1), 1.0 / 256);
  EXPECT_DOUBLE_EQ(alibi_slope(15, 16), 1.0 / 256);
}

TEST(Alibi, OtherCountsAddTheOddHalfSteps) {
  // 12 heads: the eight slopes of 8 heads, then 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5.
  for (int64_t h = 0; h < 8; ++h) EXPECT_DOUBLE_EQ(alibi_slope(h, 12), alibi_slope(h, 8));
  for (int64_t h = 8; h < 12; ++h)
    EXPECT_DOUBLE_EQ(alibi_slope(h, 12), std::pow(2, -0.5 - static_cast<double>(h - 8)));
}

TEST(Alibi, DistanceIsFromTheDiagonal) {
  EXPECT_EQ(alibi_distance(3, 0, 3), 0);
  EXPECT_EQ(alibi_distance(3, 0, 1), 2);
  EXPECT_EQ(alibi_distance(3, 2, 9), 4);
}

TEST(Softcap, BoundsTheScoreAndHasItsSlope) {
  EXPECT_NEAR(softcap(1000.0, 30.0), 30, 1e-12);
  EXPECT_NEAR(softcap(1e-3, 30.0), 1e-3, 1e-9);
  for (double x : {-50.0, -1.0, 0.0, 2.0, 40.0}) {
    const double e = 1e-6, slope = (softcap(x + e, 30.0) - softcap(x - e, 30.0)) / (2 * e);
    EXPECT_NEAR(softcap_slope(softcap(x, 30.0), 30.0), slope, 1e-8);
  }
}

}  // namespace
}  // namespace tea
