// kit/both.h: when a result of a GPU is the host's, and what is compared even where results may
// differ. Two sides on the host stand for the two places.
#include <gtest/gtest.h>

#include <limits>

#include "kit/both.h"

namespace tea::kit {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(CloseEnough, CountsRoundings) {
  EXPECT_TRUE(close_enough(TEA_BF16, {}, 1, 1));
  EXPECT_FALSE(close_enough(TEA_BF16, {}, 1, 1 + 0x1p-7));
  EXPECT_TRUE(close_enough(TEA_BF16, {2}, 1, 1 + 0x1p-7));
  EXPECT_FALSE(close_enough(TEA_BF16, {2}, 1, 1 + 0x1p-6));
  EXPECT_TRUE(close_enough(TEA_BF16, {2, 1}, 1, 1 + 0x1p-6));
}

TEST(CloseEnough, AnInfiniteNumberIsCloseToItselfOnly) {
  for (const double sign : {1.0, -1.0}) {
    EXPECT_TRUE(close_enough(TEA_FP32, {4, 1}, sign * kInf, sign * kInf));
    for (const double other : {0.0, 3e38, -sign * kInf, kNan}) {
      EXPECT_FALSE(close_enough(TEA_FP32, {4, 1}, sign * kInf, other)) << other;
      EXPECT_FALSE(close_enough(TEA_FP32, {4, 1}, other, sign * kInf)) << other;
    }
  }
  EXPECT_TRUE(close_enough(TEA_FP32, {}, kNan, -kNan));
  EXPECT_FALSE(close_enough(TEA_FP32, {4, 1}, kNan, 1));
}

TEST(Side, FindsADifferentElement) {
  Side one(nullptr, 1), other(nullptr, 1);
  auto* const a = static_cast<float*>(one.normal(TEA_FP32, 5));
  auto* const b = static_cast<float*>(other.normal(TEA_FP32, 5));
  EXPECT_EQ(a[3], b[3]);
  b[3] += 1;
  EXPECT_EQ(one.difference(other).find("tensor 0, fp32 element 3 of 5: "), 0u);
}

TEST(Side, FindsADamagedRedzone) {
  Side one(nullptr, 1), other(nullptr, 1);
  one.normal(TEA_FP32, 5);
  static_cast<float*>(other.normal(TEA_FP32, 5))[5] = 0;
  EXPECT_NE(one.difference(other).find("of a redzone"), std::string::npos);
}

TEST(Side, TheStatusCountsEvenWhereResultsMayDiffer) {
  for (const int32_t second : {0, 1}) {
    Side one(nullptr, 1), other(nullptr, 1);
    for (Side* side : {&one, &other}) side->do_not_compare();
    *static_cast<float*>(one.fresh(TEA_FP32, 1)) = 1;
    *static_cast<float*>(other.fresh(TEA_FP32, 1)) = 2;
    *one.status() = 0;
    *other.status() = second;
    EXPECT_EQ(one.difference(other), second ? "tensor 1: numbers differ" : "");
  }
}

}  // namespace
}  // namespace tea::kit
