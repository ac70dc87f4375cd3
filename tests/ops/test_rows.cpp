// Rows as bytes and as doubles.
#include "buffer.h"
#include "ops/rows.h"

namespace tea {
namespace {

TEST(Rows, PlacesFollowTheStrides) {
  Buffer spread(TEA_FP16, 40);
  const Rows rows = rows_of(spread.data(), {20, 10, 5}, 2, 3, 2);
  EXPECT_EQ(rows.at(1, 0, 1) - static_cast<char*>(spread.data()), 2 * 25);
  EXPECT_EQ(rows.at(0, 1, 0) - static_cast<char*>(spread.data()), 2 * 10);
}

TEST(Rows, RunsAreAsLongAsBothSidesAllow) {
  // Two heads of 4 elements: side by side in one buffer, 6 elements apart in the other.
  alignas(16) const char dense[64] = {}, spread[64] = {};
  const Rows from = rows_of(dense, {8, 8, 4}, 2, 4, 2), to = rows_of(spread, {24, 12, 6}, 2, 4, 2);
  Moves whole, by_head;
  set_runs(whole, from, from);
  EXPECT_EQ(whole.moves, 1);
  EXPECT_EQ(whole.bytes, 16);
  EXPECT_EQ(whole.alignment % 16, 0u);
  set_runs(by_head, from, to);
  EXPECT_EQ(by_head.moves, 2);
  EXPECT_EQ(by_head.bytes, 8);
  EXPECT_EQ(by_head.alignment % 8, 4u);  // 6 elements are 12 bytes
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
