// Finding cuDNN, and doing without it.
#include <gtest/gtest.h>

#include "cudnn/library.h"

namespace tea::cudnn {
namespace {

TEST(CudnnLibrary, SaysWhyItWasNotFound) {
  const Library none = load("libcudnn_missing.so.9");
  EXPECT_FALSE(none.symbols);
  EXPECT_EQ(none.version, 0u);
  EXPECT_NE(none.why_none.find("libcudnn_missing.so.9"), std::string::npos) << none.why_none;
}

// Any library will do that is no cuDNN: then it is too old.
TEST(CudnnLibrary, HasNoVersionWhereItIsAnotherLibrary) {
  const Library other = load("libc.so.6");
  EXPECT_TRUE(other.symbols);
  EXPECT_EQ(other.version, 0u);
}

TEST(CudnnLibrary, IsKeptOnceItWasFound) { EXPECT_EQ(library().symbols, library().symbols); }

TEST(CudnnLibrary, HasAVersionOrAReason) {
  const Library found = library();
  EXPECT_EQ(found.symbols == nullptr, !found.why_none.empty());
  EXPECT_EQ(found.symbols == nullptr, found.version == 0);
}

}  // namespace
}  // namespace tea::cudnn
