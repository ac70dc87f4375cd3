// dropout.h: the published known answers of Philox4x32-10, the cell map, the keep rate.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "math/dropout.h"

namespace tea {
namespace {

// The known-answer vectors that accompany the Random123 library.
TEST(Philox, PublishedVectors) {
  const struct {
    Philox4 counter;
    uint64_t key;
    Philox4 want;
  } rows[] = {
      {{{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{~0u, ~0u, ~0u, ~0u}}, ~uint64_t{0}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0x299f31d0a4093822u,
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const auto& row : rows) {
    const Philox4 got = philox4x32_10(row.counter, row.key);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], row.want.word[i]) << i;
  }
}

TEST(Dropout, EachUniformOfACellServesOneElement) {
  const RngState rng{42, 7};
  // cell (first two words of its counter, read back through equality of the result) and index
  std::map<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>, int> elements;
  for (int64_t row = 0; row < 32; ++row)
    for (int64_t col = 0; col < 32; ++col) {
      const Philox4 c = dropout_cell(rng, 0, row, col);
      ++elements[{c.word[0], c.word[1], c.word[2], c.word[3]}];
    }
  EXPECT_EQ(elements.size(), 32u * 32u / 8u);
  for (const auto& [cell, count] : elements) EXPECT_EQ(count, 8);
}

TEST(Dropout, TheCellOfAFragmentThread) {
  const RngState rng{1, 2};
  const Philox4 cell = dropout_cell(rng, 5, 16 + 3, 32 + 4);
  int index = 0;
  for (const int64_t row : {19, 27})
    for (const int64_t col : {36, 37, 44, 45}) {
      const Philox4 same = dropout_cell(rng, 5, row, col);
      for (int i = 0; i < 4; ++i) EXPECT_EQ(same.word[i], cell.word[i]);
      EXPECT_EQ(dropout_uniform(cell, row, col), cell.word[index / 2] >> 16 * (index % 2) & 0xFFFF);
      ++index;
    }
}

TEST(Dropout, SeedOffsetAndStreamAllCount) {
  std::set<uint32_t> words;
  const uint64_t high = uint64_t{1} << 32;
  for (const RngState rng : {RngState{1, 1}, {2, 1}, {1 + 2 * high, 1}, {1, 2}, {1, 1 + high}})
    for (const uint32_t stream : {dropout_stream(0, 0), dropout_stream(0, 1), dropout_stream(1, 0)})
      words.insert(dropout_cell(rng, stream, 0, 0).word[0]);
  EXPECT_EQ(words.size(), 15u);
}

TEST(Dropout, ThresholdsRoundAndTheKeepRateFollows) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0.5f), 32768u);
  EXPECT_EQ(dropout_threshold(0.1f), 6554u);
  for (const float p : {0.1f, 0.5f, 0.9f}) {
    const uint32_t threshold = dropout_threshold(p);
    const int64_t n = 1024;
    int64_t kept = 0;
    for (int64_t row = 0; row < n; ++row)
      for (int64_t col = 0; col < n; ++col) kept += dropout_keeps({3, 4}, 9, row, col, threshold);
    const double total = static_cast<double>(n * n), want = total * (1 - threshold / 65536.0);
    // Five standard deviations of a binomial; the draw is fixed, so this cannot flicker.
    EXPECT_NEAR(static_cast<double>(kept), want, 5 * std::sqrt(total * p * (1 - p)));
  }
}

}  // namespace
}  // namespace tea
