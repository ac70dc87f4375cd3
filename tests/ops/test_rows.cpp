// Rows as bytes and as doubles.
#include "buffer.h"
#include "ops/rows.h"

namespace tea {
namespace {

TEST(Rows, CopyAndZeroFollowTheStrides) {
  // Two heads of 3 elements: side by side in one buffer, 5 elements apart in the other.
  Buffer dense(TEA_FP16, {1, 2, 3, 4, 5, 6}), spread(TEA_FP16, 20);
  const Rows from = rows_of(dense.data(), {6, 6, 3}, 2, 3, 2);
  const Rows to = rows_of(spread.data(), {20, 10, 5}, 2, 3, 2);
  copy_row(to, to.row(0, 1), from, from.row(0, 0));
  for (int64_t i = 0; i < 20; ++i) {
    const int64_t column = (i - 10) % 5;
    if (i < 10 || column >= 3)
      EXPECT_TRUE(spread.untouched(i)) << i;
    else
      EXPECT_EQ(spread[i], (i - 10) / 5 * 3 + column + 1);
  }
  zero_row(to, to.row(0, 1));
  EXPECT_EQ(spread[17], 0);
  EXPECT_TRUE(spread.untouched(18));
}

TEST(Rows, LoadAndStoreEveryDtype) {
  for (int32_t dtype : kEveryDtype) {
    Buffer buffer(dtype, {0.5, -1, 2, 100, 4});
    double row[3];
    load_row(buffer.data(), dtype, 1, 3, row);
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(row[i], buffer[i + 1]);
    const double fresh[2] = {8, -0.25};
    store_row(buffer.data(), dtype, 0, 2, fresh);
    EXPECT_EQ(buffer[0], 8);
    EXPECT_EQ(buffer[1], -0.25);
    EXPECT_EQ(buffer[2], 2);
  }
}

TEST(Rows, RoundedToIsAStoreAndALoad) {
  EXPECT_EQ(rounded_to(TEA_FP64, 0.1), 0.1);
  EXPECT_EQ(rounded_to(TEA_FP32, 0.1), double{0.1f});
  EXPECT_EQ(rounded_to(TEA_FP16, 2049), 2048);
  EXPECT_EQ(rounded_to(TEA_BF16, 257), 256);
  EXPECT_EQ(rounded_to(TEA_E4M3, 1000), 448);
  EXPECT_EQ(rounded_to(TEA_E5M2, 9), 8);
}

}  // namespace
}  // namespace tea
