// Division of indices, short and long.
#include <gtest/gtest.h>

#include "math/divide.h"

namespace tea {
namespace {

TEST(Divide, AsTheOperatorDoes) {
  const int64_t numbers[] = {1, 2, 3, 7, 0xFFFFFFFF, int64_t{1} << 32, (int64_t{1} << 40) + 5};
  for (int64_t a : numbers)
    for (int64_t b : numbers) EXPECT_EQ(quotient(a, b), a / b) << a << " / " << b;
  EXPECT_EQ(quotient(0, 3), 0);
}

}  // namespace
}  // namespace tea
