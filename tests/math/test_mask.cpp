// mask.h: band, visible and visible_columns against the sentence in the contract, by brute force.
#include <gtest/gtest.h>

#include "math/mask.h"

namespace tea {
namespace {

// "Key c is allowed iff r + delta - left <= c <= r + delta + right; causal caps right at 0."
bool allowed(const MaskRule& m, int64_t delta, int64_t r, int64_t c) {
  if (m.window_left && c < r + delta - (m.window_left - 1)) return false;
  if (m.window_right && c > r + delta + (m.window_right - 1)) return false;
  return !m.causal || c <= r + delta;
}

TEST(Mask, EveryRuleMatchesTheSentence) {
  for (int32_t causal : {0, 1})
    for (int32_t bottom_right : {0, 1})
      for (int64_t left : {0, 1, 2, 5})
        for (int64_t right : {0, 1, 3})
          for (int64_t q : {0, 1, 4, 7})
            for (int64_t kv : {0, 1, 4, 9}) {
              const MaskRule m{causal, bottom_right, left, right};
              const int64_t delta = diagonal(bottom_right, q, kv);
              ASSERT_EQ(delta, bottom_right ? kv - q : 0);
              const Band b = band(m, delta, 0, 0);
              for (int64_t r = 0; r < q; ++r) {
                const Columns cols = visible_columns(b, r, kv);
                for (int64_t c = 0; c < kv; ++c) {
                  ASSERT_EQ(visible(b, r, c), allowed(m, delta, r, c));
                  ASSERT_EQ(c >= cols.begin && c < cols.end, allowed(m, delta, r, c));
                }
              }
            }
}

// A shard sees what its rows and columns see in the whole problem.
TEST(Mask, OriginsPlaceAShard) {
  const MaskRule m{1, 0, 6, 0};
  const Band whole = band(m, 0, 0, 0);
  for (int64_t row0 : {0, 3, 8})
    for (int64_t col0 : {0, 2, 9}) {
      const Band shard = band(m, 0, row0, col0);
      for (int64_t r = 0; r < 8; ++r)
        for (int64_t c = 0; c < 8; ++c)
          ASSERT_EQ(visible(shard, r, c), visible(whole, r + row0, c + col0));
    }
}

TEST(Mask, OriginsFromMemoryAreClamped) {
  bool valid = true;
  EXPECT_EQ(clamp_origin(0, &valid), 0);
  EXPECT_EQ(clamp_origin(kMaxOrigin, &valid), kMaxOrigin);
  EXPECT_TRUE(valid);
  const struct {
    int64_t seen, clamped;
  } rows[] = {{-1, 0}, {INT64_MIN, 0}, {kMaxOrigin + 1, kMaxOrigin}, {INT64_MAX, kMaxOrigin}};
  for (const auto& row : rows) {
    valid = true;
    EXPECT_EQ(clamp_origin(row.seen, &valid), row.clamped);
    EXPECT_FALSE(valid) << row.seen;
  }
}

TEST(Mask, NoBoundNeverOverflows) {
  const Band b = band({0, 0, 0, 0}, int64_t{1} << 40, int64_t{1} << 40, 0);
  const Columns c = visible_columns(b, int64_t{1} << 40, int64_t{1} << 41);
  EXPECT_EQ(c.begin, 0);
  EXPECT_EQ(c.end, int64_t{1} << 41);
}

}  // namespace
}  // namespace tea
