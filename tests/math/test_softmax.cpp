// Sums of exponentials in log space, at the ends of the range too.
#include <gtest/gtest.h>

#include "math/softmax.h"

namespace tea {
namespace {

constexpr double kMinusInfinity = -INFINITY;

TEST(Softmax, LogAddInTheMiddle) {
  EXPECT_DOUBLE_EQ(log_add(1.0, 2.0), std::log(std::exp(1) + std::exp(2)));
  EXPECT_DOUBLE_EQ(log_add(1000.0, 1000.0), 1000 + std::log(2));
  EXPECT_DOUBLE_EQ(log_add(-1000.0, 3.0), 3);
}

TEST(Softmax, LogAddAtTheEnds) {
  EXPECT_EQ(log_add(kMinusInfinity, kMinusInfinity), kMinusInfinity);
  EXPECT_EQ(log_add(kMinusInfinity, -3.0), -3);
  EXPECT_EQ(log_add(-3.0, kMinusInfinity), -3);
  for (double other : {1.0, kMinusInfinity}) {
    EXPECT_TRUE(std::isnan(log_add(double{NAN}, other)));
    EXPECT_TRUE(std::isnan(log_add(other, double{NAN})));
  }
}

}  // namespace
}  // namespace tea
