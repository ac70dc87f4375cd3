// Guarded: the data can be used to its last byte, and one byte further is a crash.
#include <gtest/gtest.h>

#include <cstring>

#include "kit/guarded.h"

namespace tea::kit {
namespace {

TEST(Guarded, OneByteOutsideIsACrash) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const size_t bytes : {size_t{4}, page, page + 12}) {
    const Guarded first(bytes, Flush::kStart), last(bytes, Flush::kEnd);
    std::memset(first.data(), 1, bytes), std::memset(last.data(), 1, bytes);
    EXPECT_DEATH(static_cast<volatile uint8_t*>(first.data())[-1] = 0, "");
    EXPECT_DEATH(static_cast<volatile uint8_t*>(last.data())[bytes] = 0, "");
  }
}

TEST(Guarded, NothingCanBeTouchedOfEmptyMemory) {
  const Guarded none(0, Flush::kEnd);
  EXPECT_DEATH(*static_cast<volatile uint8_t*>(none.data()) = 0, "");
}

}  // namespace
}  // namespace tea::kit
