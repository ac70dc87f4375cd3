// OncePerDevice: each device once, and none for another.
#include <gtest/gtest.h>

#include <stdexcept>

#include "gpu/once.h"

namespace tea {
namespace {

int runs(OncePerDevice& once, int device) {
  int count = 0;
  for (int i = 0; i < 2; ++i) once.run(device, [&] { ++count; });
  return count;
}

TEST(OncePerDevice, RunsOnceForEachDevice) {
  OncePerDevice once;
  for (const int device : {0, 63, 5}) EXPECT_EQ(runs(once, device), 1);
  EXPECT_EQ(runs(once, 0), 0);
}

TEST(OncePerDevice, DevicesBeyondItsBitsAreNotTakenForOthers) {
  OncePerDevice once;
  EXPECT_EQ(runs(once, 64), 2);
  EXPECT_EQ(runs(once, 0), 1);  // 64 & 63
  EXPECT_EQ(runs(once, 64), 2);
}

TEST(OncePerDevice, ForgetsWhatFailed) {
  OncePerDevice once;
  EXPECT_THROW(once.run(3, [] { throw std::runtime_error("refused"); }), std::runtime_error);
  EXPECT_EQ(runs(once, 3), 1);
}

}  // namespace
}  // namespace tea
