// guarded, set_last_error, last_error and copy_text: every exception becomes a status and a text.
#include <gtest/gtest.h>

#include "core/boundary.h"

namespace tea {
namespace {

TEST(Guarded, TurnsEveryExceptionIntoAStatus) {
  EXPECT_EQ(guarded([] {}), TEA_OK);
  EXPECT_EQ(guarded([] { throw Error(TEA_UNSUPPORTED, "no"); }), TEA_UNSUPPORTED);
  EXPECT_STREQ(last_error(), "no");
  EXPECT_EQ(guarded([] { throw std::bad_alloc(); }), TEA_FAILED);
  EXPECT_STREQ(last_error(), "out of memory");
  EXPECT_EQ(guarded([] { throw std::runtime_error("broken"); }), TEA_FAILED);
  EXPECT_STREQ(last_error(), "broken");
  EXPECT_EQ(guarded([] { throw 1; }), TEA_FAILED);
  EXPECT_STREQ(last_error(), "an exception of unknown type");
}

TEST(Guarded, SuccessKeepsTheLastError) {
  set_last_error("earlier");
  guarded([] {});
  EXPECT_STREQ(last_error(), "earlier");
}

TEST(CopyText, NeverWritesBeyondTheCapacity) {
  for (size_t capacity = 1; capacity < 9; ++capacity) {
    char buffer[10] = "#########";
    size_t needed = 0;
    copy_text("hello", buffer, capacity, &needed);
    EXPECT_EQ(needed, 6u);
    EXPECT_EQ(std::string(buffer), std::string("hello").substr(0, capacity - 1));
    EXPECT_EQ(buffer[capacity], '#');
  }
  EXPECT_NO_THROW(copy_text("hello", nullptr, 0, nullptr));
}

TEST(Require, BuildsTheThreePartsOfAMessage) {
  try {
    TEA_REQUIRE(false, "heads", 3, "at least 4");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.status, TEA_INVALID);
    EXPECT_STREQ(e.what(), "heads is 3; needs at least 4");
  }
}

}  // namespace
}  // namespace tea
