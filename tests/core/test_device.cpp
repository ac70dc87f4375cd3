// device_at: which devices this build has.
#include <gtest/gtest.h>

#include "core/device.h"
#include "core/error.h"

namespace tea {
namespace {

TEST(Device, MinusOneIsTheHost) {
  EXPECT_TRUE(device_at(kHost).is_host());
  EXPECT_EQ(device_at(kHost).sm, 0);
}

TEST(Device, OthersAreRefusedWithTheIndex) {
  for (const int index : {-2, 4096}) try {
      device_at(index);
      FAIL() << index;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("device is " + shown(index) + "; needs -1"),
                std::string::npos)
          << e.what();
    }
}

}  // namespace
}  // namespace tea
