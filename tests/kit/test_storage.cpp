// The redzones detect a byte written on either side, also of empty memory.
#include <gtest/gtest.h>

#include "kit/storage.h"

namespace tea::kit {
namespace {

TEST(Storage, NoticesEveryByteOutside) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100}}) {
    const auto end = static_cast<int64_t>(bytes);
    for (const int64_t at : {int64_t{-4096}, int64_t{-1}, end, end + 4095}) {
      Storage storage(bytes, 16);
      EXPECT_FALSE(storage.damage().has_value());
      storage.data()[at] ^= 1;
      EXPECT_EQ(storage.damage(), at) << bytes;
    }
  }
}

TEST(Storage, LeavesTheInsideAlone) {
  Storage storage(64, 16);
  std::memset(storage.data(), 0, storage.size());
  EXPECT_FALSE(storage.damage().has_value());
}

TEST(Storage, IsAlignedAsAskedAndNoBetter) {
  for (const size_t alignment : {8, 16, 64, 256}) {
    const Storage storage(10, alignment);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(storage.data()) % (2 * alignment), alignment);
  }
}

}  // namespace
}  // namespace tea::kit
